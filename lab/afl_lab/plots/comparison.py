"""What ``afl plot`` does: runs beside each other, whatever state they are in."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from afl.config.quantities import shown_bytes
from afl.errors import ConfigError, DataError, StorageError, why_unwritable
from afl.paths import kind_of
from afl.runs.files import METRICS_FILE, SUMMARY_FILE
from afl.terminal.view import make_console, table
from afl_lab.plots.figures import MEASURES, Curve, cost_figure, save
from afl_lab.plots.points import COSTS, Point, Ranking, hides_losses, points_of, ranking_of

_MOST_HINTED = 5

_Runs = Mapping[str, Sequence[Point]]
"""By label, the evaluations of each run, at least one."""

_Rankings = Mapping[str, Ranking]
"""Likewise, of the runs that are ranked by a metric other than accuracy and loss."""


def compare(paths: Sequence[Path], labels: Sequence[str], out: Path, title: str) -> None:
    """Draw the runs, write ``worst-accuracy`` and ``max-loss`` as PNG and SVG into ``out``, and list them.

    Where ``evaluation.rank_by`` names another metric, its ``worst-NAME`` is drawn too.

    Args:
        paths: run directories, or metrics files.
        labels: one for each, or none.

    Raises:
        ConfigError: if a path is no run, labels and paths do not match, or no run was evaluated yet.
        DataError: if metrics are damaged.
    """
    if labels and len(labels) != len(paths):
        raise ConfigError(f"--label: {len(labels)} given for {len(paths)} runs; give one for each, or none")
    if len(set(labels)) < len(labels):
        raise ConfigError("--label: two runs have the same label")
    files = [metrics_file(path) for path in paths]
    found = {}
    for file, label in zip(files, labels or labels_of(files), strict=True):
        try:
            points = points_of(file)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
        except (KeyError, TypeError) as error:
            raise DataError(f"{file}: lacks {error}; was it written by another version of afl?") from error
        is_over = (file.parent / SUMMARY_FILE).exists()
        name = label if is_over or not points else f"{label} (unfinished)"
        found[f"{name} (smooth worst)" if hides_losses(file) else name] = points
    runs = {label: points for label, points in found.items() if points}
    if not runs:
        raise ConfigError(f"nothing to draw: no evaluation yet in {', '.join(map(str, files))}")
    # First what may fail without a folder: an extra that is missing leaves none behind.
    of_label = dict(zip(found, files, strict=True))
    rankings = {label: each for label in runs if (each := ranking_of(of_label[label])) is not None}
    figures = _drawn(runs, rankings, title)
    written: list[Path] = []
    try:
        for measure, figure in figures.items():
            out.mkdir(parents=True, exist_ok=True)
            written += save(figure, out / measure)
    except OSError as error:
        why = f"--out {out} cannot be written: {why_unwritable(error)}"
        raise StorageError(f"{why}; name another folder") from error
    console = make_console()
    console.print(_table(runs, rankings))
    for label, points in found.items():
        if not points:
            console.print(f"{label}: no evaluation yet, so it is left out")
    for file in written:
        console.print(f"written: {file}")


def _drawn(runs: _Runs, rankings: _Rankings, title: str) -> dict[str, Any]:
    """A figure of each measure that any run has, by its file's name."""
    figures = {}
    for measure in (*MEASURES, *_metrics_of(rankings)):
        curves = []
        for label, points in runs.items():
            values = ((point, _value(point, measure, rankings.get(label))) for point in points)
            own = [(point, value) for point, value in values if value is not None and math.isfinite(value)]
            if own:
                curves.append((label, {cost: _curve(own, cost) for cost in COSTS}))
        if curves:
            name = measure if measure in MEASURES else f"worst_{measure}"
            figures[re.sub(r"\W+|_", "-", name)] = cost_figure(title, curves, measure)
    return figures


def _metrics_of(rankings: _Rankings) -> list[str]:
    return sorted({by.metric for by, _ in rankings.values()})


def _value(point: Point, measure: str, ranking: Ranking | None) -> float | None:
    if measure in MEASURES:
        value: float | None = getattr(point, measure)
        return value
    is_its = ranking is not None and ranking[0].metric == measure
    return ranking[1].get(point.round) if ranking is not None and is_its else None


def _curve(points: Sequence[tuple[Point, float]], cost: str) -> Curve:
    x = np.array([getattr(point, cost) for point, _ in points], dtype=np.float64)
    mean = np.array([value for _, value in points], dtype=np.float64)
    return {"x": x, "mean": mean, "deviation": np.zeros(len(points))}


def metrics_file(path: Path) -> Path:
    """The metrics of a run directory, or the file itself; ConfigError if ``path`` is neither."""
    kind = kind_of(path)
    if not kind:
        raise ConfigError(f"{path}: no such file or directory")
    file = path if kind == "file" else path / METRICS_FILE
    if file.suffix != ".jsonl":
        wrong = f"{path}: not a run directory, and not a run's {METRICS_FILE}"
        raise ConfigError(f"{wrong}; name one of them")
    if kind_of(file) == "file":
        return file
    below = sorted(str(found.parent) for found in path.rglob(METRICS_FILE))
    more = f" and {len(below) - _MOST_HINTED} more" if len(below) > _MOST_HINTED else ""
    hint = f"; runs are in {', '.join(below[:_MOST_HINTED])}{more}" if below else ""
    raise ConfigError(f"{path}: holds no run (no {METRICS_FILE}){hint}")


def labels_of(files: Sequence[Path]) -> list[str]:
    """The directories' names, with as many of the folders above as tell them apart."""
    parts = [file.resolve().parent.parts if file.name == METRICS_FILE else (file.stem,) for file in files]
    if len(set(parts)) < len(parts):
        twice = [file for file, own in zip(files, parts, strict=True) if parts.count(own) > 1]
        raise ConfigError(f"a run is named twice: {' and '.join(map(str, twice))}; name each once")
    depths = range(1, max(map(len, parts)) + 1)
    candidates = (["/".join(own[-depth:]) for own in parts] for depth in depths)
    return next(labels for labels in candidates if len(set(labels)) == len(labels))


def _table(runs: _Runs, rankings: _Rankings) -> Table:
    """The runs' last and best; without a column for accuracies if no run has any."""
    best: dict[str, dict[str, str]] = {}
    for label, points in runs.items():
        accuracies = [point.worst_accuracy for point in points if point.worst_accuracy is not None]
        if accuracies:
            best.setdefault("accuracy", {})[label] = f"{max(accuracies):.4f}"
        if label in rankings:
            by, each = rankings[label]
            values = [value for value in each.values() if value is not None]
            if values:
                own = max(values) if by.higher_is_better else min(values)
                best.setdefault(by.metric, {})[label] = by.shown(own, 4)
    # In lines so short that at 80 columns each is whole.
    heads = (
        "update\nrounds>",
        "syncs>",
        *(f"best\nworst\n{metric}>" for metric in best),
        "least\nworst\nloss>",
        "float\nequivalents>",
        "sent>",
    )
    found = table("run", *heads, title="Runs")
    for column in found.columns:
        # Folded, not cut: it may be a path.
        column.overflow = "fold"
    for label, points in runs.items():
        last = points[-1]
        found.add_row(
            label,
            str(last.round),
            str(last.synchronization),
            *(own.get(label, "") for own in best.values()),
            f"{min(point.max_loss for point in points):.5g}",
            f"{last.float_equivalents:,.0f}",
            shown_bytes(last.wire_bytes),
        )
    return found
