"""The vector operations of a round, the same bits on every device.

In host memory they run in numpy: beside a model's own computation, which leaves the caches cold, its
operators take half the time of torch's on vectors of 10^5 (measured on two cores). Elsewhere they run in
torch. Each coordinate sees the same operations, each rounded to float32: a product, then a sum or a
difference, never a fused multiply-add. Long passes go block by block, so that a block is still in cache
for the next operation on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1 << 16
"""256 kB of float32: what one operation has written is still in a second-level cache of 512 kB for the
next."""

_PLACES = 1 << 13
"""So many places, a tenth of a vector, lie in what such a cache holds."""

_ZEROS = np.zeros(BLOCK, dtype=np.float32)


def is_finite(vector: Tensor) -> bool:
    """Whether all elements are finite; float32, one dimension."""
    if vector.device.type != "cpu":
        return bool(torch.isfinite(vector).all())
    # Only a sum that overflows needs a closer look.
    return math.isfinite(vector.sum()) or array_is_finite(vector.numpy())


def array_is_finite(values: NDArray[np.float32]) -> bool:
    """Whether all elements are finite; float32, one dimension.

    Infinity and NaN times zero is NaN, anything finite is zero: a product with zeros cannot overflow, as a
    sum could.
    """
    with np.errstate(invalid="ignore"):
        for start in range(0, len(values), BLOCK):
            block = values[start : start + BLOCK]
            if block.dot(_ZEROS[: len(block)]) != 0.0:
                return False
    return True


def scale(vector: Tensor, factor: float, *, out: Tensor) -> None:
    """``out = factor * vector``, the factor rounded to float32; ``out`` may be ``vector``."""
    rounded = float(np.float32(factor))
    if vector.device.type != "cpu":
        torch.mul(vector, rounded, out=out)
        return
    with np.errstate(over="ignore"):
        np.multiply(vector.numpy(), rounded, out=out.numpy())


def norm(vector: Tensor) -> float:
    """The Euclidean norm, summed in float64; of any finite float32 vector it is finite."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))


class Weighted:
    """A factor times a vector that lies in parts, as autograd leaves a gradient; computed where it is to go.

    The factor and the parts' elements are rounded to float32, then each product.

    Args:
        parts: of any floating type and layout, in order; ``None`` for zeros. Their memory must not change.
        sizes: the elements of each.
    """

    def __init__(self, parts: Sequence[Tensor | None], sizes: Sequence[int], factor: float) -> None:
        self._parts = parts
        self._sizes = sizes
        self._dim = sum(sizes)
        self._scale = factor
        self._factor = np.float32(factor)

    def write(self, out: Tensor) -> bool:
        """Set ``out``, float32 ``[dim]``, to it; whether all elements are finite."""
        if out.device.type == "cpu":
            return self._all_finite(self._blocks(out.numpy()))
        for part, piece in zip(self._parts, torch.split(out, list(self._sizes)), strict=True):
            if part is None:
                piece.zero_()
            else:
                piece.view(part.shape).copy_(part).mul_(float(self._factor))
        return is_finite(out)

    def clip(self, largest: float) -> None:
        """Make the factor smaller by ``largest / norm`` where the vector, without the factor, has a larger
        Euclidean norm: computed in float64, and rounded to float32 once with the factor."""
        found = math.hypot(*(norm(part) for part in self._parts if part is not None))
        if found > largest:
            self._scale *= largest / found
            self._factor = np.float32(self._scale)

    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return self._all_finite(self._blocks())

    def add_to(self, total: Tensor, *, out: Tensor) -> bool:
        """As :func:`add_finite`."""
        if total.device.type != "cpu":
            vector = torch.empty_like(total)
            self.write(vector)
            return add_finite(total, vector, out=out)
        sums, target, start = total.numpy(), out.numpy(), 0
        with np.errstate(over="ignore", invalid="ignore"):
            for block in self._blocks(None if out is total else target):
                stop = start + len(block)
                np.add(sums[start:stop], block, out=target[start:stop])
                if target[start:stop].dot(_ZEROS[: len(block)]) != 0.0:
                    return False
                start = stop
        return True

    @staticmethod
    def _all_finite(blocks: Iterator[NDArray[np.float32]]) -> bool:
        is_finite = True
        with np.errstate(over="ignore", invalid="ignore"):
            for block in blocks:
                is_finite = is_finite and block.dot(_ZEROS[: len(block)]) == 0.0
        return is_finite

    def _blocks(self, memory: NDArray[np.float32] | None = None) -> Iterator[NDArray[np.float32]]:
        """It on the host, in blocks: one after the other in ``memory``, or each in place of the last."""
        scratch = np.empty(min(BLOCK, self._dim), dtype=np.float32) if memory is None else memory
        first_part = self._parts[0]
        if first_part is not None and len(self._parts) == 1 and self._dim <= BLOCK:
            yield np.multiply(_flat(first_part), self._factor, out=scratch)
            return
        start = filled = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            values = None if part is None else _flat(part)
            done = 0
            while done < size:
                first = start if memory is not None else 0
                block = scratch[first : first + min(BLOCK, self._dim - start)]
                count = min(size - done, len(block) - filled)
                target = block[filled : filled + count]
                if values is None:
                    target.fill(0.0)
                else:
                    np.multiply(values[done : done + count], self._factor, out=target)
                done, filled = done + count, filled + count
                if filled == len(block):
                    yield block
                    start, filled = start + filled, 0


