"""What a run asks of a task before its first round: the initial model, and a worker's examples."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from afl.config.quantities import shown_bytes
from afl.core.algorithms.base import ServerAlgorithm, WorkerSide
from afl.core.algorithms.realizations import Realizations
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.arithmetic import arithmetic
from afl.core.model.buffers import BufferPolicy
from afl.core.model.parameters import DIGEST_BYTES, FrozenPolicy, ParameterVector
from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import OutOfMemoryError, TaskError
from afl.tasks.base import Task, TaskContext, WorkerData
from afl.user_code import calling

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


def build_module(task: Task, seed: int) -> nn.Module:
    """The task's module as its constructor leaves it; torch's own generator is seeded for it, then put back.

    Raises:
        TaskError: if the task makes no module, or a policy of its is unknown.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with calling(f"{type(task).__name__}.model()"), _within_memory(f"{type(task).__name__}.model()"):
            module = task.model()
    kind = type(task).__name__
    if not isinstance(module, nn.Module):
        raise TaskError(f"{kind}.model() returned {type(module).__name__}; it must return an nn.Module")
    for name, policies in (("buffers", get_args(BufferPolicy)), ("frozen", get_args(FrozenPolicy))):
        policy = getattr(task, name)
        if policy not in policies:
            raise TaskError(
                f"{kind}.{name} is {policy!r}; it must be one of {', '.join(map(repr, policies))}"
            )
    return module


def require_memory(what: str, needed: int) -> None:
    """Raise OutOfMemoryError if this machine has not ``needed`` bytes: a run's settings can make a model or
    data of any size, and the kernel would end the process in the middle of it, or another."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        there = min(there, int(_CGROUP_LIMIT.read_text(encoding="ascii")))
    if needed > there:
        raise OutOfMemoryError(
            f"{what} takes at least {shown_bytes(needed)} of memory, and this machine has "
            f"{shown_bytes(there)}; give the task smaller sizes in its options, or run it on a larger machine"
        )


@contextlib.contextmanager
def _within_memory(what: str) -> Iterator[None]:
    """What a module registers is counted before anything is written to it."""
    total = 0

    def count(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        nonlocal total
        if parameter is not None and not parameter.is_meta:
            total += parameter.nbytes
            # As vector, gradient, residual and message.
            require_memory(what, 4 * total)

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def build_vector(
    task: Task, randomness: SharedRandomness, device: torch.device | str = "cpu"
) -> ParameterVector:
    """The task's module as a parameter vector.

    torch's stream may differ between its versions, so the server's result is what every worker is sent.

    Raises:
        TaskError: if the task's module cannot be trained, or a policy of its is unknown.
    """
    seed = int(randomness.stream(Purpose.INITIALIZATION).words(1)[0]) >> 1
    return ParameterVector(build_module(task, seed), device, buffers=task.buffers, frozen=task.frozen)


def worker_data(task: Task, worker: int, context: TaskContext) -> WorkerData:
    """The examples of a worker.

    Raises:
        TaskError: if the task's code raises (then a TaskCodeError), or returns something else.
    """
    what = f"{type(task).__name__}.data({worker})"
    with calling(what):
        data: object = task.data(worker, context)
    if not isinstance(data, WorkerData):
        raise TaskError(
            f"{what} returned {type(data).__name__}; it must return afl.WorkerData(train=..., test=...)"
        )
    return data


def realization_digest(
    drawn: ServerAlgorithm | WorkerSide | Realizations, settings: AlgorithmSettings, dim: int
) -> bytes:
    """16 bytes that server and worker share exactly if they draw the same in round 1, and compute alike."""
    material = drawn.digest_material() + arithmetic(settings, dim)
    return hashlib.blake2b(material, digest_size=DIGEST_BYTES).digest()
