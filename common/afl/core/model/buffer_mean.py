"""The mean of the workers' floating-point buffers, which the server takes before each evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from afl.core.algorithms.base import Arrays, SumCollector
from afl.core.algorithms.local_sgd import ModelMean, model_header, model_payload
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.codecs.plain import values_of
from afl.core.messages import Payload, PayloadHeader, Position, Role
from afl.core.model.buffers import ModuleBuffers
from afl.core.sums import Sum
from afl.errors import TaskError


def buffers_header(size: int) -> PayloadHeader:
    """The header of one worker's buffers, and of their mean: ``size`` values."""
    return model_header(size, Role.BUFFERS)


class BufferMean(SumCollector):
    """``b <- sum_i b_i / m`` in float32, ascending worker id; over the present where some are absent.
    :meth:`close` moves ``buffers``, the server's own copy."""

    def __init__(self, buffers: ModuleBuffers, workers: int) -> None:
        self._buffers = buffers
        self._workers = workers
        self._absent = 0
        self._mean = ModelMean(buffers.size, range(workers))

    @classmethod
    def of(cls, buffers: ModuleBuffers, settings: AlgorithmSettings) -> BufferMean | None:
        """The mean of a module's buffers; ``None`` if it has none to average.

        Raises:
            TaskError: if it has some, and they must not be told.
        """
        if not buffers.size:
            return None
        if settings.secure_aggregation:
            raise TaskError(
                "the task averages its model's buffers (buffers: mean), which each worker would send without "
                "a mask; with privacy.secure_aggregation take buffers: local, or a model without them "
                "(GroupNorm or LayerNorm in place of BatchNorm)"
            )
        return cls(buffers, settings.workers)

    def expected_payloads(self, position: Position) -> Sequence[PayloadHeader]:  # noqa: ARG002
        """One payload: the worker's buffers."""
        return (buffers_header(self._buffers.size),)

    @property
    def sums(self) -> Sequence[Sum]:
        """The mean of the buffers."""
        return (self._mean,)

    def reset(self) -> None:
        """Begin the sum again."""
        self._absent = 0
        self._mean.restart(range(self._workers))

    def leave_out(self, absent: Sequence[int]) -> None:
        """Leave absent workers out of the mean, and out of its denominator."""
        super().leave_out(absent)
        self._absent = len(absent)

    def close(self) -> Payload:
        """The mean, which the server's own copy takes too. Raises NonFiniteError if the sum leaves float32's
        range."""
        mean = self._mean.mean(float(self._workers - self._absent), "evaluation", "buffers")
        self.reset()
        self._buffers.load(mean)
        return model_payload(mean, Role.BUFFERS)

    def replay(self, losses: NDArray[np.float64], payload: Payload, unsent: Arrays) -> None:  # noqa: ARG002
        """Take the mean as it was sent."""
        self._buffers.load(values_of(payload.data))
