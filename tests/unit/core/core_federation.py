"""A federation in one process without sockets: frames pass between the engine and participants as bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from afl.core.aggregation import joint_reports
from afl.core.algorithms.afl_com import AflComServer, AflComWorker
from afl.core.algorithms.base import ServerAlgorithm, WorkerAlgorithm, WorkerSide
from afl.core.algorithms.registry import server_half, worker_side
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.dual import DualWeights
from afl.core.messages import AckStatus, CommittedStep, Kind, Payload, Report
from afl.core.model.buffer_mean import BufferMean
from afl.core.model.parameters import ParameterVector
from afl.core.participant import Oracle, Participant
from afl.core.randomness import SharedRandomness
from afl.core.rounds.engine import RoundEngine
from afl.core.rounds.results import Evaluation, Opening, RoundSummary
from afl.core.vectors import Weighted
from afl.tasks.base import Task, TaskContext
from afl.tasks.initialization import build_vector
from afl.v1 import federation_pb2 as pb
from afl.wire.assembler import StepAssembler
from afl.wire.frames import (
    chunk_frames,
    commit_frame,
    parse_server_frame,
    parse_worker_frame,
    report_frame,
    report_of,
    step_frame,
)
from afl_worker.training.oracle import TaskOracle

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Problem:
    """Worker i's loss is ``mean_j a_ij (w_j - b_ij - shift_t)^2``, in float64, a coordinate at a time."""

    curvature: NDArray[np.float64]
    target: NDArray[np.float64]
    start: Vector

    @classmethod
    def random(cls, workers: int, dim: int, seed: int = 0) -> Problem:
        generator = np.random.default_rng(seed)
        scales = 10.0 ** generator.integers(-2, 3, (workers, dim))
        return cls(
            generator.uniform(0.1, 2.0, (workers, dim)) * scales,
            generator.standard_normal((workers, dim)),
            generator.standard_normal(dim).astype(np.float32),
        )

    @property
    def workers(self) -> int:
        return len(self.curvature)

    @property
    def dim(self) -> int:
        return len(self.start)

    def vector(self) -> ParameterVector:
        return ParameterVector(_Parameters(self.start))

    def oracle(self, vector: ParameterVector, workers: Sequence[int]) -> Oracle:
        return ProblemOracle(self, vector)

    def loss(self, worker: int, round_: int, params: Vector) -> float:
        distance = self._distance(worker, round_, params)
        return float((self.curvature[worker] * distance * distance).sum() / self.dim)

    def gradient(self, worker: int, round_: int, params: Vector) -> Vector:
        distance = self._distance(worker, round_, params)
        return (2.0 * self.curvature[worker] * distance / self.dim).astype(np.float32)

    def _distance(self, worker: int, round_: int, params: Vector) -> NDArray[np.float64]:
        shift = 0.25 * ((7 * round_ + 3 * worker) % 11 - 5)
        return params.astype(np.float64) - self.target[worker] - shift


class Subject(Protocol):
    """What is learned: a :class:`Problem`, or a task."""

    @property
    def workers(self) -> int: ...

    def vector(self) -> ParameterVector: ...

    def oracle(self, vector: ParameterVector, workers: Sequence[int]) -> Oracle: ...


class TaskSubject:
    """A task with its data, computed as a worker's process does."""

    def __init__(self, task: Task, workers: int, *, batch_size: int, seed: int = 7) -> None:
        self._task = task
        self.workers = workers
        self._batch_size = batch_size
        self._randomness = SharedRandomness.from_int(seed)

    def vector(self) -> ParameterVector:
        return build_vector(self._task, self._randomness)

    def oracle(self, vector: ParameterVector, workers: Sequence[int]) -> Oracle:
        context = TaskContext(self.workers, self._randomness)
        data = {worker: self._task.data(worker, context) for worker in workers}
        return TaskOracle(
            self._task,
            vector,
            data,
            self._randomness,
            batch_size=self._batch_size,
            evaluation_batch_size=4,
        )


