"""A whole model as payloads: for workers that have none, or another."""

from __future__ import annotations

from torch import Tensor

from afl.core.algorithms.local_sgd import model_payload
from afl.core.messages import Encoding, Payload, PayloadHeader, Role, ValueType
from afl.core.model.parameters import ParameterVector


def model_payloads(vector: ParameterVector, params: Tensor) -> list[Payload]:
    """The trained parameters, as ``params`` has them, and, where there are any, the frozen ones and the mean
    of the workers' buffers."""
    payloads = [model_payload(params.numpy(), Role.MODEL)]
    frozen = vector.frozen_bytes()
    if frozen:
        size = len(frozen)
        header = PayloadHeader(Role.FROZEN, Encoding.DENSE, size, size, size, ValueType.BYTES)
        payloads.append(Payload(header, (memoryview(frozen),)))
    if vector.buffers.size:
        payloads.append(model_payload(vector.buffers.values(), Role.BUFFERS))
    return payloads
