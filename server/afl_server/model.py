"""A whole model as payloads: for workers that have none, or another."""

from __future__ import annotations

from afl.codecs.payload import bytes_of
from afl.messages import Encoding, Payload, PayloadHeader, Role, ValueType
from afl.parameters import ParameterVector


def model_payloads(vector: ParameterVector) -> list[Payload]:
    """The trained parameters and, where there are any, the frozen ones."""
    dim = vector.dim
    payloads = [
        Payload(PayloadHeader(Role.MODEL, Encoding.DENSE, dim, dim, 4 * dim), (bytes_of(vector.numpy()),))
    ]
    frozen = vector.frozen_bytes()
    if frozen:
        size = len(frozen)
        header = PayloadHeader(Role.FROZEN, Encoding.DENSE, size, size, size, ValueType.BYTES)
        payloads.append(Payload(header, (memoryview(frozen),)))
    return payloads
