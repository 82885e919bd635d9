"""The round engine: what it answers to every report, chunk and cut, and which step follows."""

from __future__ import annotations

import dataclasses
import math
import struct
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from afl.core.algorithms.registry import server_half
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.codecs.payload import pack
from afl.core.compressors import Compressed, create
from afl.core.messages import (
    EVALUATION_PHASE,
    MAX_METRICS,
    Ack,
    AckStatus,
    Encoding,
    Kind,
    PayloadHeader,
    Position,
    Report,
    Role,
    Step,
    ValueType,
)
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.rounds.engine import RoundEngine
from afl.errors import NonFiniteError, ProtocolError

WORKERS, DIM, KEPT = 3, 8, 4
HEADER = PayloadHeader(Role.UPDATE, Encoding.SEEDED, DIM, KEPT, 4 * KEPT)
VALUES = {0: [1.0, 2.0, 3.0, 4.0], 1: [10.0, 20.0, 30.0, 40.0], 2: [100.0, 200.0, 300.0, 400.0]}
TOTAL = [111.0, 222.0, 333.0, 444.0]
RAND_K = CompressorChoice("rand-k", {"ratio": 0.5})
TOP_K = CompressorChoice("top-k", {"ratio": 0.5})


def engine(
    *,
    rounds: int = 4,
    every: int = 2,
    block: int = 100,
    choice: CompressorChoice = RAND_K,
    eta_q: float = 1.0,
    model: ParameterVector | None = None,
) -> RoundEngine:
    settings = AlgorithmSettings(WORKERS, rounds, block, 1.0, eta_q, choice, choice)
    algorithm = server_half(settings, torch.zeros(DIM), SharedRandomness.from_int(3))
    return RoundEngine(algorithm, evaluate_every=every, model=model)


def update(worker: int, round_: int = 1, **changes: Any) -> Report:
    report = Report(worker, Position(round_, 0), 0.5 + worker, 7, (HEADER,))
    return dataclasses.replace(report, **changes)


def evaluation(worker: int, round_: int, **changes: Any) -> Report:
    report = Report(worker, Position(round_, EVALUATION_PHASE), 0.25, 11, (), {"loss": 0.25}, b"digest")
    return dataclasses.replace(report, **changes)


def data_of(worker: int) -> bytes:
    return struct.pack("<4f", *VALUES[worker])


def send(to: RoundEngine, worker: int, round_: int = 1, **changes: Any) -> Ack | None:
    ack = to.begin_report(update(worker, round_, **changes))
    return to.add_piece(worker, 0, 0, data_of(worker)) if ack is None else ack


def close_round(to: RoundEngine, round_: int) -> Any:
    for worker in range(WORKERS):
        send(to, worker, round_)
    return to.advance()


def close_evaluation(to: RoundEngine, round_: int, **digests: Any) -> Any:
    for worker in range(WORKERS):
        to.begin_report(evaluation(worker, round_))
    return to.advance()


def values_of(opening: Any) -> list[float]:
    (payload,) = opening.payloads
    return list(struct.unpack("<4f", b"".join(payload.sections)))


def settled(to: RoundEngine) -> list[float]:
    """The server's model, ascending."""
    to.algorithm.settle()
    return sorted(to.algorithm.params.tolist())


# The course of a run.


def test_steps_follow_each_other_and_carry_the_sum() -> None:
    driven = engine(rounds=3, every=2)
    opening = driven.opening()
    assert (opening.step, opening.payloads) == (Step(Position(1, 0), Kind.TRAIN), ())
    assert opening.dual_weights.tolist() == [1 / 3] * 3
    assert driven.missing() == [0, 1, 2]

    opening = close_round(driven, 1)
    assert opening.step == Step(Position(2, 0), Kind.TRAIN, (HEADER,))
    assert values_of(opening) == TOTAL
    assert settled(driven) == [-444, -333, -222, -111, 0, 0, 0, 0]

    opening = close_round(driven, 2)
    assert opening.step == Step(Position(2, EVALUATION_PHASE), Kind.EVALUATE, (HEADER,))
    opening = close_evaluation(driven, 2)
    # Nothing is left to apply: the evaluation had the payload.
    assert (opening.step, opening.payloads) == (Step(Position(3, 0), Kind.TRAIN), ())

    opening = close_round(driven, 3)
    assert opening.step.position == Position(3, EVALUATION_PHASE)
    assert not driven.finished
    assert close_evaluation(driven, 3) is None
    assert driven.finished


