"""AFL-Com, its engine and its participants against Algorithm 2 written in plain numpy, to the bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from core_federation import Federation, Outcome, Problem, Vector, uplink_residual
from numpy.typing import NDArray

from afl.core import compressors
from afl.core.algorithms.afl_com import Realizations
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.compressors.rand_k import RandK
from afl.core.messages import EVALUATION_PHASE, NOWHERE, CommittedStep, Kind, Position
from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import NonFiniteError, ProtocolError

SEED = 7
WORKERS, DIM, ROUNDS, BLOCK = 5, 41, 33, 7
ETA_W, ETA_Q = 0.02, 0.013

IDENTITY = CompressorChoice()
RAND_K = CompressorChoice("rand-k", {"ratio": 0.3})
TOP_K = CompressorChoice("top-k", {"ratio": 0.2})
PAIRS = {
    "identity": (IDENTITY, IDENTITY),
    "rand-k": (RAND_K, RAND_K),
    "top-k": (TOP_K, TOP_K),
    "top-k up, identity down": (TOP_K, IDENTITY),
    "identity up, top-k down": (IDENTITY, TOP_K),
    "rand-k up, top-k down": (RAND_K, TOP_K),
    "top-k up, rand-k down": (TOP_K, RAND_K),
    "two rand-k": (RAND_K, CompressorChoice("rand-k", {"ratio": 0.6})),
}
LOSSLESS_DOWNLINK = ("identity", "rand-k", "top-k up, identity down")

PROBLEM = Problem.random(WORKERS, DIM)


@dataclasses.dataclass
class Reference:
    params: Vector
    uplink: NDArray[np.float32]
    downlink: Vector
    dual_weights: list[NDArray[np.float64]]
    losses: list[NDArray[np.float64]]


def mask_of(
    choice: CompressorChoice, vector: Vector, round_: int, purpose: Purpose = Purpose.COMPRESSOR
) -> NDArray[np.bool_]:
    """The coordinates that C_t keeps of ``vector``."""
    mask = np.zeros(DIM, dtype=np.bool_)
    if choice.name == "identity":
        mask[:] = True
        return mask
    count = max(1, round(choice.options["ratio"] * DIM))
    if choice.name == "top-k":
        mask[np.lexsort((np.arange(DIM), -np.abs(vector)))[:count]] = True
    else:
        stream = SharedRandomness.from_int(SEED).stream(purpose, round_)
        mask[stream.subset(DIM, count)] = True
    return mask


def algorithm_2(up: CompressorChoice, down: CompressorChoice, *, weigh_outside: bool = False) -> Reference:
    """The paper's Algorithm 2, line by line, in float32 with float64 dual weights."""
    w = PROBLEM.start.copy()
    e = np.zeros((WORKERS, DIM), dtype=np.float32)
    e_hat = np.zeros(DIM, dtype=np.float32)
    q = np.full(WORKERS, 1 / WORKERS)
    history, all_losses = [q], []
    for t in range(1, ROUNDS + 1):
        total = np.zeros(DIM, dtype=np.float32)
        losses = np.zeros(WORKERS)
        for i in range(WORKERS):
            losses[i] = PROBLEM.loss(i, t, w)
            weight = np.float32(q[i])
            signal = PROBLEM.gradient(i, t, w)
            p = e[i] + (signal if weigh_outside else weight * signal)
            c = np.where(mask_of(up, p, t), p, np.float32(0))
            e[i] = p - c
            total = total + (weight * c if weigh_outside else c)
        s = e_hat + total
        # Another downlink compressor draws from a stream of its own.
        own = Purpose.COMPRESSOR if down == up else Purpose.DOWNLINK_COMPRESSOR
        d = np.where(mask_of(down, s, t, own), s, np.float32(0))
        e_hat = s - d
        if t % BLOCK == 0:
            q = np.full(WORKERS, 1 / WORKERS)
        else:
            raised = q * np.exp(ETA_Q * (losses - losses.max()))
            q = raised / raised.sum()
        w = w - np.float32(ETA_W) * d
        history.append(q)
        all_losses.append(losses)
    return Reference(w, e, e_hat, history, all_losses)


def settings(pair: str) -> AlgorithmSettings:
    up, down = PAIRS[pair]
    return AlgorithmSettings(WORKERS, ROUNDS, BLOCK, ETA_W, ETA_Q, up, down)


