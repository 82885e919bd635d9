"""The buffers of a module (BatchNorm's running statistics): one set for each worker that computes with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from afl.core.vectors import array_is_finite
from afl.errors import NonFiniteError, TaskError

BufferPolicy: TypeAlias = Literal["refuse", "local", "mean"]
"""What becomes of a model's floating-point buffers, as :class:`afl.Task` describes it."""

_Set: TypeAlias = list[Tensor | None]


class _Averaged(NamedTuple):
    """A buffer that is part of the mean: where it stands in a set, and its part of the vector."""

    name: str
    place: int
    part: slice


class ModuleBuffers:
    """A module's buffers, of every type, as each hosted worker has them.

    The workers of one process share its module. Training changes buffers at each worker alone, so each has
    a set of its own, which :meth:`select` puts into the module: no value is copied for that. A process with
    one worker, and a module without buffers, pay nothing.

    Args:
        averaged: whether the workers' floating-point buffers are averaged. Those are the persistent ones,
            which ``state_dict`` has; they form one float32 vector, in ``named_buffers()`` order, tied ones
            once.

    Raises:
        TaskError: if a buffer that would be averaged is not finite.
    """

    def __init__(self, module: nn.Module, *, averaged: bool) -> None:
        self._module = module
        # Also those that are None as yet, which named_buffers leaves out.
        self._places = [(owner, name) for owner in module.modules() for name, _ in owner._buffers.items()]  # noqa: SLF001
        self._sets: dict[int, _Set] = {}
        self._first: _Set = []
        self._selected = -1
        self._averaged: list[_Averaged] = []
        self.size = 0
        """How many values the workers' mean has; 0 where there is none."""
        self.layout: list[list[object]] = []
        """Name, shape and type of each buffer that is averaged, in order."""
        if averaged:
            self._find_averaged()

    def _find_averaged(self) -> None:
        installed = self._installed()
        places = {id(tensor): place for place, tensor in enumerate(installed) if tensor is not None}
        kept = self._module.state_dict().keys()
        for name, buffer in self._module.named_buffers():
            if name not in kept or not buffer.dtype.is_floating_point or not buffer.numel():
                continue
            start, self.size = self.size, self.size + buffer.numel()
            self.layout.append([name, list(buffer.shape), str(buffer.dtype)])
            self._averaged.append(_Averaged(name, places[id(buffer)], slice(start, self.size)))
            if not bool(torch.isfinite(buffer).all()):
                raise TaskError(
                    f"the buffer {name} has values that are not finite, of which no mean can be taken; set "
                    '`buffers = "local"` in the task, or register the buffer with persistent=False if it '
                    "never changes"
                )

    def host(self, workers: Iterable[int]) -> None:
        """Give each of the workers that compute with this module a set, all as the module's now is."""
        first, *others = workers
        own = self._installed()
        self._selected = first
        self._sets = {}
        for worker in others if self._places else ():
            self._sets[worker] = _copied(own)
        self._first = _copied(own)

    def begin_anew(self, worker: int) -> None:
        """Give a worker the buffers that it had first."""
        self.select(worker)
        for (owner, name), tensor in zip(self._places, _copied(self._first), strict=True):
            owner._buffers[name] = tensor  # noqa: SLF001

    def select(self, worker: int) -> None:
        """Let the module compute with a worker's set; before anything that is computed for it."""
        if worker == self._selected or not self._places:
            return
        # What is there now, since training may have put another tensor in a buffer's place.
        self._sets[self._selected] = self._installed()
        for (owner, name), tensor in zip(self._places, self._sets.pop(worker), strict=True):
            owner._buffers[name] = tensor  # noqa: SLF001  # setattr takes forty times as long (measured)
        self._selected = worker

    def values(self) -> NDArray[np.float32]:
        """A copy of the averaged buffers of the selected worker, float32 ``[size]``, on the host."""
        values = np.empty(self.size, dtype=np.float32)
        for part, tensor in self._averaged_of(self._installed()):
            values[part] = tensor.detach().reshape(-1).to(torch.float32).cpu().numpy()
        return values

    def finite_values(self, worker: int) -> NDArray[np.float32]:
        """:meth:`values` of a worker, to be sent. Raises NonFiniteError naming a buffer with an element that
        float32 does not hold as a finite one."""
        self.select(worker)
        values = self.values()
        for entry in self._averaged:
            if not array_is_finite(values[entry.part]):
                raise NonFiniteError(
                    f"the buffer {entry.name} of worker {worker} has an element that is not finite"
                )
        return values

    def load(self, values: NDArray[np.float32]) -> None:
        """Replace the averaged buffers of all workers; float32 ``[size]``, rounded to each buffer's type."""
        assert values.shape == (self.size,)
        source = torch.from_numpy(values.copy())
        with torch.no_grad():
            for buffers in (self._installed(), *self._sets.values()):
                for part, buffer in self._averaged_of(buffers):
                    buffer.copy_(source[part].view(buffer.shape))

    def contents(self, worker: int) -> dict[str, NDArray[np.uint8]]:
        """A worker's buffers of every type, as bytes, by place, type and shape, which training may change:
        ``3:bfloat16:5x2``. They may share memory."""
        self.select(worker)
        return {
            f"{place}:{str(tensor.dtype).removeprefix('torch.')}:{'x'.join(map(str, tensor.shape))}": (
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            )
            for place, tensor in enumerate(self._installed())
            if tensor is not None
        }

    def restore(self, worker: int, contents: Mapping[str, NDArray[np.uint8]]) -> None:
        """Put back a worker's :meth:`contents`."""
        self.select(worker)
        device = next(self._module.parameters()).device
        for name, data in contents.items():
            place, kind, shape = name.split(":")
            sizes = [int(size) for size in shape.split("x")] if shape else []
            values = torch.from_numpy(data.copy()).view(getattr(torch, kind)).reshape(sizes)
            owner, attribute = self._places[int(place)]
            tensor = owner._buffers[attribute]  # noqa: SLF001
            if tensor is None or (tensor.dtype, tensor.shape) != (values.dtype, values.shape):
                owner._buffers[attribute] = values.to(device)  # noqa: SLF001
            else:
                # In place: tied buffers stay tied.
                tensor.detach().copy_(values)

    def is_averaged(self, tensor: Tensor) -> bool:
        """Whether a tensor is a buffer of the selected worker that is averaged."""
        return any(buffer is tensor for _, buffer in self._averaged_of(self._installed()))

    @property
    def has_floats(self) -> bool:
        """Whether any buffer is floating-point."""
        return any(buffer.dtype.is_floating_point for buffer in self._module.buffers())

    def stacked(self, workers: Sequence[int]) -> dict[str, Tensor]:
        """The workers' buffers by name, with a first dimension for the workers."""
        rows = []
        for worker in workers:
            self.select(worker)
            rows.append(dict(self._module.named_buffers()))
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def unstack(self, workers: Sequence[int], stacked: Mapping[str, Tensor]) -> None:
        """Replace buffers by the rows of a mapping like that of :meth:`stacked`."""
        if not stacked:
            return
        with torch.no_grad():
            for row, worker in enumerate(workers):
                self.select(worker)
                for name, buffer in self._module.named_buffers():
                    buffer.copy_(stacked[name][row])

    def _installed(self) -> _Set:
        return [owner._buffers[name] for owner, name in self._places]  # noqa: SLF001

    def _averaged_of(self, buffers: _Set) -> Iterator[tuple[slice, Tensor]]:
        for entry in self._averaged:
            buffer = buffers[entry.place]
            assert buffer is not None
            yield entry.part, buffer


def _copied(buffers: _Set) -> _Set:
    # Tied buffers stay tied.
    copies = {id(tensor): tensor.detach().clone() for tensor in buffers if tensor is not None}
    return [None if tensor is None else copies[id(tensor)] for tensor in buffers]