@pytest.mark.parametrize(
    ("rounds", "every", "evaluated"), [(3, 1, [1, 2, 3]), (4, 2, [2, 4]), (5, 2, [2, 4, 5]), (3, 99, [3])]
)
def test_an_evaluation_follows_each_multiple_and_the_last_round(
    rounds: int, every: int, evaluated: list[int]
) -> None:
    driven = engine(rounds=rounds, every=every)
    found = []
    for round_ in range(1, rounds + 1):
        close_round(driven, round_)
        if driven.step.kind is Kind.EVALUATE:
            assert driven.step.position == Position(round_, EVALUATION_PHASE)
            found.append(round_)
            close_evaluation(driven, round_)
    assert found == evaluated
    assert driven.finished


def test_a_closed_round_is_summed_up_with_the_weights_it_used() -> None:
    driven = engine()
    losses = [0.5, 1.5, 2.5]
    close_round(driven, 1)
    first = driven.last_round
    assert first is not None
    assert (first.round, first.losses.tolist(), first.dual_weights.tolist()) == (1, losses, [1 / 3] * 3)
    weights = [math.exp(loss) / sum(map(math.exp, losses)) for loss in losses]
    np.testing.assert_allclose(driven.dual_weights, weights, rtol=1e-14)
    np.testing.assert_allclose(driven.opening().dual_weights, weights, rtol=1e-14)
    close_round(driven, 2)
    assert driven.last_round is not None
    np.testing.assert_allclose(driven.last_round.dual_weights, weights, rtol=1e-14)


def test_dual_weights_restart_at_the_block_s_end() -> None:
    driven = engine(block=2, every=99)
    close_round(driven, 1)
    assert driven.dual_weights[2] > 0.5
    close_round(driven, 2)
    assert driven.dual_weights.tolist() == [1 / 3] * 3


def test_evaluation_names_the_workers_whose_model_differs() -> None:
    driven = engine(every=1, model=cast("ParameterVector", SimpleNamespace(digest=lambda: b"right")))
    close_round(driven, 1)
    digests = [b"right", b"wrong", b"right"]
    for worker, digest in enumerate(digests):
        report = evaluation(worker, 1, model_digest=digest, examples=10 + worker)
        ack = driven.begin_report(report)
        assert ack == Ack(worker, report.position, AckStatus.ACCEPTED)
    driven.advance()
    found = driven.last_evaluation
    assert found is not None
    assert (found.round, found.diverged, found.examples) == (1, (1,), (10, 11, 12))
    assert found.metrics == ({"loss": 0.25},) * 3


def test_without_a_model_nobody_diverged() -> None:
    driven = engine(every=1)
    close_round(driven, 1)
    close_evaluation(driven, 1)
    assert driven.last_evaluation is not None
    assert driven.last_evaluation.diverged == ()


# What is answered to reports.


def test_a_report_counts_once_its_payload_is_complete() -> None:
    driven = engine()
    assert driven.begin_report(update(1)) is None
    assert driven.incoming_header(1) == HEADER
    assert driven.add_piece(1, 0, 0, data_of(1)[:8]) is None
    assert (driven.holds(1), driven.arrived(1), driven.missing()) == (False, (0, 8), [0, 1, 2])
    assert driven.add_piece(1, 0, 8, data_of(1)[8:]) == Ack(1, Position(1, 0), AckStatus.ACCEPTED)
    assert (driven.holds(1), driven.arrived(1), driven.missing()) == (True, (0, 0), [0, 2])
    assert driven.incoming_header(1) is None
    assert not driven.complete


def test_a_repeated_report_is_a_duplicate_while_open_and_after_closing() -> None:
    driven = engine()
    for worker in range(WORKERS):
        send(driven, worker)
    ack = driven.begin_report(update(0))
    assert ack == Ack(0, Position(1, 0), AckStatus.DUPLICATE, "already counted")
    assert values_of(driven.advance()) == TOTAL
    assert driven.begin_report(update(0)) == ack
    send(driven, 0, 2)
    assert driven.begin_report(update(0)) == ack


@pytest.mark.parametrize(
    "changes", [{"loss": 9.0}, {"examples": 8}, {"payloads": ()}, {"metrics": {"loss": 1.0}}]
)
@pytest.mark.parametrize("is_closed", [False, True])
def test_the_same_key_with_other_content_is_refused_and_named(
    changes: dict[str, Any], is_closed: bool
) -> None:
    driven = engine()
    for worker in range(WORKERS):
        send(driven, worker)
    if is_closed:
        driven.advance()
    ack = driven.begin_report(update(1, **changes))
    assert ack == Ack(
        1,
        Position(1, 0),
        AckStatus.REFUSED,
        "a report of worker 1 for round 1, phase 0 with other content is already counted",
    )


