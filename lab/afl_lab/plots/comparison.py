"""What ``afl plot`` does: runs beside each other, whatever state they are in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from afl.config.quantities import shown_bytes
from afl.errors import ConfigError, DataError, StorageError, why_unwritable
from afl.runs.files import METRICS_FILE, SUMMARY_FILE
from afl.terminal.view import make_console
from afl_lab.plots.figures import MEASURES, Curve, cost_figure, save
from afl_lab.plots.points import COSTS, Measure, Point, points_of

_MOST_HINTED = 5


@dataclass(frozen=True)
class PlottedRun:
    """A run with at least one evaluation."""

    label: str
    points: Sequence[Point]

    def curves(self, measure: Measure) -> dict[str, Curve]:
        """The measure by each cost; without the evaluations that have no finite one."""
        points = [point for point in self.points if _is_drawable(getattr(point, measure))]
        means = np.array([getattr(point, measure) for point in points], dtype=np.float64)
        return {
            cost: {
                "x": np.array([getattr(point, cost) for point in points], dtype=np.float64),
                "mean": means,
                "deviation": np.zeros(len(points)),
            }
            for cost in COSTS
        }


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
    runs, empty = [], []
    for file, label in zip(files, labels or labels_of(files), strict=True):
        try:
            points = points_of(file)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
        except (KeyError, TypeError) as error:
            raise DataError(f"{file}: lacks {error}; was it written by another version of afl?") from error
        if points:
            is_over = (file.parent / SUMMARY_FILE).exists()
            runs.append(PlottedRun(label if is_over else f"{label} (unfinished)", points))
        else:
            empty.append(label)
    if not runs:
        raise ConfigError(f"nothing to draw: no evaluation yet in {', '.join(map(str, files))}")
    try:
        written = _drawn(runs, out, title)
    except OSError as error:
        raise StorageError(
            f"--out {out} cannot be written: {why_unwritable(error)}; name another folder"
        ) from error
    console = make_console()
    console.print(_table(runs))
    for label in empty:
        console.print(f"{label}: no evaluation yet, so it is left out")
    for file in written:
        console.print(f"written: {file}")


def _drawn(runs: Sequence[PlottedRun], out: Path, title: str) -> list[Path]:
    """A figure of each measure that any run has; the files."""
    # First what may fail without a folder: an extra that is missing leaves none behind.
    figures = {}
    for measure in MEASURES:
        curves = [(run.label, run.curves(measure)) for run in runs]
        drawn = [(label, own) for label, own in curves if len(own["round"]["x"])]
        if drawn:
            figures[measure] = cost_figure(title, drawn, measure)
    if figures:
        out.mkdir(parents=True, exist_ok=True)
    return [
        file for measure, figure in figures.items() for file in save(figure, out / measure.replace("_", "-"))
    ]


def _is_drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def metrics_file(path: Path) -> Path:
    """The metrics of a run directory, or the file itself.

    Raises:
        ConfigError: if ``path`` is neither.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or directory")
    if path.is_file():
        if path.suffix != ".jsonl":
            raise ConfigError(
                f"{path}: not a run directory, and not a run's {METRICS_FILE}; name one of them"
            )
        return path
    if (path / METRICS_FILE).is_file():
        return path / METRICS_FILE
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
    for depth in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(own[-depth:]) for own in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise AssertionError("different paths have different names in full")


def _table(runs: Sequence[PlottedRun]) -> Table:
    """The runs' last and best; without a column for accuracies if no run has any."""
    has_accuracy = any(_accuracies(run) for run in runs)
    table = Table(title="Runs", title_justify="left", title_style="bold")
    # Folded, not cut: it may be a path.
    table.add_column("run", overflow="fold")
    for name in _HEADS:
        if name != _ACCURACY or has_accuracy:
            table.add_column(name, justify="right", overflow="fold")
    for run in runs:
        accuracies = _accuracies(run)
        last = run.points[-1]
        best = [f"{max(accuracies):.4f}" if accuracies else ""] if has_accuracy else []
        table.add_row(
            run.label,
            str(last.round),
            str(last.synchronization),
            *best,
            f"{min(point.max_loss for point in run.points):.5g}",
            f"{last.float_equivalents:,.0f}",
            shown_bytes(last.wire_bytes),
        )
    return table


def _accuracies(run: PlottedRun) -> list[float]:
    return [point.worst_accuracy for point in run.points if point.worst_accuracy is not None]


_ACCURACY = "best\nworst\naccuracy"
_HEADS = ("update\nrounds", "syncs", _ACCURACY, "least\nworst\nloss", "float\nequivalents", "sent")
"""In lines so short that at 80 columns each is whole."""
