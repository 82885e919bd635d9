"""Steps that close without some of their workers: what is summed, what stands in, that nothing is lost."""

from __future__ import annotations

import math
import struct
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from core_absence import POLICY, Absences
from core_compressors import compressed
from core_federation import Federation, Problem
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core.algorithms.local_sgd import snapshot_offset
from afl.core.algorithms.registry import server_half, worker_side
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.error_feedback import ErrorFeedback
from afl.core.messages import (
    EVALUATION_PHASE,
    Ack,
    AckStatus,
    Encoding,
    Kind,
    PayloadHeader,
    Position,
    Report,
    Role,
)
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.rounds.engine import RoundEngine
from afl.core.rounds.policy import AbsencePolicy, DivergenceWatch
from afl.core.vectors import Weighted
from afl.errors import DivergedError, NonFiniteError, ProtocolError
from support.reference import IntegerGrid

Vector = NDArray[np.float32]

WORKERS, DIM, ROUNDS = 5, 23, 16
PROBLEM = Problem.random(WORKERS, DIM, seed=3)
IDENTITY = CompressorChoice()
RAND_K = CompressorChoice("rand-k", {"ratio": 0.3})
TOP_K = CompressorChoice("top-k", {"ratio": 0.3})
INTEGERS = CompressorChoice("rand-k", {"ratio": 0.3, "bits": 4})
COMPRESSORS = {
    "identity": (IDENTITY, IDENTITY),
    "rand-k": (RAND_K, RAND_K),
    "top-k": (TOP_K, TOP_K),
    "top-k up, rand-k down": (TOP_K, RAND_K),
    "identity up, top-k down": (IDENTITY, TOP_K),
    "integers": (INTEGERS, INTEGERS),
}
SEEDS = st.integers(0, 2**32)


def settings_of(pair: str, name: str = "afl-com") -> AlgorithmSettings:
    return AlgorithmSettings(WORKERS, ROUNDS, 5, 0.02, 0.01, *COMPRESSORS[pair], name=name)


# Against the algorithms in numpy.


@dataclass
class Trained:
    params: Vector
    residuals: NDArray[np.float32]
    downlink_residual: Vector
    dual_weights: list[NDArray[np.float64]]
    computed: NDArray[np.float64]
    """The sum of all weighted gradients that a worker had a finite one of."""


class LastLosses:
    """What stands for the loss of an absent worker."""

    def __init__(self) -> None:
        self.reported = np.full(WORKERS, np.nan)
        self.on_their_way: dict[int, float] = {}

    def of(self, asked: tuple[int, ...], present: dict[int, float]) -> NDArray[np.float64]:
        losses = np.zeros(WORKERS)
        for i in asked:
            last = self.reported[i] if i not in present else present[i]
            losses[i] = np.mean(list(present.values())) if np.isnan(last) else last
        for i, loss in present.items():
            self.reported[i] = loss
        return losses


def algorithm_2(run: Absences, pair: str) -> Trained:
    """Algorithm 2 with the workers that were there; a late one keeps p as its residual."""
    up, down = COMPRESSORS[pair]
    grid = IntegerGrid(up.options["bits"]) if "bits" in up.options else None
    own_form = {"name": up.name, **up.options}
    w, e = PROBLEM.start.copy(), np.zeros((WORKERS, DIM), dtype=np.float32)
    e_hat, q = np.zeros(DIM, dtype=np.float32), np.full(WORKERS, 1 / WORKERS)
    last, history, computed = LastLosses(), [], np.zeros(DIM)
    for step in run.happened:
        for i in step.returned:
            last.reported[i] = last.on_their_way.pop(i, last.reported[i])
        if step.kind is not Kind.TRAIN:
            continue
        t, total, present = step.position.round, np.zeros(DIM, dtype=np.float32), {}
        for i in sorted(step.present + step.late + step.cut):
            p = e[i] + np.float32(q[i]) * PROBLEM.gradient(i, t, w)
            computed += np.float32(q[i]) * PROBLEM.gradient(i, t, w)
            c = np.zeros(DIM, dtype=np.float32)
            if i in step.present:
                c = compressed(up, p, 7, t) if grid is None else grid.message(own_form, p, 7, t)
            e[i], total = p - c, total + c
            if i in step.present:
                present[i] = PROBLEM.loss(i, t, w)
            else:
                last.on_their_way[i] = PROBLEM.loss(i, t, w)
        losses = last.of(step.asked, present)
        for i in step.cut:
            last.reported[i] = last.on_their_way.pop(i)
        own = Purpose.COMPRESSOR if down == up else Purpose.DOWNLINK_COMPRESSOR
        if grid is None:
            d = compressed(down, e_hat + total, 7, t, own)
        else:
            d = total = grid.close(own_form, DIM, 7, t)
        e_hat = e_hat + total - d
        w = w - np.float32(0.02) * d
        raised = q * np.exp(0.01 * (losses - losses.max()))
        q = np.full(WORKERS, 1 / WORKERS) if t % 5 == 0 else raised / raised.sum()
        history.append(q)
    return Trained(w, e, e_hat, history, computed)


