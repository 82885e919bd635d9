"""A run's federation from its configuration."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from afl.config import Config
from afl.core.algorithms.registry import server_half
from afl.core.model.buffer_mean import BufferMean
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.core.rounds.engine import RoundEngine
from afl.daemon import events
from afl.runs.initial_model import load_initial_model
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl.wire.settings import RunSettings
from afl_server.federation.evaluation_summary import Ranking
from afl_server.federation.machine import Federation
from afl_server.federation.run import Run
from afl_server.federation.snapshot import RunDescription

LOG = logging.getLogger("afl.server")


def build(
    config: Config, run_id: str, directory: Path, ranking: Ranking, now: float, *, is_resumed: bool = False
) -> tuple[Federation, ParameterVector]:
    """A federation at its beginning, and its model.

    Args:
        config: with its seed.
        now: in seconds of the monotonic clock.
        is_resumed: whether a checkpoint will replace the model's values: ``run.initial_model`` is not read.

    Raises:
        AflError: if the task or the initial model cannot be loaded.
    """
    assert config.run.seed is not None
    randomness = SharedRandomness.from_int(config.run.seed)
    task = load_task(config.task.name, config.task.options, allow_path=True)
    vector = build_vector(task, randomness)
    if config.run.initial_model is not None and not is_resumed:
        load_initial_model(vector, config.run.initial_model)
        found = events.InitialModel(file=str(config.run.initial_model), digest=vector.initial_digest)
        LOG.info("the model begins with %s (digest %s)", found.file, found.digest, extra=found.extra)
    settings = RunSettings.of_config(config, task.local_options)
    engine = RoundEngine(
        server_half(replace(settings.parameters, tensors=vector.tensors), vector.values, randomness),
        evaluate_every=config.evaluate_every,
        buffer_mean=BufferMean.of(vector.buffers, settings.parameters),
        policy=config.absence,
        loss_cap=config.loss_cap,
        patience=config.patience,
        rank_by=config.evaluation.ranking,
        model=vector,
    )
    description = RunDescription(
        run_id=run_id,
        task=config.task.name,
        algorithm=config.algorithm.name,
        directory=str(directory),
        workers=config.workers,
        rounds=engine.rounds,
        dim=vector.dim,
        restart_length=config.algorithm.restart_length,
        is_compressed=config.algorithm.takes("uplink"),
        keeps_residuals=engine.algorithm.keeps_residuals,
        hides_losses=engine.algorithm.settings.hides_losses,
        record_privacy=config.privacy.record_words,
    )
    run = Run(description, config=config, settings=settings, engine=engine, randomness=randomness, now=now)
    return Federation(run, ranking), vector