def test_a_report_for_a_round_long_closed_is_late() -> None:
    driven = engine(every=99)
    close_round(driven, 1)
    close_round(driven, 2)
    ack = driven.begin_report(update(1, 1))
    assert ack == Ack(1, Position(1, 0), AckStatus.LATE, "round 1, phase 0 is closed")
    assert driven.missing() == [0, 1, 2]


def test_a_training_report_during_the_evaluation_after_it_is_a_duplicate() -> None:
    driven = engine(every=1)
    close_round(driven, 1)
    ack = driven.begin_report(update(2))
    assert ack is not None
    assert ack.status is AckStatus.DUPLICATE


def test_a_report_after_the_end_is_a_duplicate_and_changes_nothing() -> None:
    driven = engine(rounds=1)
    close_round(driven, 1)
    close_evaluation(driven, 1)
    assert driven.finished
    ack = driven.begin_report(evaluation(0, 1))
    assert ack == Ack(0, Position(1, EVALUATION_PHASE), AckStatus.DUPLICATE, "already counted")
    late = driven.begin_report(update(0, 1))
    assert late is not None
    assert late.status is AckStatus.LATE


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (Position(2, 0), "worker 0 reports round 2, phase 0; round 1, phase 0 is open"),
        (Position(1, 1), "worker 0 reports round 1, phase 1; round 1, phase 0 is open"),
        (Position(1, EVALUATION_PHASE), "worker 0 reports round 1, phase 255; round 1, phase 0 is open"),
    ],
)
def test_a_report_from_the_future_breaks_the_protocol(position: Position, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        engine().begin_report(update(0, position=position))
    assert str(caught.value) == message


@pytest.mark.parametrize("worker", [-1, 3, 2**32 - 1])
def test_a_worker_that_the_run_does_not_have_is_refused(worker: int) -> None:
    with pytest.raises(ProtocolError) as caught:
        engine().begin_report(update(worker))
    assert str(caught.value) == f"a report of worker {worker}; the run's workers are 0 to 2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": Role.MODEL}, "a payload whose role is MODEL; here it is UPDATE"),
        ({"encoding": Encoding.DENSE}, "a payload whose encoding is DENSE; here it is SEEDED"),
        ({"value_type": ValueType.BYTES}, "a payload whose value_type is BYTES; here it is FLOAT32"),
        ({"dim": 9}, "a payload whose dim is 9; here it is 8"),
        ({"count": 5}, "a payload whose count is 5; here it is 4"),
        ({"value_bytes": 20}, "a payload whose value_bytes is 20; here it is 16"),
        ({"index_bytes": 1}, "a payload that claims 1 bytes of indices; 0 are the most for 4 of 8"),
    ],
)
def test_a_payload_header_that_is_not_the_algorithm_s_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    driven = engine()
    with pytest.raises(ProtocolError) as caught:
        driven.begin_report(update(0, payloads=(dataclasses.replace(HEADER, **changes),)))
    assert str(caught.value) == message
    assert driven.incoming_header(0) is None


@pytest.mark.parametrize("payloads", [(), (HEADER, HEADER)])
def test_another_number_of_payloads_is_refused(payloads: tuple[PayloadHeader, ...]) -> None:
    with pytest.raises(ProtocolError, match=f"worker 0, round 1: {len(payloads)} payloads; 1 are due"):
        engine().begin_report(update(0, payloads=payloads))


def test_an_evaluation_carries_no_payload_and_must_have_a_loss() -> None:
    driven = engine(every=1)
    close_round(driven, 1)
    with pytest.raises(ProtocolError, match="worker 2, round 1: 1 payloads; 0 are due"):
        driven.begin_report(evaluation(2, 1, payloads=(HEADER,)))
    with pytest.raises(ProtocolError, match="worker 2, round 1: an evaluation without the metric loss"):
        driven.begin_report(evaluation(2, 1, metrics={"accuracy": 1.0}))


def test_a_loss_over_no_example_is_refused() -> None:
    with pytest.raises(ProtocolError, match="worker 1, round 1: a loss over 0 examples"):
        engine().begin_report(update(1, examples=0))


