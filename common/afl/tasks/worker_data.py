"""A worker's examples, asked of a task."""

from __future__ import annotations

from afl.errors import TaskError
from afl.tasks.base import Task, TaskContext, WorkerData
from afl.user_code import calling


def worker_data(task: Task, worker: int, context: TaskContext) -> WorkerData:
    """The examples of a worker.

    Raises:
        TaskCodeError: if the task's code raises.
        TaskError: if it returns something else.
    """
    what = f"{type(task).__name__}.data({worker})"
    with calling(what):
        data: object = task.data(worker, context)
    if not isinstance(data, WorkerData):
        raise TaskError(
            f"{what} returned {type(data).__name__}; it must return afl.WorkerData(train=..., test=...)"
        )
    return data
