"""What a codec is: how compressed vectors of one form become bytes, and what of these a receiver accepts."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from afl.core.codecs.indices import decode, encode
from afl.core.compressors.base import Compressed, Compressor
from afl.core.messages import Encoding, Payload, PayloadHeader, Role, ValueType
from afl.core.sums import Sum, ValueSum


class Codec(abc.ABC):
    """One form on the wire: an encoding with a type of values.

    A payload is its coded indices (perhaps none), then its values. Add a codec to ``CODECS`` in
    :mod:`afl.core.codecs.payload`; a compressor chooses it by ``encoding`` and ``value_type``.
    """

    value_type: ClassVar[ValueType] = ValueType.FLOAT32

    bits: int = 0
    """That hold each value, where they are integers."""

    count_varies: ClassVar[bool] = False
    """Whether the sender chooses how many values travel, up to the compressor's count."""

    length_varies: ClassVar[bool] = False
    """Whether as many values may take fewer bytes than :meth:`value_bytes` says."""

    in_runs: ClassVar[bool] = False
    """Whether any run of whole values can be read without the others (:meth:`values`): pieces of a payload
    are then checked, and summed, as they come."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    @abc.abstractmethod
    def pack(self, compressor: Compressor, compressed: Compressed, role: Role) -> Payload:
        """The payload of a compressed vector; large parts share their memory with it."""

    @abc.abstractmethod
    def unpack(self, header: PayloadHeader, indices: memoryview, values: memoryview) -> Compressed:
        """The compressed vector of a payload whose header and lengths have been checked; large parts share
        their memory with ``values``.

        Raises:
            ProtocolError: if the bytes are not what the header says.
            NonFiniteError: if a value is not finite.
        """

    @abc.abstractmethod
    def value_bytes(self, count: int) -> int:
        """The length of ``count`` values, in bytes; the most, where it varies."""

    def values(self, data: bytes | memoryview) -> NDArray[Any]:  # noqa: ARG002
        """A run of whole values, without a copy. Raises ProtocolError if it ends within a value,
        NonFiniteError if one is not finite."""
        raise AssertionError(f"a part of a payload in the form {self.encoding.name} cannot be read alone")

    def sum_of(self, count: int, participants: Sequence[int]) -> Sum:
        """A sum of messages of ``count`` values, for values that are read in runs: of float32 by default."""
        return ValueSum(self, count, participants)

    def most_index_bytes(self, count: int, dim: int) -> int:  # noqa: ARG002
        """The longest indices that are accepted beside ``count`` values of ``dim``."""
        return 0

    def float_equivalents(self, header: PayloadHeader) -> float:
        """What the paper charges for a payload, in floats (section 4.2)."""
        return float(header.count)

    def expected(self, compressor: Compressor, role: Role) -> PayloadHeader:
        """The header of a compressor's payloads; ``index_bytes`` is the most that is accepted."""
        return self.header(compressor.dim, compressor.count, role)

    def header(self, dim: int, count: int, role: Role) -> PayloadHeader:
        """Of a payload of ``count`` values; ``index_bytes`` is the most that is accepted."""
        return PayloadHeader(
            role=role,
            encoding=self.encoding,
            dim=dim,
            count=count,
            value_bytes=self.value_bytes(count),
            value_type=self.value_type,
            index_bytes=self.most_index_bytes(count, dim),
            bits=self.bits,
        )

    def _payload(
        self, role: Role, dim: int, count: int, values: memoryview, indices: NDArray[np.int64] | None = None
    ) -> Payload:
        """The payload of ``count`` values and, in their shortest coding, of ascending indices, if any."""
        header = self.header(dim, count, role)
        if indices is None and (header.value_bytes, header.index_bytes) == (len(values), 0):
            return Payload(header, (values,))
        coded = None if indices is None or not len(indices) else encode(indices, dim)
        coding, parameter, data = coded or (0, 0, b"")
        header = dataclasses.replace(
            header,
            value_bytes=len(values),
            index_coding=int(coding),
            index_parameter=parameter,
            index_bytes=len(data),
        )
        return Payload(header, (memoryview(data), values) if data else (values,))


class IntegerCodec(Codec):
    """Integers of ``bits`` bits; behind those of the values, those of the grid's groups."""

    def __init__(self, encoding: Encoding, bits: int) -> None:
        super().__init__(encoding)
        self.bits = bits

    @abc.abstractmethod
    def whole(self, integers: NDArray[Any], role: Role, dim: int) -> Payload:
        """The payload of integers, ``[count]``."""

    def pack(self, compressor: Compressor, compressed: Compressed, role: Role) -> Payload:
        """The payload of a message's integers."""
        return self.whole(compressed.values, role, compressor.dim)

    def expected(self, compressor: Compressor, role: Role) -> PayloadHeader:
        """Where lengths vary, the most bytes."""
        return self.header(compressor.dim, compressor.count + compressor.groups, role)

    def float_equivalents(self, header: PayloadHeader) -> float:
        """The bits that travel, over 32."""
        return header.value_bytes / 4


def decoded_indices(header: PayloadHeader, data: memoryview, count: int) -> NDArray[np.int64]:
    """``count`` ascending indices below the header's dimension, int64 ``[count]``. Raises ProtocolError if
    the bytes are not those of so many."""
    if count == 0 and header.index_coding == header.index_parameter == len(data) == 0:
        return np.zeros(0, dtype=np.int64)
    return decode(header.index_coding, header.index_parameter, data, count, header.dim)
