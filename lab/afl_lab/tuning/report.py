"""What a search ends with: one table by site, on test records, and the chosen configuration as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from afl.config import Config, dump_config
from afl.core.rounds.policy import RankBy
from afl.errors import ConfigError, StorageError, why_unwritable
from afl.names import names_of
from afl.runs.durable import write_whole
from afl.runs.files import METRICS_FILE, metrics_entries, of_event
from afl.runs.metrics import Ranked, number_of
from afl_lab.simulation.baselines import Standing, baselines, comparison_table
from afl_lab.simulation.jobs import Job
from afl_lab.simulation.pool import Outcome
from afl_lab.tuning.curve import Curve, Judge
from afl_lab.tuning.search import Trial
from afl_lab.tuning.space import Params, can_be_cut

FIRST_LINE: Final = "# Found by afl tune"

RIVALS: Final = ("FedAvg, uniform", "FedAvg, by samples")


def rivals(config: Config, folder: Path) -> list[Job]:
    """FedAvg with equal weights and by samples, and each site alone, with a configuration's settings."""
    uniform, *alone = baselines(config, folder, rounds=config.algorithm.rounds, alone=True)
    algorithm = uniform.config.algorithm.model_copy(update={"weighting": "samples"})
    samples = uniform.config.model_copy(update={"algorithm": algorithm})
    by_samples = replace(uniform, name=RIVALS[1], config=samples, directory=folder / "by-samples")
    return [replace(uniform, name=RIVALS[0]), by_samples, *alone]


def shown_worst(judge: Judge, trial: Trial, directory: Path) -> str:
    """What a trial gave the worst worker, in words: on held-out records, the mean of its last evaluations."""
    assert trial.score is not None
    lines = evaluations_of(directory)
    by = judge.ranking(lines[0]["workers"])
    worst = min(judge.means_at(lines, lines[-1]["round"]))
    lost = " (a site lost more than it may)" if trial.score < worst - abs(worst) * 1e-9 else ""
    return f"{number_of(by.metric, worst if by.higher_is_better else -worst, 4)}{lost}"


def show_comparison(
    console: Console, judge: Judge, trial: tuple[str, Path], outcomes: Sequence[Outcome]
) -> None:
    """Print the table. The rivals are taken after the round at which their own held-out records were served
    best, and all are judged by their test records, which nothing has looked at before.

    Args:
        trial: what to call the best trial, and its run directory.
        outcomes: of :func:`rivals`.
    """
    lines = evaluations_of(trial[1])
    by = judge.ranking(lines[0]["workers"])
    judge = replace(judge, floor=())
    standings = [_standing(trial[0], lines, lines[-1]["round"], by)]
    alone: dict[int, float] = {}
    for outcome in outcomes:
        if outcome.summary is None:
            continue
        own = evaluations_of(outcome.job.directory)
        taken = _standing(outcome.job.name, own, curve_of(judge, outcome.job).round, by)
        if outcome.job.site is None:
            standings.append(taken)
        elif taken.values:
            alone[outcome.job.site.worker] = taken.values[0]
    if alone:
        standings.append(Standing("each alone", alone, sum(alone.values()) / len(alone), 0))
    alike = "the same training records; the others with the configuration's own settings, at their best round"
    console.print(f"\nTest {by.metric} ({alike}):", soft_wrap=True)
    worst = Ranked(by.metric, by.higher_is_better, None, None)
    names = names_of(lines[0])
    console.print(comparison_table(standings, worst, names, by_site=True))
    better = [
        f"worker {worker}"
        for worker, value in sorted(alone.items())
        if _is_better(by, value, standings[0].values.get(worker))
    ]
    if better:
        console.print(f"Alone is better still for {', '.join(better)}.", soft_wrap=True)


def curve_of(judge: Judge, job: Job) -> Curve:
    """Of a run that has ended."""
    return Curve.of(judge, evaluations_of(job.directory), is_whole=not can_be_cut(job.config))


def evaluations_of(directory: Path) -> list[Any]:
    """The evaluations' lines of a run's metrics, by round."""
    return list(of_event(metrics_entries(directory / METRICS_FILE)[0], "evaluation"))


def shown_params(params: Params) -> str:
    """``eta_w 0.1, block 45``."""
    if not params:
        return "the configuration's own settings"
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in params.items()
    )


def check_output(path: Path) -> None:
    """Raise ConfigError if a file is there that is none of ours."""
    try:
        if path.exists() and not path.read_text(encoding="utf-8").startswith(FIRST_LINE):
            raise ConfigError(f"--output {path} exists, and afl tune has not written it; name another file")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output {path} cannot be read: {error}") from error


def write_choice(path: Path, config: Config, about: Sequence[str]) -> None:
    """The configuration as a file that says where it comes from.

    Raises:
        StorageError: if it cannot be written.
    """
    head = "\n# ".join(about)
    try:
        write_whole(path, f"{FIRST_LINE}: {head}\n\n{dump_config(config, only_given=True)}".encode())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {why_unwritable(error)}") from error


def _standing(name: str, lines: Sequence[Any], round_: int, by: RankBy) -> Standing:
    line = next((line for line in lines if line["round"] == round_), lines[-1])
    workers = enumerate(line["workers"])
    values = {worker: metrics[by.metric] for worker, metrics in workers if by.metric in metrics}
    sent = line["uplink_bytes"] + line["downlink_bytes"]
    return Standing(name, values, sum(values.values()) / max(1, len(values)), sent)


def _is_better(by: RankBy, value: float, other: float | None) -> bool:
    return other is not None and (value > other if by.higher_is_better else value < other)
