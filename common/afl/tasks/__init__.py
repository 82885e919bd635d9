"""Tasks: the base classes a user subclasses, the built-in ones, and how a task is found by name."""

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
