"""A worker's own examples: which of them give gradients, which are held out, which test the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import DataError
from afl.tasks.base import Batch, Examples, WorkerData, example_count, form_problem, take_batch


@dataclass(frozen=True)
class Part:
    """Some of a worker's examples, and how many of them there are and make a minibatch.

    Attributes:
        indices: which of ``examples`` they are, ascending, int64 ``[count]``; ``None`` if all.
    """

    examples: Examples
    count: int
    batch_size: int
    indices: Tensor | None = None

    def batch(self, chosen: Tensor, device: torch.device) -> Batch:
        """Those at the places ``chosen`` (int64 ``[n]``, below :attr:`count`), on the device."""
        if self.indices is not None:
            chosen = self.indices[chosen]
        if isinstance(self.examples, torch.utils.data.Dataset):
            return on_device(take_batch(self.examples, chosen), device)
        return take_batch(self.examples, chosen.to(device))


@dataclass(frozen=True)
class WorkerExamples:
    """All of a worker's examples; tensors are on the device.

    Attributes:
        held_out: training examples that give no gradients; ``None`` if all do.
    """

    train: Part
    test: Part
    held_out: Part | None = None

    @classmethod
    def of(
        cls,
        worker: int,
        own: WorkerData,
        randomness: SharedRandomness,
        *,
        batch_size: int,
        held_out: float,
        allow_smaller: bool,
        device: torch.device,
    ) -> WorkerExamples:
        """Check what the task has given, and draw what is held out.

        Args:
            held_out: the share of the training examples, rounded to a whole number of them.
            allow_smaller: whether fewer training examples than ``batch_size`` are all used in each round.

        Raises:
            DataError: if the task's data has not the right form, or too few of anything.
        """
        for examples, what in ((own.train, "train"), (own.test, "test")):
            problem = form_problem(examples)
            if problem:
                raise DataError(f"what the task gives worker {worker} as {what} cannot be used: {problem}")
        count, tests = example_count(own.train), example_count(own.test)
        if not count or not tests:
            raise DataError(
                f"worker {worker} has no {'test' if count else 'training'} examples ({count} "
                f"training, {tests} test); each worker needs at least one of each: look at how the task "
                "divides its data"
            )
        held = held_out_count(count, held_out)
        if held_out and not 0 < held < count:
            raise DataError(
                f"worker {worker} has {count} training examples, of which task.held_out ({held_out:g}) would "
                f"hold out {held}; at least one must be held out and one be left to train with"
            )
        left = count - held
        if left < batch_size and not allow_smaller:
            besides = f" besides the {held} that are held out" if held else ""
            lower = "task.batch_size or task.held_out" if held else "task.batch_size"
            raise DataError(
                f"worker {worker} has {left} training examples{besides}, fewer than task.batch_size "
                f"({batch_size}); lower {lower}, or set `allow_smaller_batch = True` in the task"
            )
        train, test = on_device(own.train, device), Part(on_device(own.test, device), tests, tests)
        if not held:
            return cls(Part(train, count, min(batch_size, count)), test)
        drawn = torch.from_numpy(randomness.stream(Purpose.HELD_OUT_SPLIT, worker=worker).subset(count, held))
        gives_gradients = torch.ones(count, dtype=torch.bool)
        gives_gradients[drawn] = False
        kept = gives_gradients.nonzero().reshape(-1)
        return cls(
            Part(train, left, min(batch_size, left), kept),
            test,
            Part(train, held, min(batch_size, held), drawn),
        )


def held_out_count(count: int, share: float) -> int:
    """How many of a worker's training examples ``task.held_out`` holds out."""
    return round(share * count)


def on_device(data: Batch, device: torch.device) -> Batch:
    """The same on the device."""
    return mapped(lambda tensor: tensor.to(device), data)


def mapped(change: Callable[..., Tensor], *batches: Batch) -> Batch:
    """Tensors, also in tuples, lists and mappings, changed, those at one place of all batches together;
    anything else as it is in the first."""
    first = batches[0]
    if isinstance(first, Tensor):
        return change(*batches)
    if isinstance(first, tuple | list):
        return tuple(mapped(change, *parts) for parts in zip(*batches, strict=True))
    if isinstance(first, dict):
        return {key: mapped(change, *(batch[key] for batch in batches)) for key in first}
    return first
