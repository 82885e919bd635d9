"""Joint reports: made of the reports of workers that one process hosts, and taken for all of them at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from core_federation import Federation, Problem

from afl.core import aggregation
from afl.core.aggregation import joint_reports
from afl.core.algorithms.afl_com import AflComServer
from afl.core.algorithms.registry import server_half
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.codecs.integers import integers
from afl.core.codecs.payload import pack_to_add, unpack
from afl.core.compressors import Compressed, create
from afl.core.dual import DualWeights
from afl.core.messages import (
    EVALUATION_PHASE,
    Ack,
    AckStatus,
    Encoding,
    Kind,
    Payload,
    PayloadHeader,
    Position,
    Report,
    Role,
    Share,
)
from afl.core.randomness import SharedRandomness
from afl.core.rounds.engine import RoundEngine
from afl.core.rounds.policy import AbsencePolicy
from afl.errors import NonFiniteError, ProtocolError

WORKERS, DIM, COUNT, BITS, LIMIT = 5, 64, 33, 4, 7
"""The last of the 33 integers is the tensor's own."""
FIRST = Position(1, 0)
RAND_K = CompressorChoice("rand-k", {"ratio": 0.5, "bits": BITS})
SKIP = AbsencePolicy(skips_late=True, skips_non_finite=True, quorum=0.2)

Answer = tuple[Report, list[Payload]]


def own_integers(worker: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    drawn = np.random.default_rng(worker).normal(0, 2, COUNT - 1)
    return np.append(np.rint(drawn).clip(-LIMIT, LIMIT), worker % 2).astype(np.int32)


def message(values: np.ndarray[Any, Any], bits: int = BITS) -> Payload:
    return integers(Encoding.SEEDED, bits).whole(values, Role.UPDATE, DIM)


def answer(worker: int, round_: int = 1, **changes: Any) -> Answer:
    payload = message(own_integers(worker))
    report = Report(worker, Position(round_, 0), 0.5 + worker, 3 + worker, (payload.header,))
    return dataclasses.replace(report, **changes), [payload]


def joint(*workers: int, round_: int = 1) -> Answer:
    ((_, whole),) = joint_reports((Kind.TRAIN, answer(worker, round_)) for worker in workers)
    return whole


def engine(
    policy: AbsencePolicy | None = None, *, participants: Sequence[int] = range(WORKERS)
) -> RoundEngine:
    settings = AlgorithmSettings(WORKERS, 4, 100, 1.0, 1.0, RAND_K, RAND_K)

    class Some(AflComServer):
        @property
        def participants(self) -> Sequence[int]:
            return participants

    dual = DualWeights(WORKERS, settings.eta_q, settings.block)
    algorithm = Some(settings, torch.zeros(DIM), SharedRandomness.from_int(3), dual)
    return RoundEngine(algorithm, evaluate_every=4, policy=policy)


def send(to: RoundEngine, whole: Answer, cut: int | None = None) -> Ack | None:
    """Send a report from where the engine has it to; up to byte ``cut``, if it is given."""
    report, payloads = whole
    ack = to.begin_report(report)
    if ack is not None:
        return ack
    (payload,) = payloads
    _, offset = to.arrived(report.worker)
    return to.add_piece(report.worker, 0, offset, payload.data[offset:cut])


def closed(to: RoundEngine) -> tuple[bytes, bytes]:
    """What closing the step makes: D, and the dual weights."""
    assert to.complete
    opening = to.advance()
    assert opening is not None
    return bytes(opening.payloads[0].data), to.dual_weights.tobytes()


def alone() -> tuple[bytes, bytes]:
    """What a step makes to which each worker has reported alone."""
    driven = engine()
    for worker in range(WORKERS):
        send(driven, answer(worker))
    return closed(driven)


# Made by the workers' process.


def test_the_payload_is_the_sum_and_each_worker_is_named_with_what_is_its_own() -> None:
    report, (payload,) = joint(0, 2, 3)
    assert report.workers == (0, 2, 3)
    assert [(own.worker, own.loss, own.examples) for own in report.of_each()] == [
        (worker, 0.5 + worker, 3 + worker) for worker in (0, 2, 3)
    ]
    assert report.payloads == (payload.header,)
    assert payload.header.bits == BITS + 2, "three workers' sum takes two more"
    total = sum(own_integers(worker) for worker in (0, 2, 3))
    assert np.array_equal(unpack(payload.header, payload.data).values, total)


@pytest.mark.parametrize(("workers", "bits"), [(1, 4), (2, 5), (3, 6), (4, 6), (5, 7)])
def test_the_width_holds_the_largest_sum(workers: int, bits: int) -> None:
    largest = [
        (Kind.TRAIN, (answer(worker)[0], [message(np.full(COUNT, LIMIT, dtype=np.int32))]))
        for worker in range(workers)
    ]
    ((_, (_, (payload,))),) = joint_reports(largest)
    assert payload.header.bits == bits
    assert set(unpack(payload.header, payload.data).values.tolist()) == {workers * LIMIT}


def test_a_worker_without_others_reports_as_if_alone_however_its_message_was_held() -> None:
    values = np.zeros(COUNT, dtype=np.int32)
    shortest = message(values)
    held = pack_to_add(create("rand-k", DIM, RAND_K.options), Compressed(values))
    assert held.header.total_bytes > shortest.header.total_bytes
    for payload in (shortest, held):
        report = answer(1, payloads=(payload.header,))[0]
        ((_, (found, (sent,))),) = joint_reports([(Kind.TRAIN, (report, [payload]))])
        assert found == dataclasses.replace(report, payloads=(shortest.header,))
        assert sent.data == shortest.data


def test_what_is_no_sum_of_integers_goes_alone() -> None:
    floats = PayloadHeader(Role.UPDATE, Encoding.SEEDED, DIM, 1, 4)
    apart = [
        (Kind.TRAIN, (Report(0, FIRST, 1.0, 3, (floats,)), [Payload(floats, (memoryview(bytes(4)),))])),
        (Kind.TRAIN, (Report(1, FIRST, 0.0, 0, missing="the loss is nan"), [])),
        (Kind.TRAIN, answer(2, weight=3.0)),
    ]
    together = [(Kind.TRAIN, answer(3)), (Kind.TRAIN, answer(4))]
    *first, last = joint_reports([*apart, *together])
    assert first == apart
    assert last[1][0].workers == (3, 4)
    evaluations = [
        (Kind.EVALUATE, (Report(worker, FIRST, 1.0, 3, (), {"loss": 1.0}), [])) for worker in (0, 1)
    ]
    assert list(joint_reports(evaluations)) == evaluations


def test_a_joint_report_stands_for_so_many_workers_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "MOST_JOINED", 2)
    made = joint_reports((Kind.TRAIN, answer(worker)) for worker in range(WORKERS))
    assert [report.workers for _, (report, _) in made] == [(0, 1), (2, 3), (4,)]