def run(pair: str, **options: object) -> Outcome:
    return Federation(PROBLEM, settings(pair), evaluate_every=10, seed=SEED, **options).run()  # type: ignore[arg-type]


def check(outcome: Outcome, right: Reference) -> None:
    for model in (outcome.server, *outcome.models):
        assert model.tobytes() == right.params.tobytes()
    np.testing.assert_allclose(outcome.dual_weights, right.dual_weights, rtol=0, atol=1e-12)
    assert np.array_equal(outcome.losses, right.losses)
    assert outcome.uplink_residuals.tobytes() == right.uplink.tobytes()
    assert outcome.downlink_residual.tobytes() == right.downlink.tobytes()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_federation_is_algorithm_2_to_the_bit(pair: str) -> None:
    right = algorithm_2(*PAIRS[pair])
    # The problem is worth it: weights far from uniform, a model that moved.
    assert max(q.max() for q in right.dual_weights) > 2 / WORKERS
    assert np.abs(right.params - PROBLEM.start).max() > 0.1
    outcome = run(pair)
    check(outcome, right)
    assert [evaluation.round for evaluation in outcome.evaluations] == [10, 20, 30, 33]
    assert all(evaluation.diverged == () for evaluation in outcome.evaluations)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("chaos", [1, 2, 3])
def test_arrival_order_pieces_cuts_and_hosting_never_change_a_bit(pair: str, chaos: int) -> None:
    hosts = [[(0, 2), (1,), (3, 4)], [(0, 1, 2, 3, 4)], None][chaos - 1]
    federation = Federation(
        PROBLEM, settings(pair), evaluate_every=40, hosts=hosts, chaos=chaos, seed=SEED, forward=chaos != 2
    )
    check(federation.run(), algorithm_2(*PAIRS[pair]))
    assert federation.resumed > 5


@pytest.mark.parametrize("pair", LOSSLESS_DOWNLINK)
@pytest.mark.parametrize("forward", [True, False])
def test_the_downlink_residual_is_zero_to_the_bit(pair: str, forward: bool) -> None:
    outcome = run(pair, forward=forward)
    assert outcome.downlink_residual.tobytes() == bytes(4 * DIM)
    check(outcome, algorithm_2(*PAIRS[pair]))


@pytest.mark.parametrize("pair", ["top-k", "identity up, top-k down", "two rand-k", "rand-k up, top-k down"])
def test_the_downlink_residual_is_kept_where_the_downlink_loses_something(pair: str) -> None:
    assert run(pair).downlink_residual.any()


@pytest.mark.parametrize("pair", ["top-k", "rand-k"])
def test_the_weight_is_applied_inside_error_feedback(pair: str) -> None:
    outcome = run(pair)
    outside = algorithm_2(*PAIRS[pair], weigh_outside=True)
    assert np.abs(outcome.server - outside.params).max() > 1e-4
    with pytest.raises(AssertionError):
        check(outcome, outside)


def test_without_compression_inside_and_outside_are_the_same() -> None:
    # So the difference above is the residual's, not the reference's.
    inside, outside = (algorithm_2(IDENTITY, IDENTITY, weigh_outside=where) for where in (False, True))
    assert inside.params.tobytes() == outside.params.tobytes()


def test_evaluation_between_rounds_changes_nothing() -> None:
    def with_every(every: int) -> Outcome:
        return Federation(PROBLEM, settings("top-k"), evaluate_every=every, seed=SEED).run()

    often, never = with_every(1), with_every(1000)
    assert often.server.tobytes() == never.server.tobytes()
    assert [evaluation.round for evaluation in often.evaluations] == list(range(1, ROUNDS + 1))
    assert [evaluation.round for evaluation in never.evaluations] == [ROUNDS]


def test_an_evaluation_reports_the_model_after_its_round() -> None:
    outcome = run("identity")
    last = outcome.evaluations[-1]
    right = [PROBLEM.loss(worker, 0, outcome.server) for worker in range(WORKERS)]
    assert [metrics["loss"] for metrics in last.metrics] == right
    assert last.examples == (10, 11, 12, 13, 14)


