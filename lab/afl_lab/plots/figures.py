"""Figures of curves against each cost, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afl.optional_dependencies import require
from afl_lab.plots.points import COSTS, Measure

Curve: TypeAlias = Mapping[str, NDArray[np.float64]]
"""``x``, ``mean`` and ``deviation``, each ``[evaluations]``."""

MEASURES: Mapping[Measure, str] = {
    "worst_accuracy": "worst worker's accuracy",
    "max_loss": "maximum worker loss",
}

MOST_LOSS = 1.5
"""Losses above so many times the median of all curves are cut off: they are the first evaluations."""

FORMATS = ("png", "svg")


def cost_figure(title: str, curves: Sequence[tuple[str, Mapping[str, Curve]]], measure: str) -> Any:
    """A measure against each cost: means, with one standard deviation shaded where there are several seeds.

    Args:
        curves: a label and the curves by cost, each.
        measure: one of :data:`MEASURES`, or the name of a metric.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    figure, axes = pyplot().subplots(1, len(COSTS), figsize=(4.6 * len(COSTS), 4.0), sharey=True)
    for axis, (cost, words) in zip(axes, COSTS.items(), strict=True):
        for number, (label, own) in enumerate(curves):
            curve = own[cost]
            colour = f"C{number}"
            # One evaluation is a point, which a line would not show.
            marker = "o" if len(curve["x"]) == 1 else None
            axis.plot(curve["x"], curve["mean"], color=colour, label=label, linewidth=1.4, marker=marker)
            low, high = curve["mean"] - curve["deviation"], curve["mean"] + curve["deviation"]
            axis.fill_between(curve["x"], low, high, color=colour, alpha=0.18, linewidth=0)
        axis.set_xlabel(words)
        axis.grid(alpha=0.3)
        if cost in {"float_equivalents", "wire_bytes"}:
            axis.set_xscale("log")
    own_words = f"worst worker's {measure}"
    axes[0].set_ylabel(next((said for name, said in MEASURES.items() if name == measure), own_words))
    if measure == "max_loss":
        means = [own["round"]["mean"] for _, own in curves]
        lowest = min(float(mean.min()) for mean in means)
        axes[0].set_ylim(0.9 * lowest, MOST_LOSS * max(float(np.median(mean)) for mean in means))
    axes[0].legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    return figure


def save(figure: Any, path: Path) -> list[Path]:
    """Write the figure as PNG and SVG beside each other, and close it; where they are."""
    written = [path.with_name(f"{path.name}.{form}") for form in FORMATS]
    for file in written:
        # Without dates and random ids, so that the same runs give the same files.
        figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot().close(figure)
    return written


def pyplot() -> Any:
    """``matplotlib.pyplot``, which needs no screen; ConfigError if it is not installed."""
    mpl = require("matplotlib", "draw", "lab")
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "afl"
    mpl.rcParams["svg.fonttype"] = "none"
    return require("matplotlib.pyplot", "draw", "lab")
