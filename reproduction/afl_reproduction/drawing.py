"""Figures and tables from the small files alone; needs neither data nor PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from afl.errors import ExitCode
from afl_lab.plots.figures import MEASURES, cost_figure, pyplot, save
from afl_lab.plots.points import COSTS, Measure
from afl_reproduction.condensed import CondensedRun, read_run, run_file
from afl_reproduction.experiment import Experiment, load_experiment
from afl_reproduction.folders import check_folder
from afl_reproduction.search_log import LOG_FILE, SearchLog, search_table
from afl_reproduction.tables import curve_of, markdown, table_of


def draw_stored(name: str, results: Path) -> ExitCode:
    """Draw what is stored of an experiment."""
    experiment = load_experiment(name)
    check_folder("--results", results / experiment.name)
    draw(experiment, results / experiment.name)
    return ExitCode.OK


def draw(experiment: Experiment, results: Path) -> None:
    """Write ``PART.json``, ``PART.md`` and the figures of each part with runs, and those of each series.

    ``PART-search.md`` is what a part's search chose.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    tables: dict[str, Any] = {}
    log = SearchLog(results / LOG_FILE)
    for part, own in experiment.parts.items():
        chosen = search_table(experiment, part, log) if own.search is not None else ""
        if chosen:
            (results / f"{part}-search.md").write_text(chosen, encoding="utf-8")
        runs = stored_runs(experiment, results, part)
        if not runs:
            continue
        labels = {name: variant.label for name, variant in experiment.variants(part).items()}
        tables[part] = table_of(runs, labels, own.targets)
        (results / f"{part}.json").write_text(json.dumps(tables[part], indent=1) + "\n", encoding="utf-8")
        (results / f"{part}.md").write_text(markdown(tables[part]), encoding="utf-8")
        title = f"{experiment.title}: {own.title}"
        for measure in MEASURES:
            figure = part_figure(title, runs, labels, measure)
            save(figure, results / f"{part}-{measure.replace('_', '-')}")
    for series in sorted({part.series for part in experiment.parts.values() if part.series}):
        found = {
            part: tables[part]
            for part, own in experiment.parts.items()
            if own.series == series and part in tables
        }
        if found:
            workers = {part: stored_workers(experiment, results, part) for part in found}
            for measure in MEASURES:
                figure = series_figure(f"{experiment.title}: {series}", found, workers, measure)
                save(figure, results / f"{series.lower().replace(' ', '-')}-{measure.replace('_', '-')}")
    print(f"drawn: {', '.join(tables) or 'nothing, since there are no runs yet'} ({results})", flush=True)


def stored_runs(experiment: Experiment, results: Path, part: str) -> dict[str, list[CondensedRun]]:
    """The condensed runs of a part that there are, by run, in order of their seeds."""
    found = {}
    for name in experiment.variants(part):
        pattern = run_file(results, part, name, 0).name.replace("-seed-0.", "-seed-*.")
        runs = [read_run(path) for path in (results / "runs" / part).glob(pattern)]
        if runs:
            found[name] = sorted(runs, key=lambda run: int(run.about["seed"]))
    return found


def stored_workers(experiment: Experiment, results: Path, part: str) -> int:
    """m of a part with runs."""
    runs = stored_runs(experiment, results, part)
    return next(iter(runs.values()))[0].config.workers


def part_figure(
    title: str, runs: Mapping[str, Sequence[CondensedRun]], labels: Mapping[str, str], measure: Measure
) -> Any:
    """A measure against each cost: means, with one standard deviation over the seeds shaded."""
    curves = [
        (labels[name], {cost: curve_of(own, cost, measure) for cost in COSTS}) for name, own in runs.items()
    ]
    seeds = sorted({len(own) for own in runs.values()})
    counts = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    return cost_figure(f"{title} (seeds: {counts})", curves, measure)


def series_figure(
    title: str, tables: Mapping[str, Mapping[str, Any]], workers: Mapping[str, int], measure: Measure
) -> Any:
    """Synchronization rounds to a part's first target against m, where all seeds reach it."""
    plots = pyplot()
    figure, axis = plots.subplots(figsize=(6.0, 4.2))
    names = list(dict.fromkeys(name for table in tables.values() for name in table))
    for number, name in enumerate(names):
        points = [
            (workers[part], row["synchronization"])
            for part, table in tables.items()
            if (row := _first_target(table.get(name), measure)) and row["reached"] == row["seeds"]
        ]
        if points:
            label = next(table[name]["label"] for table in tables.values() if name in table)
            axis.errorbar(
                [m for m, _ in points],
                [spread["mean"] for _, spread in points],
                [spread["deviation"] for _, spread in points],
                color=f"C{number}",
                marker="o",
                capsize=3,
                label=label,
            )
    axis.set_xlabel("workers m")
    axis.set_ylabel("synchronization rounds to the target")
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small")
    axis.set_title(f"{title}, {MEASURES[measure]}", fontsize="medium")
    figure.tight_layout()
    return figure


def _first_target(row: Mapping[str, Any] | None, measure: Measure) -> Mapping[str, Any] | None:
    targets = [] if row is None else [target for target in row["targets"] if target["measure"] == measure]
    return targets[0] if targets else None