@pytest.mark.parametrize("pair", COMPRESSORS)
@settings(deadline=None, max_examples=12)
@given(seed=SEEDS)
def test_afl_com_without_the_absent_is_algorithm_2_to_the_bit_and_loses_nothing(pair: str, seed: int) -> None:
    run = Absences(PROBLEM, settings_of(pair), seed).run()
    right = algorithm_2(run, pair)
    assert run.vector.numpy().tobytes() == right.params.tobytes()
    # Zeros may differ in their sign: what was taken out and put back is 0 + c.
    assert np.array_equal(run.residuals, right.residuals)
    found = [*(summary.dual_weights for summary in run.rounds[1:]), run.engine.dual_weights]
    np.testing.assert_allclose(found, right.dual_weights, rtol=0, atol=1e-12)

    applied = (PROBLEM.start.astype(np.float64) - run.vector.numpy()) / float(np.float32(0.02))
    kept = run.residuals.astype(np.float64).sum(axis=0) + right.downlink_residual
    scale = np.abs(right.computed).max() + np.abs(PROBLEM.start).max() / 0.02
    np.testing.assert_allclose(applied + kept, right.computed, rtol=0, atol=1e-5 * scale)


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_afl_br_and_sgda_sum_over_the_present(seed: int) -> None:
    run = Absences(PROBLEM, settings_of("identity", "afl-br"), seed).run()
    right = algorithm_2(run, "identity")
    assert run.vector.numpy().tobytes() == right.params.tobytes()
    assert np.array_equal(run.residuals, right.residuals)
    again = Absences(PROBLEM, settings_of("identity", "sgda"), seed).run()
    assert all(abs(summary.dual_weights.sum() - 1) < 1e-12 for summary in again.rounds)
    assert np.isfinite(again.vector.numpy()).all()


def local(i: int, updates: range, start: Vector) -> list[Vector]:
    """The models after each local step."""
    models, w = [], start.copy()
    for update in updates:
        w = w - PROBLEM.gradient(i, update, w) * np.float32(0.01)
        models.append(w)
    return models


def mean(models: dict[int, Vector], weights: dict[int, float], otherwise: Vector) -> NDArray[np.float64]:
    total = sum(weights[i] for i in models)
    if total == 0:
        return otherwise.astype(np.float64)
    return np.sum([weights[i] / total * model.astype(np.float64) for i, model in models.items()], axis=0)


