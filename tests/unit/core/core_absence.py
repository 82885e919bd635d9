"""A federation without sockets whose workers are late, cut off or without finite numbers, by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from core_federation import Problem, ProblemOracle, uplink_residual
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.base import WorkerSide
from afl.core.algorithms.registry import server_half, worker_side
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.messages import Ack, AckStatus, CommittedStep, Kind, Payload, Position, Report, Step
from afl.core.participant import Participant
from afl.core.randomness import SharedRandomness
from afl.core.rounds.engine import RoundEngine
from afl.core.rounds.policy import AbsencePolicy
from afl.core.rounds.results import Evaluation, Opening, RoundSummary
from afl_server.federation.broadcast import model_payloads

POLICY = AbsencePolicy(skips_late=True, skips_non_finite=True, quorum=1e-9)
Answer = tuple[Report, list[Payload]]


class FaultyOracle(ProblemOracle):
    """The problem, but for chosen (worker, update round) whose gradient is not a number."""

    def __init__(self, problem: Problem, vector: object, faulty: set[tuple[int, int]]) -> None:
        super().__init__(problem, vector)  # type: ignore[arg-type]
        self._faulty = faulty

    def gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Tensor]:
        loss, examples, gradient = super().gradient(worker, round_, scale)
        return loss, examples, gradient * (float("nan") if (worker, round_) in self._faulty else 1.0)


@dataclass
class Happened:
    """One step: who took part, and how; ``returned`` before anyone answered it."""

    position: Position
    kind: Kind
    asked: tuple[int, ...]
    present: tuple[int, ...]
    late: tuple[int, ...]
    cut: tuple[int, ...]
    nothing: tuple[int, ...]
    returned: tuple[int, ...]


@dataclass
class Absences:
    """Runs to the end; one process a worker.

    Args:
        seed: of who is absent, when and how.
        rate: the share of absences.
    """

    problem: Problem
    settings: AlgorithmSettings
    seed: int
    rate: float = 0.4
    policy: AbsencePolicy = POLICY
    every: int = 4
    happened: list[Happened] = field(default_factory=list)
    rounds: list[RoundSummary] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def __post_init__(self) -> None:
        randomness = SharedRandomness.from_int(7)
        self.workers = range(self.problem.workers)
        self.vector = self.problem.vector()
        self.algorithm = server_half(self.settings, self.vector.values, randomness)
        self.engine = RoundEngine(
            self.algorithm, evaluate_every=self.every, policy=self.policy, model=self.vector
        )
        self.faulty: set[tuple[int, int]] = set()
        self.participants: list[Participant] = []
        self.sides: list[WorkerSide] = []
        for worker in self.workers:
            vector = self.problem.vector()
            side = worker_side(self.settings, vector.dim, randomness, [worker], keeps_old=True)
            oracle = FaultyOracle(self.problem, vector, self.faulty)
            self.sides.append(side)
            self.participants.append(Participant(vector, side, oracle, [worker], skips_non_finite=True))
        self._random = random.Random(self.seed)
        self._out: dict[int, tuple[int, Answer]] = {}

    @property
    def residuals(self) -> NDArray[np.float32]:
        return np.array(
            [
                uplink_residual(side.halves[worker], self.vector.dim).numpy()
                for worker, side in enumerate(self.sides)
            ]
        )

    def run(self) -> Absences:
        opening: Opening | None = self.engine.opening()
        while opening is not None:
            opening = self._step(opening)
        for worker in list(self._out):
            self._return(worker)
        return self

    def _step(self, opening: Opening) -> Opening | None:
        number, engine = len(self.happened), self.engine
        asked = tuple(opening.participants)
        committed = {worker: _committed(opening, worker) for worker in asked}
        returned = [worker for worker, (due, _) in self._out.items() if due <= number]
        if all(worker in self._out for worker in asked) and not set(returned) & set(asked):
            returned.append(asked[0])
        for worker in returned:
            self._return(worker)
            self._catch_up(worker, opening)
        idle = [worker for worker in asked if worker not in self._out]
        how = {worker: self._fate(opening.step) for worker in idle}
        if "present" not in how.values():
            how[self._random.choice(idle)] = "present"
        answers: dict[int, Answer] = {}
        for worker in idle:
            if how[worker] == "nothing":
                self.faulty.update(
                    (worker, update) for update in self.settings.updates_of(opening.step.position.round)
                )
            ((_, answers[worker]),) = self.participants[worker].take(committed[worker])
        self._random.shuffle(idle)
        for worker in idle:
            if how[worker] in {"present", "nothing"}:
                ack = send(engine, answers[worker])
                assert ack is not None
                assert ack.status is AckStatus.ACCEPTED
            elif how[worker] == "cut":
                send(engine, answers[worker], complete=False)
            else:
                self._out[worker] = (number + self._random.randint(1, 4), answers[worker])
        if not engine.complete:
            engine.expire()
        assert engine.complete
        by = {name: tuple(sorted(w for w in idle if how[w] == name)) for name in FATES}
        self.happened.append(
            Happened(
                opening.step.position,
                opening.step.kind,
                asked,
                by["present"],
                by["late"],
                by["cut"],
                by["nothing"],
                tuple(returned),
            )
        )
        round_, evaluation = engine.last_round, engine.last_evaluation
        following = engine.advance()
        assert {ack.worker for ack in engine.cut_off} == set(by["cut"])
        following = following and replace(following, payloads=_kept(following.payloads))
        self.algorithm.settle()
        if engine.last_round is not round_ and engine.last_round is not None:
            self.rounds.append(engine.last_round)
        if engine.last_evaluation is not evaluation and engine.last_evaluation is not None:
            self.evaluations.append(engine.last_evaluation)
        for ack in engine.cut_off:
            self._put_back(ack)
            if following is not None:
                self._catch_up(ack.worker, following)
        return following

    def _fate(self, step: Step) -> str:
        if self._random.random() >= self.rate:
            return "present"
        fates = ["late", "cut", "nothing"]
        if step.kind is not Kind.TRAIN:
            fates = ["late"]
        return self._random.choice(fates)

    def _return(self, worker: int) -> None:
        """The late report arrives."""
        _, answer = self._out.pop(worker)
        assert self.engine.is_late(worker, answer[0].position) or self.engine.finished
        ack = self.engine.begin_report(answer[0])
        assert ack is not None
        self._put_back(ack)

    def _put_back(self, ack: Ack) -> None:
        assert ack.status is AckStatus.LATE
        participant = self.participants[ack.worker]
        assert participant.late(ack.worker, ack.position)
        assert not participant.late(ack.worker, ack.position)

    def _catch_up(self, worker: int, opening: Opening) -> None:
        """The model as it is now, and then the open step as for all."""
        payloads = model_payloads(self.vector, self.algorithm.worker_params, self.algorithm.companions)
        step = Step(opening.step.position, Kind.MODEL, tuple(payload.header for payload in payloads))
        model = Opening(step, tuple(payloads), opening.dual_weights, opening.participants)
        assert list(self.participants[worker].take(_committed(model, worker))) == []


FATES = ("present", "late", "cut", "nothing")


def send(engine: RoundEngine, answer: Answer, *, complete: bool = True) -> Ack | None:
    """A report and its payloads, or all of it but the last value."""
    report, payloads = answer
    ack = engine.begin_report(report)
    for index, payload in enumerate(payloads):
        data = bytes(payload.data)
        if not complete and index == len(payloads) - 1:
            data = data[:-4]
        for start in range(0, len(data), 40):
            ack = engine.add_piece(report.worker, index, start, data[start : start + 40])
    return ack


def _committed(opening: Opening, worker: int) -> CommittedStep:
    weights = {worker: float(opening.dual_weights[worker])} if len(opening.dual_weights) else {}
    return CommittedStep(
        opening.step, tuple(memoryview(bytes(payload.data)) for payload in opening.payloads), weights
    )


def _kept(payloads: Sequence[Payload]) -> tuple[Payload, ...]:
    return tuple(Payload(payload.header, (memoryview(bytes(payload.data)),)) for payload in payloads)