def test_too_many_metrics_are_refused() -> None:
    metrics = {"loss": 1.0, **{f"m{index}": 0.0 for index in range(MAX_METRICS)}}
    with pytest.raises(ProtocolError, match=f"{MAX_METRICS + 1} metrics; {MAX_METRICS} are the most"):
        engine().begin_report(update(1, metrics=metrics))


@pytest.mark.parametrize("name", ["\x1b[2J", "two\nlines", "", "m" * 65, "\u202eevil", "m" * 1_000_000])
def test_a_metric_whose_name_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(
        ProtocolError, match=r"worker 1, round 1: a metric called .*; a metric's name has"
    ) as caught:
        engine().begin_report(update(1, metrics={"loss": 1.0, name: 1.0}))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_with_worker_and_round(value: float) -> None:
    driven = engine(every=1)
    with pytest.raises(NonFiniteError, match=f"worker 1, round 1: the loss is {value}; it must be finite"):
        driven.begin_report(update(1, loss=value))
    close_round(driven, 1)
    with pytest.raises(NonFiniteError, match=f"worker 2, round 1: the metric auc is {value}"):
        driven.begin_report(evaluation(2, 1, metrics={"loss": 1.0, "auc": value}))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("choice", [RAND_K, TOP_K])
def test_a_payload_value_that_is_not_finite_never_reaches_the_sum(
    value: float, choice: CompressorChoice
) -> None:
    driven = engine(choice=choice)
    compressor = create(choice.name, DIM, choice.options)
    support = np.array([0, 2, 5, 7]) if choice is TOP_K else None

    def payload(values: list[float]) -> tuple[PayloadHeader, bytes]:
        packed = pack(compressor, Compressed(np.array(values, np.float32), support))
        return packed.header, b"".join(packed.sections)

    header, bad = payload([1.0, value, 3.0, 4.0])
    driven.begin_report(update(0, payloads=(header,)))
    with pytest.raises(NonFiniteError, match="is not finite"):
        driven.add_piece(0, 0, 0, bad)
    assert not driven.holds(0)
    # The refused message is forgotten: it cannot be completed by what follows.
    assert driven.incoming_header(0) is None
    for worker in range(WORKERS):
        header, data = payload(VALUES[worker])
        driven.begin_report(update(worker, payloads=(header,)))
        driven.add_piece(worker, 0, 0, data)
    assert values_of_any(driven) == TOTAL


def values_of_any(driven: RoundEngine) -> list[float]:
    (payload,) = driven.advance().payloads  # type: ignore[union-attr]
    return np.frombuffer(payload.sections[-1], "<f4").tolist()


def test_the_rest_of_a_refused_payload_cannot_complete_it() -> None:
    driven = engine(choice=TOP_K)
    packed = pack(
        create("top-k", DIM, TOP_K.options),
        Compressed(np.array([1, math.nan, 3, 4], np.float32), np.array([0, 2, 5, 7])),
    )
    data = b"".join(packed.sections)
    driven.begin_report(update(0, payloads=(packed.header,)))
    driven.add_piece(0, 0, 0, data[:-2])
    with pytest.raises(NonFiniteError):
        driven.add_piece(0, 0, len(data) - 2, data[-2:])
    with pytest.raises(ProtocolError, match="a chunk for worker 0, which has no report open"):
        driven.add_piece(0, 0, len(data) - 2, data[-2:])
    assert not driven.holds(0)


# Chunks.


def test_a_chunk_without_a_report_is_refused() -> None:
    driven = engine()
    driven.begin_report(update(0))
    with pytest.raises(ProtocolError, match="a chunk for worker 1, which has no report open"):
        driven.add_piece(1, 0, 0, data_of(1))


@pytest.mark.parametrize(
    ("payload", "offset", "length", "message"),
    [
        (1, 4, 4, "a chunk of payload 1; payload 0 of 1 comes next (numbered from 0)"),
        (0, 8, 4, "a chunk at byte 8; byte 4 comes next"),
        (0, 0, 4, "a chunk at byte 0; byte 4 comes next"),
        (0, 4, 16, "a chunk of 16 bytes at byte 4 of a payload of 16 bytes"),
        (0, 4, 0, "a chunk of 0 bytes at byte 4 of a payload of 16 bytes"),
        (0, 4, 6, "6 bytes of float32 values; the length must be a multiple of 4"),
    ],
)
def test_a_chunk_that_does_not_come_next_is_refused(
    payload: int, offset: int, length: int, message: str
) -> None:
    driven = engine()
    driven.begin_report(update(0))
    driven.add_piece(0, 0, 0, bytes(4))
    with pytest.raises(ProtocolError) as caught:
        driven.add_piece(0, payload, offset, bytes(length))
    assert str(caught.value) == message
    assert driven.algorithm.received(0, 0) == 4