@pytest.mark.parametrize("by_samples", [False, True])
@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_fedavg_is_the_mean_of_the_present(by_samples: bool, seed: int) -> None:
    chosen = AlgorithmSettings(
        WORKERS, 14, 1, 0.01, 0.0, name="fedavg", local_steps=3, weigh_by_samples=by_samples
    )
    run = Absences(PROBLEM, chosen, seed, every=3).run()
    w = PROBLEM.start.copy()
    for step in run.happened:
        if step.kind is Kind.TRAIN:
            updates = chosen.updates_of(step.position.round)
            models = {i: local(i, updates, w)[-1] for i in step.present}
            w = mean(models, {i: 7 + i if by_samples else 1 for i in models}, w).astype(np.float32)
    np.testing.assert_allclose(run.vector.numpy(), w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampled", [None, 3])
@settings(deadline=None, max_examples=15)
@given(seed=SEEDS)
def test_drfa_weighs_the_present_and_takes_the_last_losses_of_the_others(
    sampled: int | None, seed: int
) -> None:
    chosen = AlgorithmSettings(WORKERS, 14, 1, 0.01, 0.02, name="drfa", local_steps=3, sampled=sampled)
    run = Absences(PROBLEM, chosen, seed, every=3).run()
    randomness = SharedRandomness.from_int(7)
    w, snapshot, q, last = PROBLEM.start.copy(), PROBLEM.start, np.full(WORKERS, 1 / WORKERS), LastLosses()
    found = iter([*run.rounds[1:], None])
    for step in run.happened:
        for i in step.returned:
            last.reported[i] = last.on_their_way.pop(i, last.reported[i])
        s, updates = step.position.round, chosen.updates_of(step.position.round)
        if step.kind is Kind.TRAIN:
            weights = dict(enumerate(q))
            if sampled is not None:
                uniform = randomness.stream(Purpose.MODEL_SAMPLING, s).uniform(sampled)
                drawn = [int(np.sum(np.cumsum(q) <= u * q.sum())) for u in uniform]
                weights = {i: float(drawn.count(i)) for i in range(WORKERS)}
                assert step.asked == tuple(sorted(set(drawn)))
            models = {i: local(i, updates, w) for i in step.present}
            at = snapshot_offset(randomness, s, len(updates)) - 1
            before = w
            w = mean({i: steps[-1] for i, steps in models.items()}, weights, before).astype(np.float32)
            snapshot = mean({i: steps[at] for i, steps in models.items()}, weights, before).astype(np.float32)
        elif step.kind is Kind.LOSS:
            present = {i: PROBLEM.loss(i, s + 1000, snapshot) for i in step.present}
            for i in step.late:
                last.on_their_way[i] = PROBLEM.loss(i, s + 1000, snapshot)
            losses = last.of(step.asked, present)
            factor = len(updates) * WORKERS / len(step.asked)
            q = projected(q + 0.02 * factor * losses)
            summary = next(found)
            known = run.engine.dual_weights if summary is None else summary.dual_weights
            np.testing.assert_allclose(known, q, rtol=0, atol=1e-3)
            # Small differences would grow from step to step.
            q = known
    np.testing.assert_allclose(run.vector.numpy(), w, rtol=1e-3, atol=1e-3)


def projected(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """By bisection on theta in ``sum max(x - theta, 0) = 1``."""
    low, high = x.max() - 1, x.max()
    for _ in range(200):
        theta = (low + high) / 2
        low, high = (theta, high) if np.maximum(x - theta, 0).sum() > 1 else (low, theta)
    return np.maximum(x - low, 0)


@pytest.mark.parametrize("name", ["afl-com", "sgda", "drfa", "drfa of b", "fedavg"])
def test_where_nobody_is_absent_the_policy_changes_no_bit(name: str) -> None:
    tau = 1 if name in {"afl-com", "sgda"} else 3
    chosen = AlgorithmSettings(
        WORKERS,
        ROUNDS,
        5,
        0.01,
        0.01,
        *(COMPRESSORS["top-k"] if name == "afl-com" else (IDENTITY, IDENTITY)),
        name=name.removesuffix(" of b"),
        local_steps=tau,
        sampled=3 if name == "drfa of b" else None,
    )
    right = Federation(PROBLEM, chosen, evaluate_every=4).run()
    run = Absences(PROBLEM, chosen, 0, rate=0.0).run()
    assert run.vector.numpy().tobytes() == right.server.tobytes()
    np.testing.assert_array_equal([summary.losses for summary in run.rounds], right.losses)
    assert np.array_equal(run.engine.dual_weights, right.dual_weights[-1])
    assert [evaluation.metrics for evaluation in run.evaluations] == [
        evaluation.metrics for evaluation in right.evaluations
    ]


@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_records_name_the_absent(seed: int) -> None:
    run = Absences(PROBLEM, settings_of("top-k"), seed).run()
    trained = [step for step in run.happened if step.kind is Kind.TRAIN]
    for step, summary in zip(trained, run.rounds, strict=True):
        absent = tuple(i for i in range(WORKERS) if i not in step.present)
        assert summary.absent == absent == tuple(np.flatnonzero(np.isnan(summary.losses)))
    evaluated = [step for step in run.happened if step.kind is Kind.EVALUATE]
    for step, evaluation in zip(evaluated, run.evaluations, strict=True):
        assert evaluation.absent == tuple(i for i in range(WORKERS) if i not in step.present)
        assert all(
            (metrics == {}) == (i in evaluation.absent) for i, metrics in enumerate(evaluation.metrics)
        )
        assert evaluation.diverged == evaluation.non_finite == ()


@pytest.mark.parametrize("policy", [POLICY, AbsencePolicy()], ids=["skip", "wait"])
@settings(deadline=None, max_examples=10)
@given(seed=SEEDS)
def test_outcomes_close_the_steps_again_without_the_reports(policy: AbsencePolicy, seed: int) -> None:
    """The log of a server that skips: stand-ins for losses are in it, whatever the policy is from then on."""
    chosen = AlgorithmSettings(WORKERS, 14, 1, 0.01, 0.02, name="drfa", local_steps=3)
    for these in (settings_of("top-k"), chosen):
        run = Absences(PROBLEM, these, seed)
        outcomes = []
        advance = run.engine.advance

        def logged(
            advance: object = advance, run: Absences = run, outcomes: list[object] = outcomes
        ) -> object:
            opening = advance()  # type: ignore[operator]
            outcome = run.engine.last_outcome
            assert outcome is not None
            payload = outcome.payload
            kept = payload and type(payload)(payload.header, (memoryview(bytes(payload.data)),))
            unsent = {name: array.copy() for name, array in outcome.unsent.items()}
            outcomes.append(type(outcome)(outcome.step, outcome.losses, kept, unsent, outcome.evaluation))
            return opening

        run.engine.advance = logged  # type: ignore[assignment, method-assign]
        run.run()
        vector = PROBLEM.vector()
        again = RoundEngine(
            server_half(these, vector.values, SharedRandomness.from_int(7)),
            evaluate_every=4,
            policy=policy,
        )
        for outcome in outcomes:
            again.replay(outcome)
        assert vector.numpy().tobytes() == run.vector.numpy().tobytes()
        assert np.array_equal(again.dual_weights, run.engine.dual_weights)
        assert [again.counted(i) for i in range(WORKERS)] == [run.engine.counted(i) for i in range(WORKERS)]
        assert again.last_round is not None
        assert again.last_round.absent == run.rounds[-1].absent


# The engine by hand.

HEADER = PayloadHeader(Role.UPDATE, Encoding.DENSE, 2, 2, 8)


def engine(**policy: object) -> RoundEngine:
    chosen = AlgorithmSettings(4, 9, 100, 1.0, 1.0, name="afl-br")
    algorithm = server_half(chosen, torch.zeros(2), SharedRandomness.from_int(3))
    return RoundEngine(algorithm, evaluate_every=99, policy=AbsencePolicy(**policy))  # type: ignore[arg-type]


def send(to: RoundEngine, worker: int, round_: int = 1, loss: float = 1.0, x: float = 1.0) -> Ack | None:
    ack = to.begin_report(Report(worker, Position(round_, 0), loss, 4, (HEADER,)))
    return ack or to.add_piece(worker, 0, 0, struct.pack("<2f", x, -x))


def nothing(to: RoundEngine, worker: int, round_: int = 1) -> Ack | None:
    return to.begin_report(Report(worker, Position(round_, 0), 0.0, 0, missing="the loss is nan"))


def update_of(opening: object) -> tuple[float, float]:
    (payload,) = opening.payloads  # type: ignore[attr-defined]
    first, second = struct.unpack("<2f", payload.data)
    return first, second


def test_before_its_deadline_a_step_waits_for_all_and_after_it_for_a_quorum() -> None:
    driven = engine(skips_late=True, quorum=0.5)
    send(driven, 3, x=8.0)
    send(driven, 1, x=2.0)
    assert not driven.complete
    driven.expire()
    assert driven.complete
    opening = driven.advance()
    assert update_of(opening) == (10.0, -10.0)
    # The next step has a deadline of its own.
    send(driven, 0, 2)
    driven.expire()
    assert not driven.complete
    send(driven, 1, 2)
    assert driven.complete


def test_what_comes_after_the_close_is_late_and_what_counted_is_a_duplicate() -> None:
    driven = engine(skips_late=True, quorum=0.75)
    for worker in (0, 1, 2):
        send(driven, worker)
    driven.begin_report(Report(3, Position(1, 0), 5.0, 4, (HEADER,)))
    driven.expire()
    driven.advance()
    (ack,) = driven.cut_off
    assert (ack.worker, ack.position, ack.status) == (3, Position(1, 0), AckStatus.LATE)
    assert driven.incoming_header(3) is None
    late, again = send(driven, 3), send(driven, 0)
    assert late is not None
    assert late.status is AckStatus.LATE
    assert again is not None
    assert again.status is AckStatus.DUPLICATE
    assert [driven.counted(worker) for worker in range(4)] == [(1, 0)] * 3 + [(0, 0)]
    assert driven.is_late(3, Position(1, 0))
    assert not driven.is_late(0, Position(1, 0))
    assert not driven.is_late(3, Position(0, 0))
    assert not driven.is_late(3, Position(2, 0))
    # Two steps later the counted report is still known for what it is.
    for worker in (1, 2, 3):
        send(driven, worker, 2)
    driven.expire()
    driven.advance()
    again = send(driven, 0, 1)
    assert again is not None
    assert again.status is AckStatus.DUPLICATE


def test_an_absent_worker_s_loss_is_its_last_or_the_mean_of_the_others() -> None:
    driven = engine(skips_late=True, quorum=0.5)
    for worker, loss in enumerate((1.0, 2.0, 6.0)):
        send(driven, worker, loss=loss)
    driven.expire()
    driven.advance()
    weights = np.exp([1.0, 2.0, 6.0, 3.0])
    np.testing.assert_allclose(driven.dual_weights, weights / weights.sum(), rtol=1e-12)
    assert driven.last_round is not None
    assert driven.last_round.absent == (3,)
    # Its late report has a loss, which is then the newest that is known of it.
    send(driven, 3, 1, loss=4.0)
    send(driven, 0, 2, loss=0.5)
    send(driven, 1, 2, loss=0.25)
    driven.expire()
    driven.advance()
    weights *= np.exp([0.5, 0.25, 6.0, 4.0])
    np.testing.assert_allclose(driven.dual_weights, weights / weights.sum(), rtol=1e-12)


def test_the_mean_of_the_others_losses_does_not_overflow() -> None:
    driven = engine(skips_late=True)
    for worker in range(3):
        send(driven, worker, loss=1.7e308)
    driven.expire()
    driven.advance()
    np.testing.assert_allclose(driven.dual_weights, [0.25] * 4, rtol=1e-12)


def test_nothing_finite_leaves_a_worker_out_as_long_as_there_is_a_quorum() -> None:
    driven = engine(skips_non_finite=True)
    assert nothing(driven, 1) == Ack(1, Position(1, 0), AckStatus.ACCEPTED)
    send(driven, 0, x=1.0)
    send(driven, 2, x=2.0)
    assert not driven.complete
    send(driven, 3, x=4.0)
    assert update_of(driven.advance()) == (7.0, -7.0)
    assert driven.last_round is not None
    assert driven.last_round.absent == (1,)

    for worker in (0, 2):
        nothing(driven, worker, 2)
    assert not driven.complete
    nothing(driven, 3, 2)
    assert driven.complete
    with pytest.raises(
        NonFiniteError,
        match=r"round 2: 3 of 4 workers have nothing finite to report; the quorum is 2: worker 0: the loss is"
        r" nan; worker 2: the loss is nan; worker 3: the loss is nan",
    ):
        driven.advance()


def test_a_number_that_is_not_finite_is_noticed_by_the_server_too() -> None:
    driven = engine(skips_non_finite=True)
    ack = send(driven, 0, loss=math.inf)
    assert ack is not None
    assert (ack.status, ack.reason) == (
        AckStatus.REFUSED,
        "worker 0, round 1: the loss is inf; it must be finite",
    )
    ack = send(driven, 1, x=math.nan)
    assert ack is not None
    assert ack.status is AckStatus.REFUSED
    assert driven.missing() == [2, 3]
    send(driven, 2, x=2.0)
    send(driven, 3, x=4.0)
    assert update_of(driven.advance()) == (6.0, -6.0)
    with pytest.raises(NonFiniteError):
        send(engine(skips_late=True), 0, x=math.nan)


@pytest.mark.parametrize(
    "report",
    [
        Report(0, Position(1, 0), 0.0, 0, (HEADER,), missing="x"),
        Report(0, Position(1, 0), 0.0, 0, (), {"loss": 1.0}, missing="x"),
    ],
)
def test_a_report_of_nothing_holds_nothing(report: Report) -> None:
    with pytest.raises(ProtocolError, match="a report of nothing, where one is due"):
        engine(skips_non_finite=True).begin_report(report)


def test_a_report_of_nothing_is_refused_where_the_run_does_not_skip() -> None:
    with pytest.raises(ProtocolError, match="a report of nothing, where one is due"):
        nothing(engine(skips_late=True), 0)


def test_the_payloads_of_one_step_are_kept_until_it_is_closed() -> None:
    dim = 100_000
    chosen = AlgorithmSettings(4, 9, 3, 0.1, 0.1)
    half = server_half(chosen, torch.zeros(dim), SharedRandomness.from_int(3))
    driven = RoundEngine(half, evaluate_every=9, policy=AbsencePolicy(skips_late=True))
    header = PayloadHeader(Role.UPDATE, Encoding.DENSE, dim, dim, 4 * dim)
    tracemalloc.start()
    try:
        for round_ in (1, 2, 3):
            before = tracemalloc.get_traced_memory()[0]
            for worker in range(4):
                driven.begin_report(Report(worker, Position(round_, 0), 1.0, 4, (header,)))
                driven.add_piece(worker, 0, 0, bytes(4 * dim))
            held = tracemalloc.get_traced_memory()[0] - before
            assert held == pytest.approx(4 * 4 * dim, rel=0.05)
            driven.advance()
    finally:
        tracemalloc.stop()


def test_nothing_is_streamed_where_a_step_may_close_without_someone() -> None:
    assert engine(skips_late=True).next_step() is None
    assert engine().next_step() is not None


def test_a_quorum_is_rounded_up_as_it_is_written() -> None:
    assert [AbsencePolicy(quorum=0.55).needed(n) for n in (1, 2, 20, 21)] == [1, 2, 11, 12]
    assert AbsencePolicy(quorum=1.0).needed(7) == 7
    assert AbsencePolicy(quorum=1e-9).needed(7) == 1


def test_drfa_without_anyone_of_weight_keeps_the_model() -> None:
    chosen = AlgorithmSettings(2, 4, 1, 0.5, 9.0, name="drfa", local_steps=2)
    model = tuple(PayloadHeader(role, Encoding.DENSE, 2, 2, 8) for role in (Role.ITERATE, Role.SNAPSHOT))
    params = torch.tensor([5.0, 6.0])
    driven = RoundEngine(
        server_half(chosen, params, SharedRandomness.from_int(3)),
        evaluate_every=4,
        policy=AbsencePolicy(skips_late=True),
    )

    def train(round_: int, *workers: int) -> object:
        for worker in workers:
            driven.begin_report(Report(worker, Position(round_, 0), 1.0, 4, model))
            for index in range(2):
                driven.add_piece(worker, index, 0, struct.pack("<2f", 1.0 + worker, index))
        driven.expire()
        return driven.advance()

    assert update_of(train(1, 0)) == (1.0, 1.0)
    for worker, loss in enumerate((0.0, 50.0)):
        driven.begin_report(Report(worker, Position(1, 1), loss, 4))
    driven.advance()
    assert driven.dual_weights.tolist() == [0.0, 1.0]
    assert params.tolist() == [1.0, 0.0]
    assert update_of(train(2, 0)) == (1.0, 0.0)


# A worker's half.


class Model:
    """One gradient for all rounds."""

    train_examples = 1
    params = torch.zeros(2)

    def __init__(self, *gradient: float) -> None:
        self._gradient = gradient

    def publish(self) -> None: ...

    def loss(self, synchronization: int) -> tuple[float, int]:
        return 0.0, 1

    def gradient(self, update: int, scale: float) -> tuple[float, int, torch.Tensor]:
        return 0.0, 1, torch.tensor(self._gradient) * scale

    def weighted_gradient(self, update: int, scale: float) -> tuple[float, int, Weighted]:
        return 0.0, 1, Weighted([torch.tensor(self._gradient)], [len(self._gradient)], scale)


@pytest.mark.parametrize("keeps_old", [False, True])
def test_an_update_that_was_put_back_goes_with_the_next_and_leaves_no_residual(keeps_old: bool) -> None:
    chosen = AlgorithmSettings(1, 9, 3, 1.0, 1.0)
    half = worker_side(chosen, 2, SharedRandomness.from_int(1), [0], keeps_old=keeps_old).halves[0]
    report, payloads = half.train(Position(1, 0), 1.0, Model(1.0, 2.0))
    half.put_back(report, payloads)
    assert half.residual is not None
    assert half.residual.tolist() == [1.0, 2.0]
    _, (payload,) = half.train(Position(2, 0), 0.5, Model(4.0, 4.0))
    assert struct.unpack("<2f", payload.data) == (3.0, 4.0)
    assert half.residual is None
    _, (payload,) = half.train(Position(3, 0), 1.0, Model(4.0, 4.0))
    assert struct.unpack("<2f", payload.data) == (4.0, 4.0)


@pytest.mark.parametrize("name", ["top-k", "projection"])
def test_a_residual_that_overflows_stays_as_it_was(name: str) -> None:
    largest, dim = float(np.finfo(np.float32).max), 100_000 if name == "top-k" else 3
    options = {"ratio": 0.34}
    chosen = AlgorithmSettings(1, 9, 3, 1.0, 1.0, *[CompressorChoice(name, options)] * 2)
    half = worker_side(chosen, dim, SharedRandomness.from_int(1), [0], keeps_old=True).halves[0]
    first = np.random.default_rng(0).standard_normal(dim)
    half.train(Position(1, 0), 1.0, Model(*first.tolist()))
    assert half.residual is not None
    before = half.residual.clone()
    half.residual[-1] = largest
    before[-1] = largest
    overflowing = [*first.tolist()[:-1], largest]
    with pytest.raises(NonFiniteError, match="overflows float32"):
        half.train(Position(2, 0), 1.0, Model(*overflowing))
    assert half.residual.numpy().tobytes() == before.numpy().tobytes()


def test_a_late_message_that_overflows_is_not_put_back() -> None:
    largest = float(np.finfo(np.float32).max)
    feedback = ErrorFeedback(2)
    chosen = AlgorithmSettings(1, 9, 3, 1.0, 1.0)
    half = worker_side(chosen, 2, SharedRandomness.from_int(1), [0]).halves[0]
    answer = half.train(Position(1, 0), 1.0, Model(largest, 1.0))
    half.put_back(*answer)
    with pytest.raises(NonFiniteError, match="a late message overflows float32"):
        half.put_back(*answer)
    assert half.residual is not None
    assert half.residual.tolist() == [largest, 1.0]
    assert feedback.residual.tolist() == [0.0, 0.0]


# Divergence.


def test_a_run_diverges_after_so_many_evaluations_above_the_bound_in_a_row() -> None:
    watch = DivergenceWatch(2.0, 2)
    for losses in ((1.0, 2.5), (2.0, 2.0), (None, 2.0), (3.0, 1.0)):
        watch.see(7, [{} if loss is None else {"loss": loss} for loss in losses])
        watch.require()
    watch.see(8, [{"loss": 1.0}, {}, {"loss": 4.0}])
    with pytest.raises(DivergedError) as caught:
        watch.require()
    assert str(caught.value) == (
        "the run has diverged: after round 8 the loss of worker 2 is 4; the highest was above "
        "faults.divergence.max_loss (2) at 2 evaluations in a row; lower algorithm.eta_w or algorithm.eta_q, "
        "or raise max_loss if such a loss is right"
    )


def test_metrics_that_are_not_finite_exceed_every_bound() -> None:
    watch = DivergenceWatch(1e300, 1)
    watch.see(8, [{"loss": 1.0}, {}], [1])
    with pytest.raises(DivergedError, match=r"the loss of worker 1 is not finite.* at 1 evaluation in a row"):
        watch.require()


def test_an_evaluation_whose_metrics_are_not_finite_names_the_worker() -> None:
    driven = engine(skips_non_finite=True)
    driven.evaluate_every = 1
    for worker in range(4):
        send(driven, worker)
    driven.advance()
    at = Position(1, EVALUATION_PHASE)
    for worker in range(3):
        driven.begin_report(Report(worker, at, 0.5, 4, (), {"loss": 0.5}))
    driven.begin_report(Report(3, at, 0.0, 0, missing="the metric loss is nan"))
    driven.advance()
    found = driven.last_evaluation
    assert found is not None
    assert (found.absent, found.non_finite, found.metrics[3]) == ((3,), (3,), {})
