"""Masks are drawn from all that a worker was shown: a server that shows one of them something else, now or
earlier, learns nothing, not even the sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
EVALUATION_OF_FIRST = Position(1, EVALUATION_PHASE)
STEPS = {FIRST: Kind.TRAIN, SECOND: Kind.TRAIN, EVALUATION: Kind.EVALUATE}


SYNTHETIC = {"name": "synthetic", "batch_size": 4, "options": {"dim": 400}}


def settings_of(losses: str = "hidden", **changes: Any) -> RunSettings:
    config = {
        "workers": 3,
        "worker": {"journal": "process"},
        "task": SYNTHETIC,
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
        task = load_task(self.settings.task, self.settings.task_options, allow_path=True)
        vector = build_vector(task, randomness)
        run = replace(self.settings.parameters, tensors=vector.tensors)
        half = server_half(run, vector.values, randomness)
        vector.values.fill_(self.factors.get(position, 1.0))
        payloads = model_payloads(vector, vector.values, half.companions)
        step = Step(position, Kind.MODEL, tuple(payload.header for payload in payloads))
        return CommittedStep(step, tuple(payload.data for payload in payloads), {})

    def step(self, position: Position, workers: Sequence[int]) -> CommittedStep:
        totals = dict.fromkeys(workers, self.totals.get(position, 1.0))
        return CommittedStep(Step(position, STEPS.get(position, Kind.EVALUATE)), (), totals)


class Federation:
    """Processes that host these workers, each of which is shown the same or not."""

    def __init__(self, folder: Path, shown: Sequence[Shown], hosted: Sequence[Sequence[int]]) -> None:
        self.folder, self.shown, self.hosted = folder, shown, hosted
        self.processes = [self.process(workers) for workers in hosted]
        self.agree(1, FIRST)

    def process(self, workers: Sequence[int]) -> Conversation:
        peers = PeerFiles(trusts_server=True)
        task = self.shown[0].settings.task
        options = WorkerOptions(
            tuple(workers),
            Address("127.0.0.1", 1),
            task=task if ":" in task else None,
            journal=self.folder,
            peers=peers,
        )
        return Conversation(options, torch.device("cpu"), Spent())

    def start_again(self, place: int) -> None:
        self.processes[place].forget(is_complete=False)
        self.processes[place] = self.process(self.hosted[place])

    def close(self) -> None:
        for process in self.processes:
            process.finished("run-1")

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


Begun = Callable[..., Federation]
APART = ((0,), (1,), (2,))


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begun]:
    """Federations that have agreed on keys."""
    made: list[Federation] = []

    def begin(shown: Sequence[Shown], hosted: Sequence[Sequence[int]] = APART) -> Federation:
        made.append(Federation(tmp_path / str(len(made)), shown, hosted))
        return made[-1]

    yield begin
    for each in made:
        each.close()


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
        (Shown(totals={FIRST: 2.0}), [False, False, False]),
        (Shown(totals={SECOND: 2.0}), [True, False, False]),
        # It has a residual that the others have not.
        (Shown(left_out={FIRST}), [False, False, False]),
    ],
    ids=[
        *("the same", "another heartbeat", "settings", "seed", "model", "later model", "model to evaluate"),
        *("divisor", "later divisor", "left out"),
    ],
)
def test_where_one_worker_was_shown_something_else_the_masks_do_not_cancel(
    lie: Shown, readable: list[bool], begun: Begun
) -> None:
    federation = begun([Shown(), Shown(), lie])
    assert [is_readable(federation.sums(position)) for position in STEPS] == readable


def test_workers_of_one_process_cannot_be_shown_different_things(begun: Begun) -> None:
    federation = begun([Shown(), Shown()], [[0, 1], [2]])
    process, shown = federation.processes[0], federation.shown[0]
    list(process.step(shown.model(FIRST)))
    step = shown.step(FIRST, [0, 1])
    with pytest.raises(CannotGoOnError, match="worker 1 was shown something else than the other workers"):
        list(process.step(replace(step, dual_weights={0: 1.0, 1: 0.5})))


def test_nor_one_after_the_other(begun: Begun) -> None:
    federation = begun([Shown(), Shown()], [[0, 1], [2]])
    process, shown = federation.processes[0], federation.shown[0]
    list(process.step(shown.model(FIRST)))
    (_,) = process.step(replace(shown.step(FIRST, [0]), participants=frozenset({0})))
    list(process.step(Shown(factors={FIRST: 0.0}).model(FIRST)))
    with pytest.raises(CannotGoOnError, match="worker 1 was shown something else than the other workers"):
        list(process.step(shown.step(FIRST, [0, 1])))


def test_a_divisor_below_a_workers_own_part_of_it_is_refused(begun: Begun) -> None:
    federation = begun([Shown(), Shown(), Shown(totals={SECOND: 1e-9})])
    federation.sums(FIRST)
    with pytest.raises(CannotGoOnError, match="add up to 1e-09, which is less than this worker's alone"):
        federation.sums(SECOND)


def test_a_masked_report_is_never_late(begun: Begun) -> None:
    federation = begun([Shown()] * 3)
    federation.sums(FIRST)
    with pytest.raises(CannotGoOnError, match="calls a masked report late") as caught:
        federation.processes[2].answered(Ack(2, FIRST, AckStatus.LATE))
    assert caught.value.error.exit_code is ExitCode.REFUSED


@pytest.mark.parametrize("losses", ["hidden", "shown"])
def test_under_other_keys_all_begin_anew(losses: str, begun: Begun) -> None:
    shown = [Shown(settings_of(losses)) for _ in range(3)]
    one = begun(shown)
    first = one.sums(SECOND)
    # What the server has shown one of them under keys that are void is forgotten with what it has left.
    lied_to = [Shown(shown[0].settings), Shown(shown[0].settings), Shown(shown[0].settings)]
    lied_to[2].factors = {FIRST: 0.0}
    other = begun(lied_to)
    assert not is_readable(other.sums(FIRST))
    other.agree(2, SECOND)
    again = other.sums(SECOND)
    assert is_readable(again)
    assert [each.tolist() for each in again] == [each.tolist() for each in first]


def test_under_the_same_keys_nothing_is_forgotten(begun: Begun) -> None:
    of_two = []
    for cuts in (False, True):
        federation = begun([Shown()] * 3)
        federation.sums(FIRST)
        if cuts:
            federation.agree(1, SECOND)
        of_two.append([each.tolist() for each in federation.sums(SECOND)])
    assert of_two[0] == of_two[1]


@pytest.mark.parametrize("losses", ["hidden", "shown"])
def test_a_process_that_comes_back_with_its_report_into_other_keys_makes_another(
    losses: str, begun: Begun
) -> None:
    federation = begun([Shown(settings_of(losses))] * 3)
    for position in (FIRST, SECOND):
        federation.sums(position)
    federation.start_again(2)
    federation.agree(2, SECOND)
    assert is_readable(federation.sums(SECOND))
    # Killed once it has been told of other keys, and before it has sent anything under them.
    federation.agree(3, EVALUATION)
    federation.start_again(1)
    federation.agree(4, EVALUATION)
    assert is_readable(federation.sums(EVALUATION))


def test_under_the_same_keys_a_process_goes_on_from_its_journal(begun: Begun) -> None:
    of_two = []
    for restarts in (False, True):
        federation = begun([Shown(settings_of("shown"))] * 3)
        for position in (FIRST, EVALUATION_OF_FIRST):
            federation.sums(position)
        if restarts:
            federation.start_again(2)
            federation.agree(1, SECOND)
        of_two.append([each.tolist() for each in federation.sums(SECOND)])
    assert of_two[0] == of_two[1]


def test_under_other_keys_buffers_are_as_in_the_beginning(begun: Begun) -> None:
    task = {"name": "support.tests_tasks:LocalNorm", "batch_size": 4}
    federation = begun([Shown(settings_of(task=task))] * 3)

    def statistics() -> list[list[int]]:
        vectors = [process._trained.participant.vector for process in federation.processes]  # noqa: SLF001
        return [
            array.tolist()
            for worker, vector in enumerate(vectors)
            for array in vector.buffers.contents(worker).values()
        ]

    first = statistics()
    federation.sums(FIRST)
    assert statistics() != first
    federation.start_again(2)
    federation.agree(2, SECOND)
    for process, shown in zip(federation.processes, federation.shown, strict=True):
        list(process.step(shown.model(SECOND)))
    assert statistics() == first


def test_what_settings_say_of_a_task_is_told_apart_as_a_task_can() -> None:
    def digest(**options: Any) -> bytes:
        task = {"name": "tests_tasks:Any", "batch_size": 4, "options": options}
        return settings_of(task=task).digest()

    one = digest(a=1, b=2)
    assert digest(b=2, a=1) == one
    others = [digest(a=1), digest(a=1.0, b=2), digest(a=1, b=0), digest(a=1, b=None), digest(a=True, b=2)]
    assert len({one, *others, digest(a=1, b=[]), digest(a={"b": 1}), digest(**{"a.b": 1})}) == 9
