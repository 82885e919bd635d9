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
from afl.runs.files import SUMMARY_FILE
from afl_lab.plots.points import points_of
from afl_reproduction.condensed import CondensedRun, plain_config


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


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "afl": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
