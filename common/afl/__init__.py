"""Agnostic federated learning: what users import.

A user subclasses :class:`Task` (or :class:`Classification`); to add a compressor, :class:`Compressor`; to
add an algorithm, :class:`Algorithm`; to add a rule for the dual weights, :class:`DualRule`.
:func:`load_model` loads what ``afl export`` wrote.
:mod:`afl.theory` has the paper's step sizes, bounds and complexities. Everything else below this package
may change without notice.

The names are imported when they are first used, so that commands which need no torch start without it, and
all take signals from their first moments.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afl._version import __version__
    from afl.core.algorithms.algorithm import Algorithm, dual_rule
    from afl.core.algorithms.update_server import UpdateServer
    from afl.core.compressors import Compressed, Compressor, Realization
    from afl.core.dual import DualRule, DualWeights, ProjectedAscent
    from afl.core.messages import Encoding
    from afl.core.options import AlgorithmOption
    from afl.core.randomness import Purpose, SharedRandomness, Stream
    from afl.errors import AflError, ConfigError, DataError, ExitCode, TaskError
    from afl.runs.export.loading import load_model
    from afl.tasks import Classification, Task, TaskContext, WorkerData

_HOMES = {
    "afl._version": ("__version__",),
    "afl.core.algorithms.algorithm": ("Algorithm", "dual_rule"),
    "afl.core.options": ("AlgorithmOption",),
    "afl.core.algorithms.update_server": ("UpdateServer",),
    "afl.core.dual": ("DualRule", "DualWeights", "ProjectedAscent"),
    "afl.core.compressors": ("Compressed", "Compressor", "Realization"),
    "afl.errors": ("AflError", "ConfigError", "DataError", "ExitCode", "TaskError"),
    "afl.runs.export.loading": ("load_model",),
    "afl.core.messages": ("Encoding",),
    "afl.core.randomness": ("Purpose", "SharedRandomness", "Stream"),
    "afl.tasks": ("Classification", "Task", "TaskContext", "WorkerData"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AflError",
    "Algorithm",
    "AlgorithmOption",
    "Classification",
    "Compressed",
    "Compressor",
    "ConfigError",
    "DataError",
    "DualRule",
    "DualWeights",
    "Encoding",
    "ExitCode",
    "ProjectedAscent",
    "Purpose",
    "Realization",
    "SharedRandomness",
    "Stream",
    "Task",
    "TaskContext",
    "TaskError",
    "UpdateServer",
    "WorkerData",
    "__version__",
    "dual_rule",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'afl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