# Taken by the server.


@pytest.mark.parametrize("groups", [[(0, 1, 2, 3, 4)], [(3, 4), (0, 1, 2)], [(0, 4), (1,), (2, 3)]])
@pytest.mark.parametrize("policy", [None, SKIP], ids=["wait", "skip"])
def test_the_grouping_changes_no_bit(groups: list[tuple[int, ...]], policy: AbsencePolicy | None) -> None:
    driven = engine(policy)
    for group in groups:
        ack = send(driven, joint(*group))
        assert ack == Ack(group[0], FIRST, AckStatus.ACCEPTED, others=group[1:])
        assert all(map(driven.holds, group))
    assert closed(driven) == alone()
    assert driven.last_round is not None
    assert driven.last_round.losses.tolist() == [0.5 + worker for worker in range(WORKERS)]
    assert all(driven.counted(worker) == FIRST for worker in range(WORKERS))


@pytest.mark.parametrize("chaos", range(3))
@pytest.mark.parametrize("hosts", [[(0, 1, 2, 3, 4)], [(0, 3), (1, 2, 4)]])
def test_whole_runs_end_alike_however_messages_are_cut(hosts: list[tuple[int, ...]], chaos: int) -> None:
    settings = AlgorithmSettings(WORKERS, 12, 100, 0.01, 0.1, RAND_K, RAND_K)
    problem = Problem.random(WORKERS, 90)
    right = Federation(problem, settings, evaluate_every=5).run()
    found = Federation(problem, settings, evaluate_every=5, hosts=hosts, chaos=chaos).run()
    assert found.server.tobytes() == right.server.tobytes()
    assert found.uplink_residuals.tobytes() == right.uplink_residuals.tobytes()
    assert np.array_equal(found.dual_weights, right.dual_weights)
    assert all(model.tobytes() == right.server.tobytes() for model in found.models)


def test_a_message_that_was_cut_goes_on_where_it_was() -> None:
    driven = engine()
    assert send(driven, joint(1, 2, 3), cut=5) is None
    assert driven.arrived(1) == (0, 5)
    assert driven.begun(1) == (1, 2, 3)
    for other in (0, 2, 3):
        assert (driven.arrived(other), driven.begun(other)) == ((0, 0), ())
        assert driven.incoming_header(other) is None
    with pytest.raises(ProtocolError, match="worker 2, which has no report open"):
        driven.add_piece(2, 0, 5, b"more")
    for group in ((0,), (1, 2, 3), (4,)):
        send(driven, joint(*group))
    assert closed(driven) == alone()


