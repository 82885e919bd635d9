"""What ``afl plot`` does: runs beside each other, whatever state they are in."""

from __future__ import annotations

import math
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
from afl_lab.plots.points import COSTS, Measure, Point, hides_losses, points_of

_MOST_HINTED = 5

_Runs = Mapping[str, Sequence[Point]]
"""By label, the evaluations of each run, at least one."""


def compare(paths: Sequence[Path], labels: Sequence[str], out: Path, title: str) -> None:
    """Draw the runs, write ``worst-accuracy`` and ``max-loss`` as PNG and SVG into ``out``, and list them.

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
    figures = _drawn(runs, title)
    written: list[Path] = []
    try:
        for measure, figure in figures.items():
            out.mkdir(parents=True, exist_ok=True)
            written += save(figure, out / measure.replace("_", "-"))
    except OSError as error:
        why = f"--out {out} cannot be written: {why_unwritable(error)}"
        raise StorageError(f"{why}; name another folder") from error
    console = make_console()
    console.print(_table(runs))
    for label, points in found.items():
        if not points:
            console.print(f"{label}: no evaluation yet, so it is left out")
    for file in written:
        console.print(f"written: {file}")


def _drawn(runs: _Runs, title: str) -> dict[Measure, Any]:
    """A figure of each measure that any run has."""
    figures = {}
    for measure in MEASURES:
        curves = []
        for label, points in runs.items():
            values = [getattr(point, measure) for point in points]
            own = [p for p, v in zip(points, values, strict=True) if v is not None and math.isfinite(v)]
            if own:
                curves.append((label, {cost: _curve(own, cost, measure) for cost in COSTS}))
        if curves:
            figures[measure] = cost_figure(title, curves, measure)
    return figures


def _curve(points: Sequence[Point], cost: str, measure: Measure) -> Curve:
    x, mean = (np.array([getattr(p, name) for p in points], dtype=np.float64) for name in (cost, measure))
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


def _table(runs: _Runs) -> Table:
    """The runs' last and best; without a column for accuracies if no run has any."""
    accuracies = {
        label: [point.worst_accuracy for point in points if point.worst_accuracy is not None]
        for label, points in runs.items()
    }
    has_accuracy = any(accuracies.values())
    # In lines so short that at 80 columns each is whole.
    accuracy = ["best\nworst\naccuracy>"] if has_accuracy else []
    heads = ("update\nrounds>", "syncs>", *accuracy, "least\nworst\nloss>", "float\nequivalents>", "sent>")
    found = table("run", *heads, title="Runs")
    for column in found.columns:
        # Folded, not cut: it may be a path.
        column.overflow = "fold"
    for label, points in runs.items():
        last, own = points[-1], accuracies[label]
        found.add_row(
            label,
            str(last.round),
            str(last.synchronization),
            *([f"{max(own):.4f}" if own else ""] if has_accuracy else []),
            f"{min(point.max_loss for point in points):.5g}",
            f"{last.float_equivalents:,.0f}",
            shown_bytes(last.wire_bytes),
        )
    return found
