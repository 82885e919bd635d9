"""Drives the round engine with one participant that hosts all workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from afl.config import Config
from afl.core.algorithms.registry import server_half, worker_side
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.messages import AckStatus, CommittedStep, Report, Step
from afl.core.model.buffer_mean import BufferMean
from afl.core.participant import Participant
from afl.core.randomness import SharedRandomness
from afl.core.rounds.engine import RoundEngine
from afl.core.rounds.patience import Patience
from afl.core.rounds.policy import AbsencePolicy, RankBy
from afl.core.rounds.results import Opening
from afl.errors import ADVICE_NON_FINITE, STOPS, NonFiniteError, place, placed
from afl.runs.initial_model import load_initial_model
from afl.tasks import Task, TaskContext
from afl.tasks.initialization import build_vector, worker_data
from afl.user_code import as_failure
from afl.wire.settings import RunSettings
from afl_lab.simulation.jobs import Site
from afl_lab.simulation.meter import WireMeter
from afl_worker.training.private import make_oracle


class Driver:
    """One run.

    Attributes:
        engine: the round engine, whose records of the last round and evaluation stand while
            :meth:`steps` is suspended.
        model: the workers' copy; at a step's end, the model that the step was taken at.
        meter: hears of what would cross the wire.

    Args:
        evaluate_every: in update rounds.
        policy: which workers a step may close without: here those with numbers that are not finite, since
            nobody is late.
        loss_cap, patience, rank_by: as the engine takes them.
        batched: compute all workers' gradients, or their local steps, in one call: faster for small models,
            but no longer equal to the bit with separate processes.
        initial_model: a file with the values to begin with.
        site: whose examples the only worker has; ``None`` where each has its own.
    """

    def __init__(
        self,
        task: Task,
        settings: AlgorithmSettings,
        randomness: SharedRandomness,
        *,
        batch_size: int,
        evaluation_batch_size: int,
        evaluate_every: int,
        policy: AbsencePolicy | None = None,
        loss_cap: float = math.inf,
        patience: Patience | None = None,
        rank_by: RankBy | None = None,
        batched: bool = False,
        initial_model: Path | None = None,
        meter: WireMeter | None = None,
        site: Site | None = None,
    ) -> None:
        workers = range(settings.workers)
        vector, self.model = (build_vector(task, randomness) for _ in range(2))
        if initial_model is not None:
            for each in (vector, self.model):
                load_initial_model(each, initial_model)
        settings = replace(settings, tensors=vector.tensors)
        self.engine = RoundEngine(
            server_half(settings, vector.values, randomness),
            evaluate_every=evaluate_every,
            buffer_mean=BufferMean.of(vector.buffers, settings),
            policy=policy,
            loss_cap=loss_cap,
            patience=patience,
            rank_by=rank_by,
            model=vector,
        )
        skips_non_finite = self.engine.policy.skips_non_finite
        context = TaskContext(settings.workers if site is None else site.workers, randomness)
        whose = workers if site is None else [site.worker]
        data = {worker: worker_data(task, whose[worker], context) for worker in workers}
        oracle = make_oracle(
            task,
            self.model,
            data,
            randomness,
            settings,
            batched=batched,
            batch_size=batch_size,
            evaluation_batch_size=evaluation_batch_size,
        )
        side = worker_side(
            settings, self.model.dim, randomness, workers, resends=False, keeps_old=skips_non_finite
        )
        self._participant = Participant(self.model, side, oracle, workers, skips_non_finite=skips_non_finite)
        self.meter = meter

    def steps(self) -> Iterator[Step]:
        """Take the run's steps; yields each once it is closed and the server's model has its update.

        Raises:
            NonFiniteError: if a loss or a gradient is not finite and the policy does not skip it, if too few
                workers are left, or if a sum is not finite.
        """
        engine = self.engine
        opening: Opening | None = engine.opening()
        while opening is not None:
            if self.meter is not None:
                self.meter.step(opening)
            self._answer(opening)
            closed = opening.step
            opening = engine.advance()
            if opening is not None:
                # It may be in the sum's own memory, which whoever looks at the model frees.
                opening = replace(opening, payloads=tuple(payload.copied() for payload in opening.payloads))
            yield closed

    def _answer(self, opening: Opening) -> None:
        step = CommittedStep(
            opening.step,
            tuple(payload.data for payload in opening.payloads),
            dict(enumerate(opening.dual_weights.tolist())),
            frozenset(opening.participants),
        )
        # Counted when all have come: many small calls are fast together, and slow between large products.
        reports: list[Report] = []
        answers = self._participant.take(step)
        named = self.engine.algorithm.settings.named(step.step.position.round)
        for worker in opening.participants:
            try:
                _, (report, payloads) = next(answers)
            except NonFiniteError as error:
                raise NonFiniteError(f"{place(worker, named)}: {error}; {ADVICE_NON_FINITE}") from error
            except STOPS:
                raise
            except BaseException as error:  # noqa: BLE001  # whatever a task's code raises
                failure = as_failure(error)
                raise placed(place(worker, named), failure) from failure
            assert report.worker == worker
            reports.append(report)
            ack = self.engine.begin_report(report)
            for index, payload in enumerate(payloads):
                offset = 0
                for section in payload.sections:
                    if len(section):
                        ack = self.engine.add_piece(worker, index, offset, section)
                    offset += len(section)
            assert ack is not None
            assert ack.status is AckStatus.ACCEPTED, ack
            self._participant.forget(worker)
        if self.meter is not None:
            self.meter.reports(opening.step.kind, reports)


def metered(
    config: Config,
    task: Task,
    randomness: SharedRandomness,
    *,
    rounds: int = 0,
    evaluate_every: int = 0,
    site: Site | None = None,
) -> tuple[Driver, WireMeter]:
    """A run as configured but for ``rounds`` and ``evaluate_every`` other than 0, both in update rounds.

    Its meter has counted the first models.
    """
    settings = RunSettings.of_config(config, task.local_options)
    driver = Driver(
        task,
        replace(settings.parameters, rounds=rounds or settings.parameters.rounds),
        randomness,
        batch_size=settings.batch_size,
        evaluation_batch_size=settings.evaluation_batch_size,
        evaluate_every=evaluate_every or config.evaluate_every,
        # Nobody is late.
        policy=replace(config.absence, skips_late=False),
        loss_cap=config.loss_cap,
        patience=config.patience,
        rank_by=config.evaluation.ranking,
        batched=config.worker.batch_oracles,
        initial_model=config.run.initial_model,
        site=site,
    )
    engine = driver.engine
    meter = WireMeter(
        chunk_bytes=settings.chunk_bytes, sends_dual_weights=engine.algorithm.sends_dual_weights
    )
    meter.first_models(engine)
    driver.meter = meter
    return driver, meter
