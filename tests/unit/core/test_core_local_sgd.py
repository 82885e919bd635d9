"""DRFA and FedAvg without sockets: any arrival, any cut, any hosting gives the same bits."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from core_federation import Federation, Outcome, Problem

from afl.core.algorithms.optimizers import power
from afl.core.algorithms.registry import server_half
from afl.core.algorithms.schedule import Schedule
from afl.core.algorithms.settings import AlgorithmSettings, OptimizerChoice
from afl.core.messages import EVALUATION_PHASE, Encoding, Kind, PayloadHeader, Position, Report, Role
from afl.core.randomness import SharedRandomness
from afl.core.rounds.engine import RoundEngine
from afl.errors import NonFiniteError, ProtocolError

DIM, WORKERS = 23, 4

SETTINGS = {
    "sgda": AlgorithmSettings(WORKERS, 14, 1, 0.01, 0.01, name="sgda"),
    "drfa": AlgorithmSettings(WORKERS, 14, 1, 0.01, 0.01, name="drfa", local_steps=3),
    "drfa of b": AlgorithmSettings(WORKERS, 14, 1, 0.01, 0.01, name="drfa", local_steps=3, sampled=2),
    "fedavg": AlgorithmSettings(WORKERS, 14, 1, 0.01, 0.0, name="fedavg", local_steps=3),
    "by samples": AlgorithmSettings(WORKERS, 14, 1, 0.01, 0.0, name="fedavg", weigh_by_samples=True),
}
SETTINGS |= {
    f"fedavg, {choice.name}": dataclasses.replace(SETTINGS["fedavg"], optimizer=choice, server_eta=0.25)
    for choice in (
        OptimizerChoice(),
        OptimizerChoice("momentum", 0.8),
        OptimizerChoice("adam", 0.8, 0.95, 1e-3),
    )
}

PROBLEM = Problem.random(WORKERS, DIM, seed=5)


def run(case: str, hosts: Sequence[Sequence[int]] | None = None, chaos: int | None = None) -> Outcome:
    federation = Federation(PROBLEM, SETTINGS[case], evaluate_every=5, hosts=hosts, chaos=chaos)
    outcome = federation.run()
    assert chaos is None or federation.resumed > 0
    return outcome


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("chaos", [1, 2, 3])
def test_arrivals_and_cuts_change_no_bit(case: str, chaos: int) -> None:
    right = run(case)
    hosts = {1: None, 2: [(0, 2), (1, 3)], 3: [(0, 1, 2, 3)]}[chaos]
    found = run(case, hosts, chaos)
    assert found.server.tobytes() == right.server.tobytes()
    assert np.array_equal(found.dual_weights, right.dual_weights)
    np.testing.assert_array_equal(found.losses, right.losses)
    assert right.server.tobytes() != PROBLEM.start.tobytes()


@pytest.mark.parametrize("case", SETTINGS)
def test_all_copies_are_the_server_s_at_each_evaluation(case: str) -> None:
    outcome = run(case)
    assert all(model.tobytes() == outcome.server.tobytes() for model in outcome.models)
    assert all(evaluation.diverged == () for evaluation in outcome.evaluations)
    tau = SETTINGS[case].local_steps
    assert [evaluation.round for evaluation in outcome.evaluations] == (
        [6, 12, 14] if tau == 3 else [5, 10, 14]
    )


def test_who_was_not_asked_has_no_loss() -> None:
    losses = np.array(run("drfa of b").losses)
    asked = (~np.isnan(losses)).sum(axis=1)
    assert set(asked.tolist()) <= {1, 2}
    assert not np.isnan(np.array(run("drfa").losses)).any()


# The engine with phases.


def header(role: Role) -> PayloadHeader:
    return PayloadHeader(role, Encoding.DENSE, 2, 2, 8)


def engine(name: str = "drfa", **changes: object) -> RoundEngine:
    settings = AlgorithmSettings(2, 4, 1, 0.5, 0.25, name=name, local_steps=2)
    settings = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
    algorithm = server_half(settings, torch.zeros(2), SharedRandomness.from_int(3))
    return RoundEngine(algorithm, evaluate_every=4)


def send(to: RoundEngine, report: Report, *payloads: list[float]) -> None:
    to.begin_report(report)
    for index, values in enumerate(payloads):
        to.add_piece(report.worker, index, 0, struct.pack("<2f", *values))


MODELS = (header(Role.ITERATE), header(Role.SNAPSHOT))


def test_a_synchronization_of_drfa_by_hand() -> None:
    driven = engine()
    assert driven.opening().step.kind is Kind.TRAIN
    send(driven, Report(0, Position(1, 0), 9.0, 4, MODELS), [1.0, 2.0], [10.0, 0.0])
    send(driven, Report(1, Position(1, 0), 9.0, 4, MODELS), [3.0, 6.0], [30.0, 2.0])
    opening = driven.advance()
    assert opening is not None
    assert (opening.step.position, opening.step.kind) == (Position(1, 1), Kind.LOSS)
    assert struct.unpack("<2f", b"".join(opening.payloads[0].sections)) == (20.0, 1.0)
    assert opening.step.payloads == (header(Role.SNAPSHOT),)
    assert driven.last_round is None

    # q = (1/2, 1/2) + 2 steps * 1/4 * (2, 1), which is 3/4 too much for each after the projection.
    send(driven, Report(0, Position(1, 1), 2.0, 4))
    send(driven, Report(1, Position(1, 1), 1.0, 4))
    opening = driven.advance()
    assert opening is not None
    assert (opening.step.position, opening.step.kind) == (Position(2, 0), Kind.TRAIN)
    assert struct.unpack("<2f", b"".join(opening.payloads[0].sections)) == (2.0, 4.0)
    assert opening.dual_weights.tolist() == [0.75, 0.25]
    assert driven.algorithm.params.tolist() == [2.0, 4.0]
    assert driven.last_round is not None
    assert (driven.last_round.round, driven.last_round.synchronization) == (2, 1)
    assert driven.last_round.losses.tolist() == [9.0, 9.0]
    assert driven.last_round.dual_weights.tolist() == [0.5, 0.5]


def test_fedavg_by_samples_by_hand() -> None:
    driven = engine("fedavg", weigh_by_samples=True, local_steps=4)
    model = (header(Role.ITERATE),)
    send(driven, Report(1, Position(1, 0), 1.0, 4, model, weight=3.0), [4.0, 8.0])
    send(driven, Report(0, Position(1, 0), 1.0, 4, model, weight=1.0), [0.0, -8.0])
    opening = driven.advance()
    assert opening is not None
    assert opening.step.position == Position(1, EVALUATION_PHASE)
    assert struct.unpack("<2f", b"".join(opening.payloads[0].sections)) == (3.0, 4.0)
    assert driven.last_round is not None
    assert driven.last_round.dual_weights.tolist() == [0.25, 0.75], "known from the first round's reports"


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_the_server_s_optimizer_steps_along_the_mean_change(name: str) -> None:
    """In float32, as numpy has it; the schedule and the weight decay are of the workers' steps alone."""
    choice = OptimizerChoice(name, 0.8, 0.95, 1e-3)
    driven = engine(
        "fedavg",
        rounds=8,
        optimizer=choice,
        server_eta=0.3,
        weight_decay=0.5,
        schedule=Schedule(then="cosine"),
    )
    f, w, m, v = np.float32, np.zeros(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    model, position = (header(Role.ITERATE),), 1
    while not driven.finished:
        if driven.step.kind is Kind.EVALUATE:
            for worker in (0, 1):
                metrics = {"loss": 1.0}
                driven.begin_report(Report(worker, driven.step.position, 0.0, 1, metrics=metrics))
            driven.advance()
            continue
        models = [w + f(position) * np.array(change, np.float32) for change in ((1, 2), (3, -2.5))]
        for worker, values in enumerate(models):
            send(driven, Report(worker, Position(position, 0), 1.0, 4, model), values.tolist())
        opening = driven.advance()
        d = w - (models[0] + models[1]) / f(2)
        if name == "sgd":
            w = w - f(0.3) * d
        elif name == "momentum":
            v = f(0.8) * v + d
            w = w - f(0.3) * v
        else:
            m = f(0.8) * m + f(1.0 - 0.8) * d
            v = f(0.95) * v + d * d * f(1.0 - 0.95)
            root = math.sqrt(1.0 - power(0.95, position))
            w = w - f(0.3 * root / (1.0 - power(0.8, position))) * (m / (np.sqrt(v) + f(1e-3 * root)))
        assert opening is not None
        sent = np.frombuffer(b"".join(opening.payloads[0].sections), np.float32)
        assert sent.tobytes() == w.tobytes()
        position += 1
    assert position == 5


def test_a_server_s_step_that_overflows_is_named() -> None:
    driven = engine("fedavg", server_eta=1e12)
    model = (header(Role.ITERATE),)
    for worker in (0, 1):
        send(driven, Report(worker, Position(1, 0), 1.0, 4, model), [1e30, 1.0])
    with pytest.raises(NonFiniteError, match=r"round 2: the server's step .*; lower algorithm\.server_eta"):
        driven.advance()


@pytest.mark.parametrize("weight", [0.0, -1.0, 0.5, float("nan"), float("inf"), 2.0**60])
def test_a_weight_that_is_no_number_of_examples_is_refused(weight: float) -> None:
    driven = engine("fedavg", weigh_by_samples=True)
    with pytest.raises(ProtocolError, match=r"worker 1 reports .* training examples; it must be"):
        driven.begin_report(Report(1, Position(1, 0), 1.0, 4, (header(Role.ITERATE),), weight=weight))
    assert not driven.holds(1)


def test_a_second_payload_is_cut_and_resumed() -> None:
    whole, cut = engine(), engine()
    for driven in (whole, cut):
        send(driven, Report(0, Position(1, 0), 1.0, 4, MODELS), [1.0, 2.0], [0.1, 0.3])
    report = Report(1, Position(1, 0), 1.0, 4, MODELS)
    send(whole, report, [3.0, 5.0], [0.7, 0.9])
    cut.begin_report(report)
    cut.add_piece(1, 0, 0, struct.pack("<2f", 3.0, 5.0))
    cut.add_piece(1, 1, 0, struct.pack("<f", 0.7))
    cut.begin_report(report)
    assert cut.arrived(1) == (1, 4)
    cut.add_piece(1, 1, 4, struct.pack("<f", 0.9))
    first, second = whole.advance(), cut.advance()
    assert first is not None
    assert second is not None
    assert bytes(first.payloads[0].sections[0]) == bytes(second.payloads[0].sections[0])


def test_a_restarted_synchronization_forgets_both_sums() -> None:
    driven = engine()
    send(driven, Report(0, Position(1, 0), 1.0, 4, MODELS), [7.0, 7.0], [7.0, 7.0])
    driven.restart_round()
    assert driven.missing() == [0, 1]
    for worker in range(2):
        send(driven, Report(worker, Position(1, 0), 1.0, 4, MODELS), [1.0, 1.0], [2.0, 2.0])
    opening = driven.advance()
    assert opening is not None
    assert struct.unpack("<2f", bytes(opening.payloads[0].sections[0])) == (2.0, 2.0)


def test_only_the_asked_may_report() -> None:
    driven = engine(sampled=1)
    (asked,) = driven.participants
    with pytest.raises(ProtocolError, match="a report that was not asked for"):
        driven.begin_report(Report(1 - asked, Position(1, 0), 1.0, 4, MODELS))
    assert driven.missing() == [asked]
    assert driven.arrived(1 - asked) == (0, 0)


def test_a_sum_of_models_that_overflows_is_named() -> None:
    driven = engine()
    largest = float(np.finfo(np.float32).max)
    for worker in range(2):
        send(driven, Report(worker, Position(1, 0), 1.0, 4, MODELS), [largest, 0.0], [0.0, 0.0])
    # The mean of two is their half each: no overflow. By samples, the sum is taken first.
    assert driven.advance() is not None
    driven = engine("fedavg", weigh_by_samples=True)
    model = (header(Role.ITERATE),)
    for worker in range(2):
        send(driven, Report(worker, Position(1, 0), 1.0, 4, model, weight=2.0), [largest, 0.0])
    with pytest.raises(NonFiniteError, match="the sum of the workers' models overflows float32"):
        driven.advance()
    driven.algorithm.settle()
    assert driven.algorithm.params.tolist() == [0.0, 0.0]


def test_a_loss_near_the_end_of_the_doubles_moves_the_weights_and_no_more() -> None:
    driven = engine()
    for worker in range(2):
        send(driven, Report(worker, Position(1, 0), 1.0, 4, MODELS), [1.0, 1.0], [1.0, 1.0])
    driven.advance()
    for worker, loss in enumerate((1.7e308, -1.7e308)):
        send(driven, Report(worker, Position(1, 1), loss, 4))
    opening = driven.advance()
    assert opening is not None
    assert opening.dual_weights.tolist() == [1.0, 0.0]


def test_another_number_of_examples_counts_only_before_any_of_the_model() -> None:
    model = (header(Role.ITERATE),)
    driven = engine("fedavg", weigh_by_samples=True)
    driven.begin_report(Report(0, Position(1, 0), 1.0, 4, model, weight=1000.0))
    assert driven.drop_beginning(0)
    send(driven, Report(0, Position(1, 0), 1.0, 4, model, weight=1.0), [1.0, 1.0])
    driven.begin_report(Report(1, Position(1, 0), 1.0, 4, model, weight=1000.0))
    driven.add_piece(1, 0, 0, struct.pack("<f", 1.0))
    with pytest.raises(ProtocolError, match="another report than the one whose beginning has come"):
        driven.begin_report(Report(1, Position(1, 0), 1.0, 4, model, weight=1.0))
    driven.add_piece(1, 0, 4, struct.pack("<f", 1.0))
    opening = driven.advance()
    assert opening is not None
    assert struct.unpack("<2f", bytes(opening.payloads[0].sections[0])) == (1.0, 1.0)