def test_another_seed_gives_another_run_with_rand_k_only() -> None:
    def with_seed(pair: str, seed: int) -> bytes:
        return Federation(PROBLEM, settings(pair), evaluate_every=50, seed=seed).run().server.tobytes()

    assert with_seed("rand-k", 1) != with_seed("rand-k", 2)
    assert with_seed("top-k", 1) == with_seed("top-k", 2)


# Streaming of the downlink.


def test_the_streamed_beginning_is_the_beginning_of_what_is_broadcast() -> None:
    federation = Federation(PROBLEM, settings("rand-k"), evaluate_every=50, seed=SEED)
    engine, algorithm = federation.engine, federation.algorithm
    answers = []
    for participant, step in zip(
        federation.participants, federation._broadcast(engine.opening()), strict=True
    ):
        answers += [answer for _, answer in participant.take(step)]
    count = round(0.3 * DIM)
    seen: list[bytes] = []
    for report, payloads in answers:
        engine.begin_report(report)
        data = b"".join(payloads[0].sections)
        assert len(data) == 4 * count
        for start in range(0, len(data), 16):
            engine.add_piece(report.worker, 0, start, data[start : start + 16])
            seen.append(bytes(algorithm.streamed()))
    assert seen[: 4 * 3] == [b""] * 12
    assert [len(data) for data in seen[-3:]] == [16, 32, 48]
    following = engine.next_step()
    opening = engine.advance()
    assert opening is not None
    assert following == opening.step
    whole = b"".join(opening.payloads[0].sections)
    assert all(whole.startswith(data) for data in seen)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in ("identity", "rand-k")])
def test_nothing_is_streamed_where_the_server_compresses_again(pair: str) -> None:
    federation = Federation(PROBLEM, settings(pair), evaluate_every=50, seed=SEED)
    assert federation.algorithm.streamed_header() is None
    assert federation.engine.next_step() is None


# Realizations.


@pytest.mark.parametrize("pair", ["rand-k", "two rand-k"])
def test_realizations_are_those_of_their_round_in_whatever_order_they_are_asked_for(pair: str) -> None:
    randomness = SharedRandomness.from_int(SEED)
    realizations = Realizations(settings(pair), DIM, randomness)
    counts = [round(choice.options["ratio"] * DIM) for choice in PAIRS[pair]]

    own = Purpose.COMPRESSOR if pair == "rand-k" else Purpose.DOWNLINK_COMPRESSOR

    def support(round_: int, count: int, purpose: Purpose) -> bytes:
        return randomness.stream(purpose, round_).subset(DIM, count).astype("<i8").tobytes()

    first_digest = realizations.digest_material()
    for round_ in (1, 5, 6, 7, 8, 9, 2, 10, 1, 3, 11):
        realizations.prepare(round_)
        assert realizations.of_uplink(round_).digest_material() == support(
            round_, counts[0], Purpose.COMPRESSOR
        )
        assert realizations.of_downlink(round_).digest_material() == support(round_, counts[1], own)
    # A worker that comes back late in a run is asked for its first realization again.
    assert realizations.digest_material() == first_digest
    assert len(realizations._drawn) <= 4


class Alone(RandK):
    """A random compressor that does not claim to be additive and idempotent."""

    name = "alone"
    additive_idempotent = False


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> CompressorChoice:
    """Found under its name."""
    right = compressors.compressor_class
    monkeypatch.setattr(
        compressors, "compressor_class", lambda name: Alone if name == "alone" else right(name)
    )
    return CompressorChoice("alone", {"ratio": 0.3})


def test_a_random_compressor_both_ways_is_drawn_for_each_way_unless_it_loses_nothing_down(
    alone: CompressorChoice,
) -> None:
    """The independence that Theorem 2's proof asks for: s is not compressed by what made it."""
    one = AlgorithmSettings(WORKERS, ROUNDS, BLOCK, ETA_W, ETA_Q, alone, alone)
    randomness = SharedRandomness.from_int(SEED)
    realizations = Realizations(one, DIM, randomness)
    for round_ in (1, 2, 3):
        for drawn, purpose in (
            (realizations.of_uplink(round_), Purpose.COMPRESSOR),
            (realizations.of_downlink(round_), Purpose.DOWNLINK_COMPRESSOR),
        ):
            support = randomness.stream(purpose, round_).subset(DIM, 12)
            assert drawn.digest_material() == support.astype("<i8").tobytes()
    federation = Federation(PROBLEM, one, evaluate_every=7, chaos=1, seed=SEED)
    outcome = federation.run()
    assert outcome.downlink_residual.any()
    assert all(model.tobytes() == outcome.server.tobytes() for model in outcome.models)
    # An earlier version, which draws it once, is refused even if realizations say nothing of themselves.
    assert realizations.digest_material().endswith(b"drawn apart")