@pytest.mark.parametrize("regrouped", [[(1,), (2, 3)], [(1, 2), (3,)], [(0, 3), (1, 2)], [(1,), (2,), (3,)]])
def test_the_beginning_for_other_workers_is_dropped(regrouped: list[tuple[int, ...]]) -> None:
    driven = engine()
    send(driven, joint(1, 2, 3), cut=5)
    for group in regrouped:
        ack = send(driven, joint(*group))
        assert ack is not None
        assert ack.status is AckStatus.ACCEPTED
    for worker in driven.missing():
        send(driven, answer(worker))
    assert closed(driven) == alone()


@pytest.mark.parametrize(
    ("workers", "is_kept"), [((1, 2, 3), True), ((1, 2), False), ((3,), False), ((0,), True)]
)
def test_who_speaks_for_some_of_its_workers_cannot_go_on_with_a_message(
    workers: tuple[int, ...], is_kept: bool
) -> None:
    driven = engine()
    send(driven, joint(1, 2, 3), cut=5)
    driven.drop_shared(workers)
    assert bool(driven.begun(1)) is is_kept
    if not is_kept:
        with pytest.raises(ProtocolError, match="no report open"):
            driven.add_piece(1, 0, 5, b"more")


def test_what_has_begun_is_dropped_by_any_of_its_workers() -> None:
    driven = engine()
    send(driven, joint(1, 2, 3), cut=5)
    assert driven.drop_beginning(3)
    assert driven.begun(1) == ()
    assert driven.collector.waiting_bytes == 0


def test_a_joint_report_that_comes_again_is_a_duplicate_and_another_is_refused() -> None:
    driven = engine()
    whole, other = joint(0, 1, 2), joint(0, 1, 2)
    other = (dataclasses.replace(other[0], loss=9.0), other[1])
    send(driven, whole)
    for _ in range(2):
        ack = send(driven, whole)
        assert ack == Ack(0, FIRST, AckStatus.DUPLICATE, "already counted", (1, 2))
        ack = send(driven, other)
        assert ack is not None
        assert (ack.status, ack.workers) == (AckStatus.REFUSED, (0, 1, 2))
        if driven.step.position == FIRST:
            send(driven, joint(3, 4))
            driven.advance()
    ack = send(driven, joint(0, 1, round_=1))
    assert ack is not None
    assert ack.status is AckStatus.REFUSED, "one for others than was counted"


def test_a_late_one_is_answered_for_all_and_its_losses_stand_for_them() -> None:
    driven = engine(SKIP)
    send(driven, joint(0, 1))
    send(driven, joint(2, 3, 4), cut=5)
    driven.expire()
    driven.advance()
    (ack,) = driven.cut_off
    assert (ack.workers, ack.status) == ((2, 3, 4), AckStatus.LATE)
    assert driven.losses.last.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert driven.begun(2) == ()
    assert send(driven, joint(2, 3, 4)) == ack
    expected = engine(SKIP)
    for worker in (0, 1):
        send(expected, answer(worker))
    expected.expire()
    expected.advance()
    assert driven.dual_weights.tobytes() == expected.dual_weights.tobytes()


def test_some_of_its_workers_reports_have_come() -> None:
    driven = engine(SKIP)
    send(driven, joint(1, 2))
    with pytest.raises(ProtocolError, match="reports of some of its workers have come"):
        driven.begin_report(joint(0, 1)[0])
    driven.expire()
    driven.advance()
    with pytest.raises(ProtocolError, match="reports of some of its workers have come"):
        driven.begin_report(joint(2, 3)[0])


def changed(**changes: Any) -> Report:
    return dataclasses.replace(joint(1, 2, 4)[0], **changes)


