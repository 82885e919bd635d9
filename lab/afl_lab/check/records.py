"""What ``privacy.records`` will cost: epsilon, noise, time and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from afl.config import Config
from afl.config.quantities import shown_bytes, shown_seconds
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.core.record_privacy import Account, epsilon_of_tests
from afl.tasks import Task, WorkerData
from afl.wire.settings import RunSettings
from afl_lab.check.data import Parts
from afl_lab.check.findings import Report, blaming
from afl_worker.training.private import MEMORY, make_oracle

TIMED = 2

MOST_NOISE = 10
"""How many times as long as the clip the noise in the workers' mean may be: from a signal of a tenth of the
noise, models learn in hundreds of rounds."""


def check_records(
    report: Report,
    config: Config,
    task: Task,
    vector: ParameterVector,
    *,
    kept: Mapping[int, WorkerData],
    parts: Parts,
    gradient_s: float,
) -> None:
    """Add what each record is protected by and how long that takes; ``values["records"]`` has the numbers.

    Args:
        kept: the data of some workers.
        parts: what is known of all workers'.
        gradient_s: seconds of a gradient without privacy.

    Raises:
        StoppedError: if a gradient cannot be taken record by record.
    """
    settings = RunSettings.of_config(config).parameters
    if settings.records is None:
        return
    report.watch("gradients record by record")
    records = {worker: train.count for worker, (train, _) in parts.items()}
    smallest, first = min(records, key=lambda worker: records[worker]), min(kept)
    size = config.task.batch_size
    with blaming(report, "privacy.records"):
        account = Account(
            smallest, settings.records, records=records[smallest], batch_size=size, rounds=settings.rounds
        )
        assert config.run.seed is not None
        oracle = make_oracle(
            task,
            vector,
            {first: kept[first]},
            SharedRandomness.from_int(config.run.seed),
            settings,
            batched=False,
            batch_size=size,
            evaluation_batch_size=config.task.evaluation_batch_size,
        )
        # The first imports what it needs.
        oracle.weighted_gradient(first, 1)
        started = time.monotonic()
        for round_ in range(TIMED):
            oracle.weighted_gradient(first, round_ + 2)
        seconds = (time.monotonic() - started) / TIMED
    noise, loss_noise = account.privacy.noises
    clip, loss_clip = settings.records.clip, settings.records.loss_clip
    norm, loss = noise * clip * math.sqrt(vector.dim) / size, loss_noise * loss_clip / size
    among = norm / math.sqrt(config.workers)
    memory = 4 * vector.dim * (size + 4)
    if memory > MEMORY:
        memory = max(MEMORY, 4 * vector.dim) + 16 * vector.dim
    report.values["records"] = {
        "epsilon": account.planned_epsilon,
        "delta": account.privacy.delta,
        "noise": noise,
        "loss_noise": loss_noise,
        "noise_norm": norm,
        "loss_deviation": loss,
        "gradient_seconds": seconds,
        "memory": memory,
    }
    times = f", {seconds / gradient_s:.1f} times as long as without" if gradient_s else ""
    if settings.records.metric_noise is None:
        tests = None
        of_tests = "none of its own: metrics are told without noise"
    else:
        tests = epsilon_of_tests(settings.records, config.planned_evaluations)
        of_tests = f"{tests:.4g} after {config.planned_evaluations} evaluations"
    report.values["records"]["tests_epsilon"] = tests
    report.facts["Record-level privacy"] = {
        "epsilon": f"{account.planned_epsilon:.4g} at delta {account.privacy.delta:g} after "
        f"{settings.rounds} rounds, at worker {smallest}, which has the fewest records "
        f"({records[smallest]})",
        "epsilon of test records": of_tests,
        "noise": f"{noise:.4g}, of losses {loss_noise:.4g}",
        "in a gradient": f"noise of the norm {norm:.3g} beside a signal of at most {clip:g}; in the mean of "
        f"{config.workers} workers {among:.3g}: eta_w times as much moves the model at random in each round",
        "in a loss": f"a standard deviation of {loss:.3g}",
        "time": f"{shown_seconds(seconds)} a gradient{times}",
        "memory": f"up to about {shown_bytes(memory)} more, for single records' gradients and the noise",
    }
    if among > MOST_NOISE * clip:
        report.warn(
            "privacy.records",
            f"the mean of all workers' gradients has noise of the norm {among:.3g}, and a signal of at most "
            f"{clip:g}",
            "take larger minibatches, fewer rounds, a smaller model or adapters, or a larger epsilon; and a "
            "smaller eta_w",
        )
