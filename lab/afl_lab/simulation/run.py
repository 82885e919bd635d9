"""One simulated run, from a configuration to a run directory like a server's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from afl.config import Config
from afl.core.messages import Kind, Position
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.rounds.results import Evaluation
from afl.errors import DivergedError, ExitCode, NonFiniteError
from afl.runs.tracking.following import Following, status_of
from afl.runs.tracking.tracker import load_trackers
from afl.tasks.registry import load_task
from afl_lab.simulation.driver import metered
from afl_lab.simulation.jobs import Site
from afl_server.federation.broadcast import ModelCopy
from afl_server.storage.records import RunRecords, new_run_id


def simulate(
    config: Config,
    directory: Path,
    *,
    saves_models: bool = True,
    on_round: Callable[[int], object] = lambda _: None,
    site: Site | None = None,
    goes_on: Callable[[Evaluation], bool] = lambda _: True,
) -> dict[str, Any]:
    """Run it and write what a server writes; returns the summary.

    The final, random and best models and all metrics are those of a federation with this configuration and
    seed, to the bit on the same kind of CPU, unless gradients are batched (``worker.batch_oracles``).

    Args:
        config: with its seed; ``server`` and ``faults`` play no part but for ``server.chunk_bytes``,
            ``faults.non_finite``, ``faults.divergence`` and ``faults.loss_cap``: nobody is late, and nothing
            breaks.
        directory: must hold no run.
        on_round: called with the update rounds that are complete, after each synchronization.
        site: whose examples the only worker has; for a configuration of one worker.
        goes_on: told each evaluation; the run ends there, complete, if it answers no.

    Raises:
        ConfigError: if the directory holds a run, or the task or a compressor cannot be made.
        DataError: if the task's data is missing or too small.
    """
    assert config.run.seed is not None
    randomness = SharedRandomness.from_int(config.run.seed)
    torch.set_num_threads(config.worker.threads)
    trackers = load_trackers(config.run.trackers)
    task = load_task(config.task.name, config.task.options, allow_path=True)
    started = time.monotonic()
    driver, meter = metered(config, task, randomness, site=site)
    engine, up, down = driver.engine, meter.counters.uplink, meter.counters.downlink
    random_round = randomness.stream(Purpose.RANDOM_OUTPUT).integer(engine.synchronizations) + 1
    records = RunRecords.create(new_run_id(), directory, config)
    following = Following(trackers, records.run_id, directory, config)
    following.start()
    code = ExitCode.INTERNAL

    def save(name: str) -> None:
        if saves_models:
            records.save_model(name, ModelCopy(engine.model), engine.updates_applied)

    try:
        if random_round == 1:
            save("random")
        closed_at = time.monotonic()
        try:
            for closed in driver.steps():
                now = time.monotonic()
                if closed.kind is Kind.EVALUATE:
                    assert engine.last_evaluation is not None
                    is_best = records.ranking.see(engine.last_evaluation)
                    records.evaluation(engine.last_evaluation, up=up, down=down)
                    if is_best:
                        save("best")
                    records.ranking.require_convergence()
                    if not goes_on(engine.last_evaluation):
                        ending = ExitCode.OK, f"ended early, after round {engine.last_evaluation.round}"
                        break
                elif engine.last_round is not records.round and engine.last_round is not None:
                    records.train_round(engine.last_round, seconds=now - closed_at, up=up, down=down)
                    closed_at = now
                    on_round(engine.last_round.round)
                if engine.step.position == Position(random_round, 0):
                    save("random")
            else:
                ending = ExitCode.OK, engine.completion
        except (NonFiniteError, DivergedError) as error:
            ending = ExitCode.DIVERGED, str(error)
        save("final")
        code, reason = ending
        return records.summarize(code, reason, time.monotonic() - started, meter.counters)
    finally:
        records.close()
        following.end(status_of(code, can_go_on=False))