# Cuts.


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("size", [4, 8])
def test_a_report_cut_in_the_middle_goes_on_where_it_was(worker: int, size: int) -> None:
    driven = engine()
    data = data_of(worker)
    driven.begin_report(update(worker))
    driven.add_piece(worker, 0, 0, data[:8])
    assert driven.arrived(worker) == (0, 8)
    assert driven.begin_report(update(worker)) is None
    assert driven.arrived(worker) == (0, 8)
    with pytest.raises(ProtocolError, match="a chunk at byte 0; byte 8 comes next"):
        driven.add_piece(worker, 0, 0, data[:8])
    for start in range(8, 16, size):
        ack = driven.add_piece(worker, 0, start, data[start : start + size])
    assert ack == Ack(worker, Position(1, 0), AckStatus.ACCEPTED)
    for other in {0, 1, 2} - {worker}:
        send(driven, other)
    assert values_of(driven.advance()) == TOTAL


def test_another_report_cannot_end_one_that_has_begun() -> None:
    driven = engine()
    driven.begin_report(update(0))
    driven.add_piece(0, 0, 0, data_of(0)[:12])
    with pytest.raises(ProtocolError, match="another report than the one whose beginning has come"):
        driven.begin_report(update(0, loss=4.0))
    assert driven.add_piece(0, 0, 12, data_of(0)[12:]) == Ack(0, Position(1, 0), AckStatus.ACCEPTED)
    for other in (1, 2):
        send(driven, other)
    assert values_of(driven.advance()) == TOTAL
    assert driven.last_round is not None
    assert driven.last_round.losses[0] == 0.5


def test_of_a_message_that_is_summed_whole_a_beginning_can_be_dropped() -> None:
    driven = engine(choice=TOP_K)
    packed = pack(
        create("top-k", DIM, TOP_K.options), Compressed(np.ones(4, np.float32), np.array([0, 1, 2, 3]))
    )
    data = b"".join(packed.sections)
    driven.begin_report(update(1, payloads=(packed.header,)))
    driven.add_piece(1, 0, 0, data[:-3])
    assert driven.algorithm.waiting_bytes == len(data) - 3
    assert driven.drop_beginning(1)
    assert driven.algorithm.waiting_bytes == 0
    assert driven.arrived(1) == (0, 0)


def test_a_beginning_that_is_in_the_sum_cannot_be_dropped() -> None:
    driven = engine()
    driven.begin_report(update(1))
    assert driven.drop_beginning(1)
    driven.begin_report(update(1))
    driven.add_piece(1, 0, 0, data_of(1)[:8])
    assert not driven.drop_beginning(1)
    assert driven.arrived(1) == (0, 8)


def test_a_report_that_is_complete_is_no_beginning() -> None:
    driven = engine()
    send(driven, 0)
    assert driven.drop_beginning(0)
    assert driven.holds(0)


def test_restarting_a_round_forgets_every_report_and_sums_again() -> None:
    driven = engine()
    send(driven, 0, loss=99.0)
    driven.begin_report(update(1))
    driven.add_piece(1, 0, 0, data_of(1)[:8])
    driven.restart_round()
    assert driven.restarts == 1
    assert driven.missing() == [0, 1, 2]
    assert driven.incoming_header(1) is None
    assert not any(any(driven.arrived(worker)) for worker in range(WORKERS))
    opening = close_round(driven, 1)
    assert values_of(opening) == TOTAL
    assert driven.last_round is not None
    assert driven.last_round.losses.tolist() == [0.5, 1.5, 2.5]


def test_restarting_a_later_round_keeps_the_model_of_the_earlier_ones() -> None:
    driven = engine(every=99)
    close_round(driven, 1)
    send(driven, 0, 2)
    driven.restart_round()
    assert sum(settled(driven)) == -sum(TOTAL)
    close_round(driven, 2)
    assert sum(settled(driven)) == -2 * sum(TOTAL)


def test_a_model_step_is_taken_once_however_often_it_is_settled() -> None:
    driven = engine(every=99)
    close_round(driven, 1)
    assert settled(driven) == settled(driven) == [-444, -333, -222, -111, 0, 0, 0, 0]
    support = SharedRandomness.from_int(3).stream(Purpose.COMPRESSOR, 1).subset(DIM, KEPT)
    assert driven.algorithm.params[support].tolist() == [-111, -222, -333, -444]
