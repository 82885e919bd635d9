"""Masks are bound to what a worker was shown: a server that shows one of them something else learns
nothing, not even the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from afl.config import config_from_mapping
from afl.config.address import Address
from afl.core.algorithms.registry import server_half
from afl.core.codecs.modular import signed
from afl.core.codecs.payload import unpack
from afl.core.messages import EVALUATION_PHASE, CommittedStep, Kind, Position, Step
from afl.core.randomness import SharedRandomness
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import Frame, parse_worker_frame, report_of
from afl.wire.settings import RunSettings
from afl_server.federation.broadcast import model_payloads
from afl_worker.conversation import Conversation
from afl_worker.network.credentials import PeerFiles
from afl_worker.options import WorkerOptions
from afl_worker.training.timings import Spent

FIRST, EVALUATION = Position(1, 0), Position(1, EVALUATION_PHASE)
WORKERS = range(3)


def settings_of(**changes: Any) -> RunSettings:
    config = {
        "workers": len(WORKERS),
        "worker": {"journal": "off"},
        "task": {"name": "synthetic", "batch_size": 4, "options": {"dim": 400}},
        "algorithm": {
            "name": "afl-com",
            "rounds": 10,
            "eta_w": 0.05,
            "eta_q": 0.1,
            "uplink": {"name": "rand-k", "ratio": 0.5, "bits": 16},
        },
        "privacy": {"secure_aggregation": True, "losses": "hidden"},
        **changes,
    }
    return RunSettings.of_config(config_from_mapping(config))


class Shown:
    """What the server tells one worker."""

    def __init__(self) -> None:
        self.settings = settings_of()
        self.seed = 7
        self.factor = 1.0
        self.total = 1.0
        self.evaluated_factor = 1.0

    def model(self, position: Position, factor: float) -> CommittedStep:
        randomness = SharedRandomness.from_int(7)
        task = load_task("synthetic", {"dim": 400}, allow_path=True)
        vector = build_vector(task, randomness)
        run = replace(self.settings.parameters, tensors=vector.tensors)
        half = server_half(run, vector.values, randomness)
        vector.values.fill_(factor)
        payloads = model_payloads(vector, vector.values, half.companions)
        step = Step(position, Kind.MODEL, tuple(payload.header for payload in payloads))
        return CommittedStep(step, tuple(payload.data for payload in payloads), {})


Lie = Callable[[Shown], None]


def sums_of_run(folder: Path, lie: Lie) -> list[NDArray[Any]]:
    """The sums of all workers' payloads, of a training step and of an evaluation; worker 2 is lied to."""
    shown = [Shown() for _ in WORKERS]
    lie(shown[2])
    workers = [
        Conversation(
            WorkerOptions(
                (worker,),
                Address("127.0.0.1", 1),
                journal=folder,
                peers=PeerFiles(trusts_server=True),
            ),
            torch.device("cpu"),
            Spent(),
        )
        for worker in WORKERS
    ]
    offers = []
    for one, seen in zip(workers, shown, strict=True):
        seed = SharedRandomness.from_int(seen.seed).seed
        message = pb.Welcome(run_id="run-1", settings=seen.settings.to_message(), seed=seed, key_epoch=1)
        offers.append(one.welcome(message, seen.settings).keys)
    sums: list[NDArray[Any]] = []
    for one, seen in zip(workers, shown, strict=True):
        one.roster(pb.Roster(epoch=1, offers=offers))
        assert not list(one.step(seen.model(FIRST, seen.factor)))
        total = dict.fromkeys(WORKERS, seen.total)
        told = residues(one.step(CommittedStep(Step(FIRST, Kind.TRAIN), (), total)))
        assert not list(one.step(seen.model(EVALUATION, seen.evaluated_factor)))
        told += residues(one.step(CommittedStep(Step(EVALUATION, Kind.EVALUATE), (), {})))
        sums = [total + each for total, each in zip(sums, told, strict=True)] if sums else told
    return sums


def residues(reports: Iterable[Iterable[Frame]]) -> list[NDArray[Any]]:
    (frames,) = (list(frames) for frames in reports)
    parsed = [parse_worker_frame(frame.data) for frame in frames]
    (message,) = (report for frame in parsed for report in frame.reports)
    found = []
    for place, header in enumerate(report_of(message).payloads):
        data = b"".join(chunk.data for frame in parsed for chunk in frame.chunks if chunk.payload == place)
        found.append(unpack(header, data).values)
    return found


def nothing(_: Shown) -> None:
    pass


def other_model(shown: Shown) -> None:
    shown.factor = 1.0 + 2.0**-23


def other_model_to_evaluate(shown: Shown) -> None:
    shown.evaluated_factor = 2.0


def other_divisor(shown: Shown) -> None:
    shown.total = 1e-9


def other_settings(shown: Shown) -> None:
    shown.settings = settings_of(task={"name": "synthetic", "batch_size": 5, "options": {"dim": 400}})


def other_seed(shown: Shown) -> None:
    shown.seed = 8


def other_start(shown: Shown) -> None:
    """What may change whenever the server is started."""
    shown.settings = settings_of(server={"heartbeat": "3s", "chunk_bytes": 4096})


@pytest.mark.parametrize(
    ("lie", "is_trained", "is_evaluated"),
    [
        (nothing, True, True),
        (other_start, True, True),
        (other_model, False, True),
        (other_model_to_evaluate, True, False),
        (other_divisor, False, True),
        (other_settings, False, False),
        (other_seed, False, False),
    ],
)
def test_where_one_worker_was_shown_something_else_the_masks_do_not_cancel(
    lie: Lie, is_trained: bool, is_evaluated: bool, tmp_path: Path
) -> None:
    update, share, metrics = sums_of_run(tmp_path, lie)
    assert [is_sum(update, 16), is_sum(share, 64), is_sum(metrics, 64)] == [
        is_trained,
        is_trained,
        is_evaluated,
    ]


def is_sum(residues: NDArray[Any], bits: int) -> bool:
    """Whether all of them are small, rather than some anywhere in their range."""
    return bool(np.abs(signed(residues, bits).astype(np.float64)).max() < 2.0 ** (bits - 3))
