"""A codec of integers and their sum, as one would add them: nothing else knows the type of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from core_federation import Federation, Problem
from numpy.typing import NDArray
from torch import Tensor

from afl.core import compressors
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.codecs.codec import Codec
from afl.core.codecs.payload import CODECS, check_header, expected, pack, unpack
from afl.core.compressors.base import Compressed, Compressor, Realization
from afl.core.messages import Encoding, Payload, PayloadHeader, Role, ValueType
from afl.core.randomness import Purpose, SharedRandomness, Stream
from afl.core.sums import Sum
from afl.errors import ProtocolError

STEP = 2.0**-12
SHARE = 3


class Integers(Codec):
    """int32, where a value type has a number of its own; here it takes that of bytes."""

    value_type = ValueType.BYTES
    in_runs = True

    def pack(self, compressor: Compressor, compressed: Compressed, role: Role) -> Payload:
        values = compressed.values.astype("<i4", copy=False)
        return self._payload(role, compressor.dim, len(values), memoryview(values).cast("B"))

    def unpack(self, header: PayloadHeader, indices: memoryview, values: memoryview) -> Compressed:
        return Compressed(self.values(values))

    def values(self, data: bytes | memoryview) -> NDArray[np.int32]:
        if len(data) % 4:
            raise ProtocolError(f"{len(data)} bytes of integers")
        return np.frombuffer(data, dtype="<i4")

    def value_bytes(self, count: int) -> int:
        return 4 * count

    def sum_of(self, count: int, participants: Sequence[int]) -> Sum:
        return ModularSum(count)


class ModularSum(Sum):
    """Integers are added as they come, in whatever order."""

    def __init__(self, count: int) -> None:
        self.total = np.zeros(count, dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        self.total.fill(0)
        self._received: dict[int, int] = {}

    def add(self, worker: int, header: PayloadHeader, data: bytes | memoryview) -> None:
        start = self.received(worker) // 4
        values = np.frombuffer(data, dtype="<i4")
        self.total[start : start + len(values)] += values
        self._received[worker] = 4 * (start + len(values))

    def received(self, worker: int) -> int:
        return self._received.get(worker, 0)

    def leave_out(self, absent: Iterable[int]) -> None:
        pass

    def vector(self, realization: Realization, dim: int) -> Tensor:
        return realization.decode(Compressed(self.total))


class Grid(Compressor):
    """Every third coordinate, rounded to multiples of 2^-12."""

    name = "grid"
    encoding = Encoding.SEEDED
    value_type = ValueType.BYTES
    additive_idempotent = True

    @property
    def count(self) -> int:
        return -(-self.dim // SHARE)

    @property
    def delta(self) -> float:
        return 1 / SHARE

    def realize(self, stream: Stream, device: torch.device | str = "cpu") -> Realization:
        return _Grid(self.dim, stream.integer(self.dim))


class _Grid(Realization):
    def __init__(self, dim: int, start: int) -> None:
        self._dim = dim
        self._places = np.sort((start + SHARE * np.arange(-(-dim // SHARE))) % dim)

    def split(self, vector: Tensor) -> Compressed:
        compressed = Compressed(np.rint(vector.numpy()[self._places] / STEP).astype(np.int32))
        self.step(vector, compressed, 1.0)
        return compressed

    def decode(self, compressed: Compressed) -> Tensor:
        dense = np.zeros(self._dim, dtype=np.float32)
        dense[self._places] = compressed.values * STEP
        return torch.from_numpy(dense)


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Compressor:
    """With the codec in the table and the compressor found under its name."""
    codec = Integers(Encoding.SEEDED)
    monkeypatch.setitem(CODECS, (codec.encoding, codec.value_type), codec)
    right = compressors.compressor_class
    monkeypatch.setattr(
        compressors, "compressor_class", lambda name: Grid if name == Grid.name else right(name)
    )
    return Grid(31, {})


def test_it_goes_there_and_back_and_other_forms_are_refused(grid: Compressor) -> None:
    values = np.array([0, 1, -1, 2**31 - 1, -(2**31), *[7] * 6], dtype=np.int32)
    payload = pack(grid, Compressed(values))
    check_header(payload.header, expected(grid))
    assert unpack(payload.header, payload.data).values.tobytes() == values.tobytes()
    assert np.shares_memory(np.frombuffer(payload.data, dtype="<i4"), values)
    floats = pack(compressors.create("rand-k", 31, {"ratio": 11 / 31}), Compressed(values.astype(np.float32)))
    with pytest.raises(ProtocolError, match="value_type is FLOAT32; here it is BYTES"):
        check_header(floats.header, expected(grid))


def settings(**changes: Any) -> AlgorithmSettings:
    choice = CompressorChoice(Grid.name)
    return AlgorithmSettings(3, 12, 5, 0.02, 0.01, choice, choice, **changes)


def reference(problem: Problem) -> Mapping[str, NDArray[np.float32]]:
    w, q = problem.start.copy(), np.full(3, 1 / 3)
    e = np.zeros((3, problem.dim), np.float32)
    for t in range(1, 13):
        start = SharedRandomness.from_int(7).stream(Purpose.COMPRESSOR, t).integer(problem.dim)
        places = np.unique((start + SHARE * np.arange(11)) % problem.dim)
        total = np.zeros(11, np.int64)
        losses = np.array([problem.loss(i, t, w) for i in range(3)])
        for i in range(3):
            e[i] += np.float32(q[i]) * problem.gradient(i, t, w)
            integers = np.rint(e[i, places] / STEP).astype(np.int64)
            total += integers
            e[i, places] -= (integers * STEP).astype(np.float32)
        w[places] -= np.float32(0.02) * (total * STEP).astype(np.float32)
        q = np.full(3, 1 / 3) if t % 5 == 0 else q * np.exp(0.01 * (losses - losses.max()))
        q = q / q.sum()
    return {"w": w, "e": e}


@pytest.mark.parametrize("chaos", [None, 1, 2])
def test_a_run_of_integers_is_the_reference_in_any_order(grid: Compressor, chaos: int | None) -> None:
    rng = np.random.default_rng(0)
    problem = Problem(
        rng.uniform(0.1, 2.0, (3, 31)), rng.standard_normal((3, 31)), rng.standard_normal(31).astype("<f4")
    )
    right = reference(problem)
    federation = Federation(problem, settings(), evaluate_every=4, chaos=chaos)
    assert isinstance(federation.algorithm.sum, ModularSum)  # type: ignore[attr-defined]
    outcome = federation.run()
    assert all(evaluation.diverged == () for evaluation in outcome.evaluations)
    for model in (outcome.server, *outcome.models):
        assert model.tobytes() == right["w"].tobytes()
    assert outcome.uplink_residuals.tobytes() == right["e"].tobytes()
    assert not outcome.downlink_residual.any()
