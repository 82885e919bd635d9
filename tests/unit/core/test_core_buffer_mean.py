"""The exchange of buffers before an evaluation: the engine's and the participant's side of it."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from afl.core.algorithms.registry import server_half, worker_side
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.messages import (
    BUFFERS_PHASE,
    EVALUATION_PHASE,
    NOWHERE,
    Ack,
    AckStatus,
    CommittedStep,
    Encoding,
    Kind,
    Payload,
    PayloadHeader,
    Position,
    Report,
    Role,
    Step,
)
from afl.core.model.buffer_mean import BufferMean
from afl.core.model.buffers import ModuleBuffers
from afl.core.model.parameters import ParameterVector
from afl.core.participant import Oracle, Participant
from afl.core.randomness import SharedRandomness
from afl.core.rounds.engine import RoundEngine
from afl.core.rounds.results import Opening
from afl.core.vectors import Weighted
from afl.errors import NonFiniteError, ProtocolError, TaskError

WORKERS = 3
BUFFERS = PayloadHeader(Role.BUFFERS, Encoding.DENSE, 2, 2, 8)
AT = Position(1, BUFFERS_PHASE)
VALUES = {0: (1.0, 10.0), 1: (2.0, 20.0), 2: (6.0, 60.0)}


def packed(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def unpacked(payload: Payload) -> tuple[float, ...]:
    data = b"".join(payload.sections)
    return struct.unpack(f"<{len(data) // 4}f", data)


def engine(name: str = "fedavg", every: int = 2, rounds: int = 4) -> tuple[RoundEngine, nn.BatchNorm1d]:
    """Two rounds a synchronization and evaluation, of one parameter, with a mean and a variance."""
    settings = AlgorithmSettings(WORKERS, rounds, 1, 0.5, 0.25, name=name, local_steps=2)
    algorithm = server_half(settings, torch.zeros(1), SharedRandomness.from_int(3))
    module = nn.BatchNorm1d(1)
    mean = BufferMean.of(ModuleBuffers(module, averaged=True), settings)
    return RoundEngine(algorithm, evaluate_every=every, buffer_mean=mean), module


def train(driven: RoundEngine, synchronization: int = 1) -> Opening:
    header = PayloadHeader(Role.ITERATE, Encoding.DENSE, 1, 1, 4)
    for worker in range(WORKERS):
        driven.begin_report(Report(worker, Position(synchronization, 0), 0.5, 4, (header,)))
        driven.add_piece(worker, 0, 0, packed(3.0))
    opening = driven.advance()
    assert opening is not None
    return opening


def report(worker: int, synchronization: int = 1) -> Report:
    return Report(worker, Position(synchronization, BUFFERS_PHASE), 0.0, 0, (BUFFERS,))


def send(driven: RoundEngine, worker: int, values: tuple[float, ...] | None = None) -> Ack | None:
    ack = driven.begin_report(report(worker, driven.step.position.round))
    _, offset = driven.arrived(worker)
    return ack or driven.add_piece(worker, 0, offset, packed(*(values or VALUES[worker]))[offset:])


def closed(driven: RoundEngine) -> Opening:
    opening = driven.advance()
    assert opening is not None
    return opening


def held(module: nn.BatchNorm1d) -> list[float]:
    assert module.running_mean is not None
    assert module.running_var is not None
    return [module.running_mean.item(), module.running_var.item()]


def evaluate(driven: RoundEngine) -> Opening | None:
    for worker in range(WORKERS):
        driven.begin_report(Report(worker, driven.step.position, 0.1, 5, (), {"loss": 0.1}, b"digest"))
    return driven.advance()


def test_an_evaluation_with_a_mean_by_hand() -> None:
    driven, module = engine()
    opening = train(driven)
    # What the evaluation would bring comes with the buffers' step; no weights, since nobody trains in it.
    assert (opening.step.position, opening.step.kind) == (AT, Kind.BUFFERS)
    assert [payload.header.role for payload in opening.payloads] == [Role.ITERATE]
    assert unpacked(opening.payloads[0]) == (3.0,)
    assert len(opening.dual_weights) == len(driven.opening().dual_weights) == 0
    assert (driven.updates_applied, driven.open_round, driven.missing()) == (2, 2, [0, 1, 2])
    assert driven.last_round is not None
    for worker in (2, 0, 1):
        assert send(driven, worker) == Ack(worker, AT, AckStatus.ACCEPTED)
    assert held(module) == [0, 1]

    opening = closed(driven)
    assert opening.step == Step(Position(1, EVALUATION_PHASE), Kind.EVALUATE, (BUFFERS,))
    assert unpacked(opening.payloads[0]) == (3.0, 30.0)
    assert held(module) == [3.0, 30.0]
    assert opening.dual_weights.tolist() == [1 / 3] * 3
    opening = evaluate(driven)  # type: ignore[assignment]
    assert (opening.step.position, opening.payloads) == (Position(2, 0), ())
    assert driven.last_evaluation is not None
    assert driven.last_evaluation.round == 2

    # The next mean has nothing of the first.
    train(driven, 2)
    for worker in range(WORKERS):
        send(driven, worker, (0.5, 7.0))
    assert unpacked(closed(driven).payloads[0]) == (0.5, 7.0)
    assert evaluate(driven) is None


def test_the_sum_is_float32_in_ascending_worker_id() -> None:
    driven, module = engine()
    train(driven)
    for worker, value in ((2, -1e8), (1, 1.0), (0, 1e8)):
        send(driven, worker, (value, 0.1))
    closed(driven)
    tenth = np.float32(0.1)
    assert held(module) == [0.0, float((tenth + tenth + tenth) / np.float32(3))]


def test_without_floats_to_average_there_is_no_such_step() -> None:
    settings = AlgorithmSettings(WORKERS, 4, 1, 0.5, 0.25)
    assert BufferMean.of(ModuleBuffers(nn.BatchNorm1d(2), averaged=False), settings) is None
    assert BufferMean.of(ModuleBuffers(nn.Linear(2, 2), averaged=True), settings) is None


def test_a_mean_that_would_tell_each_workers_buffers_is_refused() -> None:
    settings = AlgorithmSettings(WORKERS, 4, 1, 0.5, 0.25, secure_aggregation=True)
    with pytest.raises(TaskError, match="which each worker would send without a mask"):
        BufferMean.of(ModuleBuffers(nn.BatchNorm1d(2), averaged=True), settings)


def test_the_buffers_step_may_be_streamed_before_training_closes() -> None:
    driven, _ = engine("afl-com", every=1, rounds=2)
    header = PayloadHeader(Role.UPDATE, Encoding.DENSE, 1, 1, 4)
    assert driven.next_step() == Step(AT, Kind.BUFFERS, (header,))


@pytest.mark.parametrize("cut_at", [4, 8])
def test_a_report_that_was_cut_goes_on_where_it_was(cut_at: int) -> None:
    driven, module = engine()
    train(driven)
    driven.begin_report(report(0))
    driven.begin_report(report(1))
    driven.add_piece(1, 0, 0, packed(*VALUES[1])[:4])
    assert driven.arrived(1) == (0, 4)
    assert driven.collector.waiting_bytes == 4
    assert driven.collector.would_wait(1)
    driven.add_piece(0, 0, 0, packed(*VALUES[0])[:cut_at])
    assert not driven.collector.would_wait(0)
    if cut_at == 8:
        assert send(driven, 0) == Ack(0, AT, AckStatus.DUPLICATE, "already counted")
    for worker in (1, 0, 2):
        if not driven.holds(worker):
            assert send(driven, worker) == Ack(worker, AT, AckStatus.ACCEPTED)
    closed(driven)
    assert held(module) == [3.0, 30.0]


def test_a_sum_that_begins_again_has_nothing_of_what_came_before() -> None:
    driven, module = engine()
    train(driven)
    send(driven, 0)
    driven.begin_report(report(1))
    driven.add_piece(1, 0, 0, packed(99.0))
    driven.restart_round()
    assert driven.missing() == [0, 1, 2]
    assert driven.arrived(1) == (0, 0)
    for worker in range(WORKERS):
        send(driven, worker)
    closed(driven)
    assert held(module) == [3.0, 30.0]


def test_repeated_and_late_reports_are_answered() -> None:
    driven, _ = engine()
    train(driven)
    for worker in range(WORKERS):
        send(driven, worker)
    closed(driven)
    assert driven.begin_report(report(1)) == Ack(1, AT, AckStatus.DUPLICATE, "already counted")
    evaluate(driven)
    ack = driven.begin_report(report(1))
    assert ack is not None
    assert ack.status is AckStatus.LATE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_not_taken(value: float) -> None:
    driven, module = engine()
    train(driven)
    with pytest.raises(NonFiniteError):
        send(driven, 0, (1.0, value))
    assert not driven.holds(0)
    for worker in range(WORKERS):
        send(driven, worker)
    closed(driven)
    assert held(module) == [3.0, 30.0]


def test_a_sum_beyond_float32_ends_the_run_and_leaves_the_server_s_own() -> None:
    driven, module = engine()
    train(driven)
    for worker in range(WORKERS):
        send(driven, worker, (3e38, 1.0))
    with pytest.raises(NonFiniteError, match="evaluation: the sum of the workers' buffers overflows float32"):
        driven.advance()
    assert held(module) == [0, 1]


@pytest.mark.parametrize(
    ("payloads", "message"),
    [
        ((), "0 payloads; 1 are due"),
        ((dataclasses.replace(BUFFERS, role=Role.ITERATE),), "role is ITERATE; here it is BUFFERS"),
        ((dataclasses.replace(BUFFERS, dim=3, count=3, value_bytes=12),), "dim is 3; here it is 2"),
    ],
)
def test_a_report_must_carry_the_buffers(payloads: tuple[PayloadHeader, ...], message: str) -> None:
    driven, _ = engine()
    train(driven)
    with pytest.raises(ProtocolError, match=message):
        driven.begin_report(dataclasses.replace(report(0), payloads=payloads))


# The participant.


class Still(Oracle):
    """An oracle that moves the buffers of a worker by its id."""

    def __init__(self, vector: ParameterVector) -> None:
        self._vector = vector

    def gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Tensor]:
        self._vector.buffers.select(worker)
        self._vector.module.get_buffer("1.running_mean").add_(1 + worker)
        return 0.5, 1, torch.zeros(self._vector.dim)

    def weighted_gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Weighted]:
        loss, examples, gradient = self.gradient(worker, round_, scale)
        return loss, examples, Weighted([gradient], [len(gradient)], 1.0)

    def train_examples(self, worker: int) -> int:
        return 1

    def loss(self, worker: int, round_: int) -> tuple[float, int]:
        return 0.5, 1

    def evaluate(self, worker: int) -> tuple[dict[str, float], int]:
        self._vector.buffers.select(worker)
        return {"loss": self._vector.module.get_buffer("1.running_mean").sum().item()}, 1


class Process:
    """A participant of workers 1 and 2, with a buffer of two values in the mean and two in the variance."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.vector = ParameterVector(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), buffers="mean")
        self.vector.buffers.host((1, 2))
        settings = AlgorithmSettings(3, 9, 1, 0.5, 0.0, name="fedavg")
        side = worker_side(settings, self.vector.dim, SharedRandomness.from_int(1), (1, 2))
        self.participant = Participant(self.vector, side, Still(self.vector), (1, 2))

    def take(self, kind: Kind, position: Position, **payloads: tuple[float, ...]) -> list[Report]:
        data = {Role[role.upper()]: packed(*values) for role, values in payloads.items()}
        headers = tuple(
            PayloadHeader(role, Encoding.DENSE, len(part) // 4, len(part) // 4, len(part))
            for role, part in data.items()
        )
        step = CommittedStep(Step(position, kind, headers), tuple(map(memoryview, data.values())), {})
        self.answers = [answer for _, answer in self.participant.take(step)]
        return [answer[0] for answer in self.answers]

    def means(self) -> list[list[float]]:
        return [self.vector.buffers.finite_values(worker)[:2].tolist() for worker in (1, 2)]


MODEL = (0.0,) * 10


def test_each_worker_sends_its_buffers_and_all_take_the_mean() -> None:
    process = Process()
    process.take(Kind.MODEL, Position(1, 0), model=MODEL)
    process.take(Kind.TRAIN, Position(1, 0))
    reports = process.take(Kind.BUFFERS, AT, iterate=MODEL)
    header = PayloadHeader(Role.BUFFERS, Encoding.DENSE, 4, 4, 16)
    assert reports == [Report(worker, AT, 0.0, 0, (header,)) for worker in (1, 2)]
    sent = [unpacked(payload) for _, (payload,) in process.answers]
    assert sent == [(2, 2, 1, 1), (3, 3, 1, 1)]
    # The same again after a cut, though nothing was kept but the reports.
    assert process.take(Kind.BUFFERS, AT) == reports

    before = process.vector.digest()
    reports = process.take(Kind.EVALUATE, Position(1, EVALUATION_PHASE), buffers=(5.0, 6.0, 7.0, 8.0))
    assert process.means() == [[5, 6], [5, 6]]
    assert [report.metrics["loss"] for report in reports] == [11, 11]
    assert before != process.vector.digest() == reports[0].model_digest
    process.take(Kind.TRAIN, Position(2, 0))
    assert process.means() == [[7, 8], [8, 9]]


def test_a_new_process_takes_the_mean_and_one_that_has_trained_keeps_its_own() -> None:
    process = Process()
    mean = (4.0, 4.0, 1.0, 1.0)
    assert process.participant.applied == NOWHERE
    process.take(Kind.MODEL, Position(2, 0), model=MODEL, buffers=mean)
    assert process.means() == [[4, 4], [4, 4]]
    process.take(Kind.TRAIN, Position(2, 0))
    process.take(Kind.MODEL, Position(3, 0), model=MODEL, buffers=(9.0,) * 4)
    assert process.means() == [[6, 6], [7, 7]]
    # After an evaluation, which gave it the mean, a model that heals it brings the mean too.
    process.take(Kind.BUFFERS, Position(3, BUFFERS_PHASE), iterate=MODEL)
    process.take(Kind.EVALUATE, Position(3, EVALUATION_PHASE), buffers=mean)
    process.take(Kind.MODEL, Position(4, 0), model=MODEL, buffers=(9.0,) * 4)
    assert process.means() == [[9, 9], [9, 9]]


def test_buffers_come_with_an_evaluation_only_and_must_fit() -> None:
    process = Process()
    process.take(Kind.MODEL, Position(1, 0), model=MODEL)
    with pytest.raises(ProtocolError, match="a TRAIN step with a BUFFERS payload"):
        process.take(Kind.TRAIN, Position(2, 0), buffers=(1.0,) * 4)
    with pytest.raises(ProtocolError, match="dim is 3; here it is 4"):
        process.take(Kind.EVALUATE, Position(2, EVALUATION_PHASE), buffers=(1.0,) * 3)
    with pytest.raises(ProtocolError, match="40 bytes, 0 of frozen parameters and 16 of buffers"):
        process.take(Kind.MODEL, Position(2, 0), model=MODEL, buffers=(1.0,) * 5)


def test_buffers_that_are_not_finite_are_not_sent() -> None:
    process = Process()
    process.take(Kind.MODEL, Position(1, 0), model=MODEL)
    process.vector.buffers.select(2)
    process.vector.module.get_buffer("1.running_var")[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"the buffer 1\.running_var of worker 2"):
        process.take(Kind.BUFFERS, AT, iterate=MODEL)
