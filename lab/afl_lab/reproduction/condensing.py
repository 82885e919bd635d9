"""From a run directory to the small file that is kept of it."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from afl._version import __version__
from afl.config import Config
from afl.run_files import METRICS_FILE, SUMMARY_FILE
from afl_lab.reproduction.condensed import CondensedRun, Point, plain_config


def condense(directory: Path, config: Config, **about: Any) -> CondensedRun:
    """What is kept of a run directory."""
    summary = json.loads((directory / SUMMARY_FILE).read_text(encoding="utf-8"))
    return CondensedRun(
        {
            **about,
            "result": summary["result"],
            "seconds": summary["seconds"],
            "versions": versions(),
            "config": plain_config(config),
        },
        points_of(directory),
    )


def points_of(directory: Path) -> list[Point]:
    """The evaluations of a run directory's metrics."""
    points = []
    synchronization = 0
    for text in (directory / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["event"] == "round":
            synchronization = line["synchronization"]
        elif line["event"] == "evaluation":
            points.append(
                Point(
                    line["round"],
                    synchronization,
                    line["worst_accuracy"],
                    round(line["max_loss"], 6),
                    round(line["mean_accuracy"], 6),
                    round(line["mean_loss"], 6),
                    round(line["uplink_float_equivalents"] + line["downlink_float_equivalents"], 3),
                    line["uplink_bytes"] + line["downlink_bytes"],
                )
            )
    return points


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "afl": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
