"""What a compressor is: ``C_t`` of the paper (Definitions 3 and 4), with one realization a round."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.messages import Encoding, ValueType
from afl.core.randomness import Stream
from afl.core.vectors import add_at, array_is_finite, is_finite, step_at
from afl.errors import ConfigError, NonFiniteError


@dataclass(frozen=True)
class Compressed:
    """A compressed vector in the form that travels.

    Attributes:
        values: ``[count]`` on the host, of the codec's type: float32 in all that are built in. With
            ``Encoding.SIGNS`` the one scale.
        indices: where they travel, ascending int64: with ``Encoding.INDEXED`` those of the values; with
            ``Encoding.SIGNS`` those of the coordinates that are zero.
        signs: with ``Encoding.SIGNS``, a bit for each coordinate that is not zero, in ascending order,
            lowest bit of a byte first, set where it is negative; the last byte is filled up with zeros.
    """

    values: NDArray[Any]
    indices: NDArray[np.int64] | None = None
    signs: NDArray[np.uint8] | None = None


class Compressor(abc.ABC):
    """A compressor over vectors of one dimension.

    Subclass it, and register the class in the entry point group ``afl.compressors``.

    Args:
        dim: d.
        options: what the configuration gives besides the name.

    Raises:
        ConfigError: if an option is unknown or out of bounds.
    """

    name: ClassVar[str]
    encoding: ClassVar[Encoding]
    value_type: ValueType = ValueType.FLOAT32
    """With the encoding, the form of its messages (:mod:`afl.core.codecs`)."""
    bits: int = 0
    """Of the integers that its values are rounded to; 0 for float32. Any that is additive and idempotent can
    be given some (:class:`afl.core.grid.Grid`). Where they are added modulo ``2^bits``, :attr:`value_type` is
    ``MODULAR``."""
    groups: int = 0
    """Of the grid, each of which has an integer of its own behind those of the values."""
    additive_idempotent: ClassVar[bool]
    """Whether it is in the class C_AI for each realization: then values can be summed as they are, and
    with shared randomness the downlink loses nothing (paper, section 3.2, key observation)."""

    lossless: bool = False
    """Whether ``C(x) = x``: no residual is kept then."""

    in_coordinates: ClassVar[bool] = False
    """Whether each of its values is one coordinate's, in ascending order; they are then rounded on a grid of
    a step for each parameter tensor, others on one grid."""

    def __init__(self, dim: int, options: Mapping[str, Any]) -> None:
        assert dim >= 1
        self.dim = dim
        self.options = dict(options)

    @property
    @abc.abstractmethod
    def count(self) -> int:
        """How many values travel; the most, where it varies."""

    @property
    @abc.abstractmethod
    def delta(self) -> float:
        """The contraction: ``E ||C(x) - x||^2 <= (1 - delta) ||x||^2``."""

    @abc.abstractmethod
    def realize(self, stream: Stream, device: torch.device | str = "cpu") -> Realization:
        """The round's realization, drawn from the round's stream; it depends on nothing else."""


class Realization(abc.ABC):
    """A compressor with its randomness fixed: a deterministic operator.

    What it needs is :meth:`split` and :meth:`decode`; the others follow from them.
    """

    @abc.abstractmethod
    def split(self, vector: Tensor) -> Compressed:
        """Take ``C(vector)`` out of ``vector``, which keeps the residual ``vector - C(vector)``.

        The residual is of what is decoded: ``vector -= decode(...)`` to the bit, which ``self.step(vector,
        compressed, 1.0)`` does.

        Args:
            vector: float32 ``[dim]``, finite; changed in place.

        Raises:
            NonFiniteError: if the message or the residual leaves float32's range; the vector is lost then.
        """

    @abc.abstractmethod
    def decode(self, compressed: Compressed) -> Tensor:
        """``C(x)`` as a vector, float32 ``[dim]``, on any device, in memory of its own.

        Every party decodes the same message, so the bits should not depend on the machine.
        """

    def add_to(self, total: Tensor, compressed: Compressed) -> None:
        """``total += C(x)``, rounded once a coordinate; float32 ``[dim]``."""
        add_at(total, None, self.decode(compressed).cpu().numpy())

    def step(self, params: Tensor, compressed: Compressed, eta: float) -> None:
        """``params -= eta C(x)``: a product, then a difference, each rounded (AFL-Com, line 13)."""
        step_at(params, None, self.decode(compressed).cpu().numpy(), eta)

    def digest_material(self) -> bytes:
        """Bytes that determine the realization, for the handshake's digest; empty where it has none."""
        return b""

    def values(self, vector: Tensor) -> NDArray[np.float32]:
        """The values of ``C(vector)``, float32 ``[count]``; read only, valid while ``vector`` is as it is.

        Raises:
            NonFiniteError: if one leaves float32's range.
        """
        return self.split(vector.clone()).values

    def subtract(self, vector: Tensor, values: NDArray[np.float32], sent: NDArray[np.float32]) -> None:  # noqa: ARG002
        """``vector -= decode(sent)``, as :meth:`step` with 1 does it.

        Args:
            values: the vector's own, as :meth:`values` has them.
        """
        self.step(vector, Compressed(sent), 1.0)

    def counts(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:  # noqa: ARG002
        """How many values lie in each stretch of coordinates; for a compressor in coordinates.

        Args:
            offsets: where the stretches begin, and the last ends, int64 ``[stretches + 1]``.
        """
        raise AssertionError(f"the values of {type(self).__name__} are not those of coordinates")


class Selection(Realization):
    """The realization of a sparsifier: some coordinates as they are, zeros elsewhere.

    Args:
        dim: d.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim

    @abc.abstractmethod
    def indices(self, compressed: Compressed) -> Tensor:
        """The coordinates that ``compressed.values`` are for, int64 ``[count]``."""

    def decode(self, compressed: Compressed) -> Tensor:
        """The values at their coordinates and zeros elsewhere, float32 ``[dim]``."""
        places = self.indices(compressed)
        dense = np.zeros(self._dim, dtype=np.float32)
        dense[places.cpu().numpy()] = compressed.values
        return torch.from_numpy(dense)

    def add_to(self, total: Tensor, compressed: Compressed) -> None:
        """``total += C(x)``; only the coordinates that travel are touched."""
        add_at(total, self.indices(compressed), compressed.values)

    def step(self, params: Tensor, compressed: Compressed, eta: float) -> None:
        """``params -= eta C(x)``; only the coordinates that travel are touched."""
        step_at(params, self.indices(compressed), compressed.values, eta)


class LinearRealization(Realization):
    """An orthogonal projection ``P = Q^T Q`` by the r coefficients ``Q x``, computed in float64 on the host.

    The coefficients travel in float32, and what is decoded from them is rounded to float32. P(Px) therefore
    differs from Px by rounding, about 1e-7 of its norm.
    """

    @abc.abstractmethod
    def analyse(self, vector: NDArray[np.float32]) -> NDArray[np.float64]:
        """``Q x``, ``[r]``, of x ``[dim]``."""

    @abc.abstractmethod
    def synthesise(self, coefficients: NDArray[np.float32]) -> NDArray[np.float64]:
        """``Q^T c``, ``[dim]``, of c ``[r]``."""

    def split(self, vector: Tensor) -> Compressed:
        """The coefficients; the vector loses what they stand for."""
        compressed = Compressed(self.values(vector))
        self.step(vector, compressed, 1.0)
        if not is_finite(vector):
            raise NonFiniteError(_OVERFLOW)
        return compressed

    def values(self, vector: Tensor) -> NDArray[np.float32]:
        """The coefficients, rounded to float32."""
        with np.errstate(over="ignore"):
            coefficients = self.analyse(vector.cpu().numpy()).astype(np.float32)
        if not array_is_finite(coefficients):
            raise NonFiniteError(_OVERFLOW)
        return coefficients

    def decode(self, compressed: Compressed) -> Tensor:
        """``P x`` rounded to float32; infinite where it overflows."""
        with np.errstate(over="ignore"):
            return torch.from_numpy(self.synthesise(compressed.values).astype(np.float32))


_OVERFLOW = "the projection of the update overflows float32"


class RatioCompressor(Compressor):
    """Sends k values of d, ``k = max(1, round(ratio * d))``; its one option is ``ratio``."""

    def __init__(self, dim: int, options: Mapping[str, Any]) -> None:
        super().__init__(dim, options)
        self._count = kept(ratio_option(self.name, options), dim)

    @property
    def count(self) -> int:
        """k, the number of values that are sent."""
        return self._count

    @property
    def delta(self) -> float:
        """The contraction k/d."""
        return self._count / self.dim


def ratio_option(name: str, options: Mapping[str, Any]) -> float:
    """The one option ``ratio`` of a compressor, in (0, 1].

    Raises:
        ConfigError: if it is missing, out of bounds, or not alone.
    """
    unknown = set(options) - {"ratio"}
    if unknown:
        raise ConfigError(f"{name}: unknown option {sorted(unknown)[0]!r}; it takes only `ratio`, in (0, 1]")
    ratio = options.get("ratio")
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError(f"{name}: ratio is {ratio!r}; it must be a number in (0, 1]")
    return float(ratio)


def kept(ratio: float, dim: int) -> int:
    """k = max(1, round(ratio * d)); never 0, however small the model."""
    return max(1, round(ratio * dim))
