"""Agnostic federated learning: what users import.

A user subclasses :class:`Task` (or :class:`Classification`) and, to add a compressor, :class:`Compressor`.
Everything else below this package may change without notice.
"""

from afl._version import __version__
from afl.compressors import Compressed, Compressor, Realization
from afl.errors import AflError, ConfigError, DataError, ExitCode, TaskError
from afl.randomness import Purpose, SharedRandomness, Stream
from afl.tasks import Classification, Task, TaskContext, WorkerData

__all__ = [
    "AflError",
    "Classification",
    "Compressed",
    "Compressor",
    "ConfigError",
    "DataError",
    "ExitCode",
    "Purpose",
    "Realization",
    "SharedRandomness",
    "Stream",
    "Task",
    "TaskContext",
    "TaskError",
    "WorkerData",
    "__version__",
]