class _Parameters(nn.Module):
    def __init__(self, start: Vector) -> None:
        super().__init__()
        cut = len(start) // 3
        self.first = nn.Parameter(torch.from_numpy(start[:cut].copy()))
        self.second = nn.Parameter(torch.from_numpy(start[cut:].copy()))


class ProblemOracle(Oracle):
    """The problem at the model of one process."""

    def __init__(self, problem: Problem, vector: ParameterVector) -> None:
        self._problem = problem
        self._vector = vector
        self.calls = 0

    def gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Tensor]:
        self.calls += 1
        params = self._vector.numpy()
        gradient = self._problem.gradient(worker, round_, params) * np.float32(scale)
        return self._problem.loss(worker, round_, params), 5, torch.from_numpy(gradient)

    def weighted_gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Weighted]:
        loss, examples, gradient = self.gradient(worker, round_, scale)
        return loss, examples, Weighted([gradient], [len(gradient)], 1.0)

    def train_examples(self, worker: int) -> int:
        return 7 + worker

    def loss(self, worker: int, round_: int) -> tuple[float, int]:
        return self._problem.loss(worker, round_ + 1000, self._vector.numpy()), 5

    def evaluate(self, worker: int) -> tuple[dict[str, float], int]:
        return {"loss": self._problem.loss(worker, 0, self._vector.numpy())}, 10 + worker


class AsWritten(AflComServer):
    """Step 3 as the paper has it, where the product forwards the sum; the same bits."""

    forwards = False


def as_written(settings: AlgorithmSettings, params: Tensor, randomness: SharedRandomness) -> AsWritten:
    return AsWritten(
        settings, params, randomness, DualWeights(settings.workers, settings.eta_q, settings.block)
    )


def downlink_residual(algorithm: ServerAlgorithm) -> Vector:
    """e_hat; zeros where the sum is forwarded, nothing where the algorithm has none."""
    if not isinstance(algorithm, AflComServer):
        return np.zeros(0, dtype=np.float32)
    zeros = np.zeros(len(algorithm.params), dtype=np.float32)
    residual: Vector = algorithm.unsent().get("downlink_residual", zeros)
    return residual


def uplink_residual(half: WorkerAlgorithm, dim: int) -> Tensor:
    """e_i; zeros where none is kept."""
    return torch.zeros(dim) if half.residual is None else half.residual


@dataclass
class Outcome:
    """What a run leaves."""

    server: Vector
    models: list[Vector]
    uplink_residuals: NDArray[np.float32]
    downlink_residual: Vector
    dual_weights: list[NDArray[np.float64]] = field(default_factory=list)
    losses: list[NDArray[np.float64]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)