# A participant and what it is sent.


def opened(pair: str = "top-k") -> tuple[Federation, CommittedStep]:
    federation = Federation(PROBLEM, settings(pair), evaluate_every=50, hosts=[range(WORKERS)], seed=SEED)
    (committed,) = federation._broadcast(federation.engine.opening())
    return federation, committed


def test_a_step_that_comes_again_is_answered_again_and_moves_nothing() -> None:
    federation, committed = opened()
    (participant,) = federation.participants
    first = list(participant.take(committed))
    residuals = [uplink_residual(half, DIM).clone() for half in federation.sides[0].halves.values()]
    model = participant.vector.digest()
    again = list(participant.take(committed))
    assert [answer for _, answer in again] == [answer for _, answer in first]
    assert all(one[1] is other[1] for one, other in zip(first, again, strict=True))
    assert participant._oracle.calls == WORKERS  # type: ignore[attr-defined]
    for half, before in zip(federation.sides[0].halves.values(), residuals, strict=True):
        assert uplink_residual(half, DIM).equal(before)
    assert participant.vector.digest() == model
    assert participant.applied == Position(1, 0)
    assert [participant.reported(worker) for worker in range(WORKERS)] == [Position(1, 0)] * WORKERS


def test_a_payload_that_comes_again_is_applied_once() -> None:
    federation, committed = opened("identity")
    (participant,) = federation.participants
    for _, (report, payloads) in list(participant.take(committed)):
        federation.engine.begin_report(report)
        federation.engine.add_piece(report.worker, 0, 0, b"".join(payloads[0].sections))
    opening = federation.engine.advance()
    assert opening is not None
    (following,) = federation._broadcast(opening)
    federation.algorithm.settle()
    moved = federation.params.numpy().tobytes()
    assert moved != PROBLEM.start.tobytes()
    for _ in range(3):
        list(participant.take(following))
        assert participant.vector.numpy().tobytes() == moved


def test_a_step_from_before_is_refused() -> None:
    federation, committed = opened()
    (participant,) = federation.participants
    list(participant.take(committed))
    later = dataclasses.replace(committed, step=dataclasses.replace(committed.step, position=Position(2, 0)))
    list(participant.take(later))
    with pytest.raises(ProtocolError, match=r"the server sent round 1, phase 0 after round 2, phase 0"):
        list(participant.take(committed))


def test_nothing_is_reported_before_the_first_step() -> None:
    federation, _ = opened()
    (participant,) = federation.participants
    assert participant.applied == NOWHERE
    assert participant.reported(0) == NOWHERE
    assert participant.held(0, Position(1, 0)) is None


@pytest.mark.parametrize("what", ["loss", "gradient", "metric"])
def test_what_is_not_finite_is_never_sent_and_leaves_no_trace(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, committed = opened()
    (participant,) = federation.participants
    oracle = participant._oracle
    if what == "metric":
        committed = dataclasses.replace(
            committed,
            step=dataclasses.replace(
                committed.step, kind=Kind.EVALUATE, position=Position(1, EVALUATION_PHASE)
            ),
        )
        monkeypatch.setattr(oracle, "evaluate", lambda worker: ({"loss": 1.0, "auc": float("nan")}, 3))
    else:

        def poisoned(worker: int, round_: int, scale: float) -> object:
            loss, count, gradient = type(oracle).gradient(oracle, worker, round_, scale)
            if what == "gradient":
                gradient[3] = float("inf")
            return (float("nan") if what == "loss" else loss), count, gradient

        monkeypatch.setattr(oracle, "gradient", poisoned)
    with pytest.raises(NonFiniteError, match=f"the {what}"):
        list(participant.take(committed))
    assert participant.reported(0) == NOWHERE
    assert not any(uplink_residual(half, DIM).any() for half in federation.sides[0].halves.values())
    assert participant.vector.numpy().tobytes() == PROBLEM.start.tobytes()
