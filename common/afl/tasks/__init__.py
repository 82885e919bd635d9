"""Tasks: the base classes a user subclasses, the built-in ones, and how a task is found by name."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from afl.tasks.base import Classification, Examples, Task, TaskContext, WorkerData
    from afl.tasks.registry import known_tasks, load_task, task_identity

__all__ = [
    "Classification",
    "Examples",
    "Task",
    "TaskContext",
    "WorkerData",
    "known_tasks",
    "load_task",
    "task_identity",
]


def __getattr__(name: str) -> Any:
    """Names of this package are imported when they are asked for: PyTorch, which they need, takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from afl.tasks import base, registry  # noqa: PLC0415

    return getattr(base, name, None) or getattr(registry, name)