class Federation:
    """A server, and processes that host its workers.

    Args:
        hosts: each process's workers; by default one process a worker.
        chaos: shuffles arrivals, cuts payloads anywhere, cuts reports off, which then go on where they were.
    """

    def __init__(
        self,
        problem: Subject,
        settings: AlgorithmSettings,
        *,
        evaluate_every: int,
        hosts: Sequence[Sequence[int]] | None = None,
        chaos: int | None = None,
        forward: bool = True,
        seed: int = 7,
    ) -> None:
        randomness = SharedRandomness.from_int(seed)
        self.vector = problem.vector()
        self.params = self.vector.values
        self.algorithm: ServerAlgorithm = (
            server_half(settings, self.params, randomness)
            if forward
            else as_written(settings, self.params, randomness)
        )
        self.engine = RoundEngine(
            self.algorithm,
            evaluate_every=evaluate_every,
            buffer_mean=BufferMean.of(self.vector.buffers, settings),
            model=self.vector,
        )
        self.participants: list[Participant] = []
        self.sides: list[WorkerSide] = []
        self._assemblers: list[StepAssembler] = []
        for workers in hosts or [(worker,) for worker in range(problem.workers)]:
            vector = problem.vector()
            side = worker_side(settings, vector.dim, randomness, workers)
            self.sides.append(side)
            self.participants.append(Participant(vector, side, problem.oracle(vector, workers), workers))
            self._assemblers.append(StepAssembler(tuple(workers), largest=12 * vector.dim + 1024))
        self._random = None if chaos is None else random.Random(chaos)
        self.resumed = 0

    def run(self) -> Outcome:
        summaries: list[RoundSummary] = []
        evaluations: list[Evaluation] = []
        opening: Opening | None = self.engine.opening()
        while opening is not None:
            # Every process has the step's bytes before the first report is summed.
            committed = self._broadcast(opening)
            answers: list[tuple[Report, list[Payload]]] = []
            for participant, step in zip(self.participants, committed, strict=True):
                if step is not None:
                    answers += [answer for _, answer in joint_reports(participant.take(step))]
            self._deliver(answers)
            round_, evaluation = self.engine.last_round, self.engine.last_evaluation
            opening = self.engine.advance()
            if self.engine.last_round is not round_ and self.engine.last_round is not None:
                summaries.append(self.engine.last_round)
            if self.engine.last_evaluation is not evaluation and self.engine.last_evaluation is not None:
                evaluations.append(self.engine.last_evaluation)
        residuals = {
            worker: uplink_residual(half, self.vector.dim).numpy().copy()
            for side in self.sides
            for worker, half in side.halves.items()
            if isinstance(half, AflComWorker)
        }
        return Outcome(
            self.params.numpy().copy(),
            [participant.vector.numpy().copy() for participant in self.participants],
            np.array([residuals[worker] for worker in sorted(residuals)]),
            downlink_residual(self.algorithm).copy(),
            [summary.dual_weights for summary in summaries] + [self.engine.dual_weights],
            [summary.losses for summary in summaries],
            evaluations,
        )

    def _broadcast(self, opening: Opening) -> list[CommittedStep | None]:
        frames = [step_frame(opening.step)]
        for index, payload in enumerate(opening.payloads):
            frames += chunk_frames(pb.ServerFrame, payload, 64, index=index)
        result: list[CommittedStep | None] = []
        for participant, assembler in zip(self.participants, self._assemblers, strict=True):
            is_told = self.algorithm.sends_dual_weights and len(opening.dual_weights) > 0
            told = participant.workers if is_told else ()
            weights = [float(opening.dual_weights[worker]) for worker in told]
            asked = [worker for worker in participant.workers if worker in opening.participants]
            if not asked:
                result.append(None)
                continue
            commit = commit_frame(opening.step.position, opening.step.kind, weights, asked)
            for frame in frames:
                assert assembler.feed(parse_server_frame(frame.data)) is None
            step = assembler.feed(parse_server_frame(commit.data))
            assert step is not None
            result.append(step)
        return result

    def _deliver(self, answers: list[tuple[Report, list[Payload]]]) -> None:
        sending = [self._send(report, payloads) for report, payloads in answers]
        while sending:
            current = self._random.choice(sending) if self._random else sending[0]
            if next(current, None) is None:
                sending.remove(current)

    def _send(self, report: Report, payloads: list[Payload]) -> Iterator[str]:
        """One worker's report and its pieces, one a step."""
        worker = report.worker
        (read,) = parse_worker_frame(report_frame(report, self.engine.step.kind).data).reports
        parts = [b"".join(payload.sections) for payload in payloads]
        ack = None
        while ack is None:
            ack = self.engine.begin_report(report_of(read))
            yield "opened"
            is_cut = False
            first, begin = self.engine.arrived(worker)
            for index, data in enumerate(parts[first:], first):
                offset = begin if index == first else 0
                while offset < len(data) and not is_cut:
                    size = self._piece_size(len(data) - offset)
                    ack = self.engine.add_piece(worker, index, offset, data[offset : offset + size])
                    offset += size
                    is_cut = ack is None and self._random is not None and self._random.random() < 0.1
                    yield "piece"
            if is_cut:
                self.resumed += 1
                yield "cut"
        assert ack.status is AckStatus.ACCEPTED

    def _piece_size(self, left: int) -> int:
        if self._random is None:
            return left
        size = self._random.randint(1, left)
        # Values that are summed as they come are cut between values only.
        return (
            min(left, max(4, size - size % 4))
            if self.engine.step.kind is Kind.BUFFERS
            or not isinstance(self.algorithm, AflComServer)
            or self.algorithm.realizations.uplink.additive_idempotent
            else size
        )