def _flat(part: Tensor) -> NDArray[np.float32]:
    """A part's elements in order, on the host; without a copy where they lie so."""
    # As a batched call leaves its rows: nothing to ask torch for.
    is_so = part.dtype is torch.float32 and part.dim() == 1 and part.device.type == "cpu"
    flat: NDArray[np.float32] = (part if is_so else part.to("cpu", torch.float32).reshape(-1)).numpy()
    return flat


def add_finite(total: Tensor, vector: Tensor | Weighted, *, out: Tensor) -> bool:
    """``out = total + vector``; whether all sums are finite.

    It stops at the first block that is not. ``out`` may be ``total``.
    """
    if isinstance(vector, Weighted):
        return vector.add_to(total, out=out)
    if total.device.type != "cpu":
        torch.add(total, vector, out=out)
        return is_finite(out)
    sums, terms, target = total.numpy(), vector.numpy(), out.numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(sums), BLOCK):
            block = target[start : start + BLOCK]
            np.add(sums[start : start + BLOCK], terms[start : start + BLOCK], out=block)
            if block.dot(_ZEROS[: len(block)]) != 0.0:
                return False
    return True


def overwrite(vector: Tensor, values: NDArray[np.float32]) -> None:
    """Set a vector, wherever it lies, to an array's values; these may be a file's own pages."""
    if vector.device.type == "cpu":
        np.copyto(vector.numpy(), values)
    else:
        vector.copy_(torch.from_numpy(values.copy()))


def take_out(vector: Tensor, places: Tensor) -> NDArray[np.float32]:
    """The values at ``places`` (int64), which become zero in ``vector``."""
    if vector.device.type != "cpu":
        values: NDArray[np.float32] = vector.index_select(0, places).cpu().numpy()
        vector.index_fill_(0, places, 0.0)
        return values
    array, indices = vector.numpy(), places.numpy()
    taken: NDArray[np.float32] = np.empty(len(indices), dtype=np.float32)
    for start in range(0, len(indices), _PLACES):
        block = indices[start : start + _PLACES]
        # The mode lets numpy write to `taken` at once; all places are within.
        np.take(array, block, out=taken[start : start + _PLACES], mode="clip")
        array[block] = 0.0
    return taken


def put_at(vector: Tensor, places: Tensor, values: NDArray[np.float32]) -> None:
    """``vector[places] = values``, each place at most once."""
    if vector.device.type != "cpu":
        vector.index_copy_(0, places.to(vector.device), torch.from_numpy(values.copy()).to(vector.device))
        return
    array, indices = vector.numpy(), places.numpy()
    for start in range(0, len(indices), _PLACES):
        array[indices[start : start + _PLACES]] = values[start : start + _PLACES]


def add_at(total: Tensor, places: Tensor | None, values: NDArray[np.float32]) -> None:
    """``total[places] += values``, each place at most once; all places where ``places`` is ``None``."""
    with np.errstate(over="ignore", invalid="ignore"):
        if total.device.type != "cpu":
            addend = torch.from_numpy(values.copy()).to(total.device)
            if places is None:
                total.add_(addend)
            else:
                at = places.to(total.device)
                total.index_copy_(0, at, total.index_select(0, at).add_(addend))
        elif places is None:
            array = total.numpy()
            np.add(array, values, out=array)
        else:
            total.numpy()[places.numpy()] += values


def step_at(params: Tensor, places: Tensor | None, values: NDArray[np.float32], eta: float) -> None:
    """``params[places] -= eta * values``, eta rounded to float32; all places where it is ``None``."""
    factor = np.float32(eta)
    # A step beyond float32 makes the next loss infinite, which stops the run by name.
    with np.errstate(over="ignore", invalid="ignore"):
        if params.device.type != "cpu":
            change = torch.from_numpy(values * factor).to(params.device)
            if places is None:
                params.sub_(change)
            else:
                at = places.to(params.device)
                params.index_copy_(0, at, params.index_select(0, at).sub_(change))
        elif places is None:
            _step_all(params.numpy(), values, factor)
        else:
            array, indices = params.numpy(), places.numpy()
            for start in range(0, len(indices), _PLACES):
                array[indices[start : start + _PLACES]] -= values[start : start + _PLACES] * factor


def _step_all(params: NDArray[np.float32], values: NDArray[np.float32], eta: np.float32) -> None:
    scratch = np.empty(min(BLOCK, len(params)), dtype=np.float32)
    for start in range(0, len(params), BLOCK):
        block = params[start : start + BLOCK]
        change = scratch[: len(block)]
        np.multiply(values[start : start + BLOCK], eta, out=change)
        np.subtract(block, change, out=block)
