"""Calls of a task's loss and metrics, which may change no parameter: only the server's updates do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from afl.core.model.parameters import ParameterVector
from afl.errors import TaskError
from afl.tasks.base import Batch
from afl.tasks.dtypes import telling_types


class Calls:
    """Of one task, by whom its parameters are watched.

    Every call is seen to leave them where they are and as they are, by PyTorch's count of changes. Changes
    through ``.data`` are not counted, so the first call in training and the first in evaluation are also
    seen to leave their values.
    """

    def __init__(self, vector: ParameterVector) -> None:
        self._vector = vector
        self._seen: set[bool] = set()

    @contextlib.contextmanager
    def of(self, module: nn.Module, batch: Batch) -> Iterator[None]:
        """Around the loss or the metrics of a batch, and their gradient.

        Raises:
            TaskError: if a parameter has changed.
            DataError: as :func:`telling_types`.
        """
        is_first = module.training not in self._seen
        self._seen.add(module.training)
        before, values = self._state(), self._vector.values.clone() if is_first else None
        with telling_types(module, batch):
            yield
        after = self._state()
        changed = [name for name, there in before.items() if after.get(name) != there]
        if values is not None and not changed and not _are_equal(values, self._vector.values):
            changed = [
                name
                for name, old, new in zip(
                    self._vector.names,
                    torch.split(values, list(self._vector.tensors)),
                    torch.split(self._vector.values, list(self._vector.tensors)),
                    strict=True,
                )
                if not _are_equal(old, new)
            ]
        if changed:
            raise TaskError(
                f"calling the model changed its parameter {changed[0]}; only the server's updates may, or "
                "copies of the model would no longer be equal. If a layer limits its weights "
                "(nn.Embedding's max_norm, or torch.renorm written to .data), compute with a limited copy "
                "instead: `weight = torch.renorm(self.weight, 2, 0, 1.0)` in forward"
            )

    def _state(self) -> dict[str, tuple[int, int, int]]:
        """Which each parameter is, where, and how often it was changed."""
        return {
            name: (id(own), own.data_ptr(), 0 if own.is_inference() else own._version)  # noqa: SLF001
            for name, own in self._vector.module.named_parameters()
        }


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit: numbers that are none are equal to themselves."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))