def other_header(**changes: Any) -> tuple[PayloadHeader]:
    (header,) = joint(1, 2, 4)[0].payloads
    return (dataclasses.replace(header, **changes),)


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (changed(others=(Share(2, 1.0, 3), Share(2, 1.0, 3))), "must be ascending"),
        (changed(others=(Share(1, 1.0, 3), Share(4, 1.0, 3))), "must be ascending"),
        (changed(others=(Share(4, 1.0, 3), Share(2, 1.0, 3))), "must be ascending"),
        (changed(others=(Share(2, 1.0, 3), Share(5, 1.0, 3))), "a report of worker 5; the run's workers"),
        (
            changed(others=(Share(2, 1.0, 3), Share(3, 1.0, 3))),
            "worker 3, round 1: a report that was not asked",
        ),
        (changed(others=(Share(2, 1.0, 0), Share(4, 1.0, 3))), "worker 2, round 1: a loss over 0 examples"),
        (changed(others=(Share(2, 1.0, 3),)), "a payload whose bits is 6; here it is 5"),
        (changed(others=()), "a payload whose bits is 6; here it is 4"),
        (changed(payloads=other_header(bits=7)), "a payload whose bits is 7; here it is 6"),
        (changed(payloads=other_header(bits=5)), "a payload whose bits is 5; here it is 6"),
        (changed(payloads=other_header(value_bytes=27)), "a payload whose value_bytes is 27; here it is 26"),
        (changed(payloads=()), "0 payloads; 1 are due"),
        (changed(payloads=(), missing="nothing"), "a report of nothing, where one is due"),
    ],
)
@pytest.mark.parametrize("policy", [None, SKIP], ids=["wait", "skip"])
def test_a_joint_report_that_cannot_be_right_is_refused(
    report: Report, says: str, policy: AbsencePolicy | None
) -> None:
    driven = engine(policy, participants=(0, 1, 2, 4))
    with pytest.raises(ProtocolError, match=says):
        driven.begin_report(report)
    assert driven.missing() == [0, 1, 2, 4]
    assert driven.begun(1) == ()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_all_of_them_out(loss: float) -> None:
    report = changed(others=(Share(2, loss, 3), Share(4, 1.0, 3)))
    with pytest.raises(NonFiniteError, match=f"worker 2, round 1: the loss is {loss}"):
        engine().begin_report(report)
    driven = engine(SKIP)
    ack = driven.begin_report(report)
    assert ack is not None
    assert (ack.status, ack.workers) == (AckStatus.REFUSED, (1, 2, 4))
    assert all(driven.report(worker).missing == ack.reason for worker in (1, 2, 4))
    assert driven.missing() == [0, 3]


@pytest.mark.parametrize("value", [22, -22])
def test_a_sum_beyond_what_so_many_workers_can_add_up_to_is_refused(value: int) -> None:
    driven = engine()
    right = np.full(COUNT, 21 * np.sign(value), dtype=np.int32)
    right[-1] = 3
    wrong = right.copy()
    wrong[3] = value
    whole = message(wrong, BITS + 2)
    with pytest.raises(ProtocolError, match="an integer beyond 21"):
        send(driven, (changed(payloads=(whole.header,)), [whole]))
    assert driven.begun(1) == ()
    whole = message(right, BITS + 2)
    ack = send(driven, (changed(payloads=(whole.header,)), [whole]))
    assert ack is not None
    assert ack.status is AckStatus.ACCEPTED


def test_only_integers_can_be_added_before_they_come() -> None:
    choice = CompressorChoice("rand-k", {"ratio": 0.5})
    settings = AlgorithmSettings(WORKERS, 4, 100, 1.0, 1.0, choice, choice)
    algorithm = server_half(settings, torch.zeros(DIM), SharedRandomness.from_int(3))
    driven = RoundEngine(algorithm, evaluate_every=1)
    floats = PayloadHeader(Role.UPDATE, Encoding.SEEDED, DIM, COUNT, 4 * COUNT)
    with pytest.raises(ProtocolError, match="only integers can be added before they come"):
        driven.begin_report(Report(0, FIRST, 1.0, 3, (floats,), others=(Share(1, 1.0, 3),)))
    evaluating = engine()
    evaluating.evaluate_every = 1
    send(evaluating, joint(*range(WORKERS)))
    evaluating.advance()
    assert evaluating.step.kind is Kind.EVALUATE
    metrics = {"loss": 1.0}
    at = Position(1, EVALUATION_PHASE)
    with pytest.raises(ProtocolError, match="only integers can be added before they come"):
        evaluating.begin_report(Report(0, at, 1.0, 3, (), metrics, others=(Share(1, 1.0, 3),)))


@pytest.mark.parametrize("own", [-1, 4])
def test_a_tensor_s_own_integer_counts_workers(own: int) -> None:
    driven = engine()
    wrong = np.zeros(COUNT, dtype=np.int32)
    wrong[-1] = own
    whole = message(wrong, BITS + 2)
    with pytest.raises(
        ProtocolError, match=f"own integers from {own} to {own}; of 3 workers they are 0 to 3"
    ):
        send(driven, (changed(payloads=(whole.header,)), [whole]))
