"""Masks are drawn from all that a worker was shown: a server that shows one of them something else, now or
earlier, learns nothing, not even the sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
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
from afl.core.messages import EVALUATION_PHASE, Ack, AckStatus, CommittedStep, Kind, Position, Step
from afl.core.randomness import SharedRandomness
from afl.errors import ExitCode
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import Frame, parse_worker_frame, position_message, report_of
from afl.wire.settings import RunSettings
from afl_server.federation.broadcast import model_payloads
from afl_worker.conversation import CannotGoOnError, Conversation
from afl_worker.network.credentials import PeerFiles
from afl_worker.options import WorkerOptions
from afl_worker.training.timings import Spent

FIRST, SECOND, EVALUATION = Position(1, 0), Position(2, 0), Position(2, EVALUATION_PHASE)
STEPS = {FIRST: Kind.TRAIN, SECOND: Kind.TRAIN, EVALUATION: Kind.EVALUATE}


def settings_of(losses: str = "hidden", **changes: Any) -> RunSettings:
    config = {
        "workers": 3,
        "worker": {"journal": "off"},
        "task": {"name": "synthetic", "batch_size": 4, "options": {"dim": 400}},
        "algorithm": {
            "name": "afl-com",
            "rounds": 10,
            "eta_w": 0.05,
            "eta_q": 0.1,
            "uplink": {"name": "rand-k", "ratio": 0.5, "bits": 16},
        },
        "privacy": {"secure_aggregation": True, "losses": losses},
        **changes,
    }
    return RunSettings.of_config(config_from_mapping(config))


@dataclass
class Shown:
    """What the server shows a process: by step, the parameters and the sum that weights are divided by."""

    settings: RunSettings = field(default_factory=settings_of)
    seed: int = 7
    factors: dict[Position, float] = field(default_factory=dict)
    totals: dict[Position, float] = field(default_factory=dict)
    left_out: set[Position] = field(default_factory=set)

    def model(self, position: Position) -> CommittedStep:
        randomness = SharedRandomness.from_int(7)
        vector = build_vector(load_task("synthetic", {"dim": 400}, allow_path=True), randomness)
        run = replace(self.settings.parameters, tensors=vector.tensors)
        half = server_half(run, vector.values, randomness)
        vector.values.fill_(self.factors.get(position, 1.0))
        payloads = model_payloads(vector, vector.values, half.companions)
        step = Step(position, Kind.MODEL, tuple(payload.header for payload in payloads))
        return CommittedStep(step, tuple(payload.data for payload in payloads), {})

    def step(self, position: Position, workers: Sequence[int]) -> CommittedStep:
        totals = dict.fromkeys(workers, self.totals.get(position, 1.0))
        return CommittedStep(Step(position, STEPS[position]), (), totals)


class Federation:
    """Processes that host these workers, each of which is shown the same or not."""

    def __init__(self, folder: Path, shown: Sequence[Shown], hosted: Sequence[Sequence[int]]) -> None:
        self.shown = shown
        self.processes = [
            Conversation(
                WorkerOptions(
                    tuple(workers),
                    Address("127.0.0.1", 1),
                    journal=folder,
                    peers=PeerFiles(trusts_server=True),
                ),
                torch.device("cpu"),
                Spent(),
            )
            for workers in hosted
        ]
        self.hosted = hosted
        self.agree(1, FIRST)

    def agree(self, epoch: int, open_: Position) -> None:
        offers = []
        for process, shown, workers in zip(self.processes, self.shown, self.hosted, strict=True):
            expected = [pb.Expectation(worker=worker, position=position_message(open_)) for worker in workers]
            welcome = pb.Welcome(
                run_id="run-1",
                settings=shown.settings.to_message(),
                seed=SharedRandomness.from_int(shown.seed).seed,
                key_epoch=epoch,
                workers=expected,
            )
            offers.append(process.welcome(welcome, shown.settings).keys)
        for process in self.processes:
            process.roster(pb.Roster(epoch=epoch, offers=offers))

    def sums(self, position: Position) -> list[NDArray[Any]]:
        """Of each payload, over all whom the server asks."""
        sums: list[NDArray[Any]] = []
        for process, shown, workers in zip(self.processes, self.shown, self.hosted, strict=True):
            if position in shown.left_out:
                continue
            assert not list(process.step(shown.model(position)))
            for told in map(residues, process.step(shown.step(position, workers))):
                sums = [total + each for total, each in zip(sums, told, strict=True)] if sums else told
        return sums


def residues(frames: Iterable[Frame]) -> list[NDArray[Any]]:
    parsed = [parse_worker_frame(frame.data) for frame in frames]
    (message,) = (report for frame in parsed for report in frame.reports)
    found = []
    for place, header in enumerate(report_of(message).payloads):
        data = b"".join(chunk.data for frame in parsed for chunk in frame.chunks if chunk.payload == place)
        found.append(unpack(header, data).values)
    return found


def is_readable(sums: Sequence[NDArray[Any]]) -> bool:
    """Whether all integers are small, rather than some anywhere in their range."""
    return all(
        np.abs(signed(each, 8 * each.itemsize).astype(np.float64)).max() < 2.0 ** (8 * each.itemsize - 3)
        for each in sums
    )


OTHER_BATCH = {"name": "synthetic", "batch_size": 5, "options": {"dim": 400}}
OF_THE_SERVER = {"heartbeat": "3s", "chunk_bytes": 4096}


@pytest.mark.parametrize(
    ("lie", "readable"),
    [
        (Shown(), [True, True, True]),
        # What may change whenever the server is started.
        (Shown(settings_of(server=OF_THE_SERVER)), [True, True, True]),
        (Shown(settings_of(task=OTHER_BATCH)), [False, False, False]),
        (Shown(seed=8), [False, False, False]),
        (Shown(factors={FIRST: 1 + 2.0**-23}), [False, False, False]),
        (Shown(factors={SECOND: 0.0}), [True, False, False]),
        (Shown(factors={EVALUATION: 0.0}), [True, True, False]),
        (Shown(totals={FIRST: 1e-9}), [False, False, False]),
        (Shown(totals={SECOND: 1e-9}), [True, False, False]),
        # It has a residual that the others have not.
        (Shown(left_out={FIRST}), [False, False, False]),
    ],
    ids=[
        *("the same", "another heartbeat", "settings", "seed", "model", "later model", "model to evaluate"),
        *("divisor", "later divisor", "left out"),
    ],
)
def test_where_one_worker_was_shown_something_else_the_masks_do_not_cancel(
    lie: Shown, readable: list[bool], tmp_path: Path
) -> None:
    federation = Federation(tmp_path, [Shown(), Shown(), lie], [[0], [1], [2]])
    assert [is_readable(federation.sums(position)) for position in STEPS] == readable


def test_workers_of_one_process_cannot_be_shown_different_things(tmp_path: Path) -> None:
    federation = Federation(tmp_path, [Shown(), Shown()], [[0, 1], [2]])
    process, shown = federation.processes[0], federation.shown[0]
    list(process.step(shown.model(FIRST)))
    step = shown.step(FIRST, [0, 1])
    with pytest.raises(CannotGoOnError, match="worker 1 was shown something else than the other workers"):
        list(process.step(replace(step, dual_weights={0: 1.0, 1: 0.5})))


def test_nor_one_after_the_other(tmp_path: Path) -> None:
    federation = Federation(tmp_path, [Shown(), Shown()], [[0, 1], [2]])
    process, shown = federation.processes[0], federation.shown[0]
    list(process.step(shown.model(FIRST)))
    (_,) = process.step(replace(shown.step(FIRST, [0]), participants=frozenset({0})))
    list(process.step(Shown(factors={FIRST: 0.0}).model(FIRST)))
    with pytest.raises(CannotGoOnError, match="worker 1 was shown something else than the other workers"):
        list(process.step(shown.step(FIRST, [0, 1])))


def test_a_masked_report_is_never_late(tmp_path: Path) -> None:
    federation = Federation(tmp_path, [Shown()] * 3, [[0], [1], [2]])
    federation.sums(FIRST)
    with pytest.raises(CannotGoOnError, match="calls a masked report late") as caught:
        federation.processes[2].answered(Ack(2, FIRST, AckStatus.LATE))
    assert caught.value.error.exit_code is ExitCode.REFUSED


@pytest.mark.parametrize("losses", ["hidden", "shown"])
def test_under_other_keys_all_begin_anew(losses: str, tmp_path: Path) -> None:
    shown = [Shown(settings_of(losses)) for _ in range(3)]
    one = Federation(tmp_path, shown, [[0], [1], [2]])
    first = one.sums(SECOND)
    # What the server has shown one of them under keys that are void is forgotten with what it has left.
    lied_to = [Shown(shown[0].settings), Shown(shown[0].settings), Shown(shown[0].settings)]
    lied_to[2].factors = {FIRST: 0.0}
    other = Federation(tmp_path, lied_to, [[0], [1], [2]])
    assert not is_readable(other.sums(FIRST))
    other.agree(2, SECOND)
    again = other.sums(SECOND)
    assert is_readable(again)
    assert [each.tolist() for each in again] == [each.tolist() for each in first]


def test_under_the_same_keys_nothing_is_forgotten(tmp_path: Path) -> None:
    of_two = []
    for cuts in (False, True):
        federation = Federation(tmp_path, [Shown()] * 3, [[0], [1], [2]])
        federation.sums(FIRST)
        if cuts:
            federation.agree(1, SECOND)
        of_two.append([each.tolist() for each in federation.sums(SECOND)])
    assert of_two[0] == of_two[1]
