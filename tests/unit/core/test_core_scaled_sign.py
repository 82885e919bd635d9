"""Scaled sign: against the formula, on the wire, and what the server refuses of it."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from core_compressors import sign
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core.codecs.indices import Coding, max_size
from afl.core.codecs.payload import check_header, expected, pack, unpack
from afl.core.compressors import Compressed, Compressor, create
from afl.core.compressors.scaled_sign import scale_of
from afl.core.messages import Encoding, Payload, PayloadHeader, Role
from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import ConfigError, NonFiniteError, ProtocolError

Array = NDArray[np.float32]

STREAM = SharedRandomness.from_int(1).stream(Purpose.COMPRESSOR, 1)
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-149


def floats(*values: float) -> Array:
    return np.array(values, dtype=np.float32)


def bits(values: Array) -> list[int]:
    return values.view(np.uint32).tolist()


def message(vector: Array) -> tuple[Payload, Array, Array]:
    """The payload, C(x) as it is decoded from its bytes, and the residual."""
    compressor = create("scaled-sign", len(vector), {})
    realization = compressor.realize(STREAM)
    residual = torch.from_numpy(vector.copy())
    payload = pack(compressor, realization.split(residual))
    check_header(payload.header, expected(compressor))
    decoded = realization.decode(unpack(payload.header, b"".join(payload.sections)))
    return payload, decoded.numpy(), residual.numpy()


@st.composite
def vectors(draw: st.DrawFn, most: float = LARGEST) -> Array:
    values = st.just(0.0) | st.sampled_from([-0.0, SMALLEST, -SMALLEST]) | st.floats(-most, most, width=32)
    return np.array(draw(st.lists(values, min_size=1, max_size=70)), dtype=np.float32)


@given(vector=vectors())
@example(vector=np.zeros(9, np.float32))
@example(vector=floats(0, 0, 0, SMALLEST))
@example(vector=floats(LARGEST, -LARGEST, LARGEST))
@example(vector=floats(-0.0))
def test_what_is_decoded_is_the_formula_and_the_residual_is_the_rest_to_the_bit(vector: Array) -> None:
    _, decoded, residual = message(vector)
    right = sign(vector)
    assert (np.sign(decoded) == np.sign(vector)).all()
    if right.any():
        # The formula's sum is exact, ours is float64: the same but for the last bit of a scale.
        np.testing.assert_array_max_ulp(np.abs(decoded), np.abs(right), maxulp=1)
    assert bits(residual) == bits(vector - decoded)


@given(seed=st.integers(0, 2**32 - 1), dim=st.integers(1, 500), share=st.floats(0, 1))
@settings(deadline=None)
def test_zeros_survive_at_any_density(seed: int, dim: int, share: float) -> None:
    random = np.random.default_rng(seed)
    vector = (random.standard_normal(dim) * (random.uniform(size=dim) < share)).astype(np.float32)
    payload, decoded, _ = message(vector)
    assert bits(decoded) == bits(sign(vector))
    count = np.count_nonzero(vector)
    assert (payload.header.count, payload.header.value_bytes) == (count, 4 + -(-count // 8))
    assert payload.header.index_bytes <= max_size(min(count, dim - count), dim)
    assert (payload.header.index_bytes == 0) == (count in {0, dim})


def test_a_message_by_hand() -> None:
    payload, decoded, residual = message(floats(3, -1, 0, -4, 2, 5, -1, -1, 8, -2, 1, 2))
    # The scale is 30/12; the signs of the eleven that are not zero, lowest bit first; the zero is at 2.
    assert b"".join(payload.sections)[payload.header.index_bytes :] == struct.pack(
        "<f2B", 2.5, 0b01100110, 0b001
    )
    assert payload.header == PayloadHeader(
        Role.UPDATE, Encoding.SIGNS, 12, 11, 6, index_coding=Coding.PACKED, index_bytes=1
    )
    assert decoded.tolist() == [2.5, -2.5, 0, -2.5, 2.5, 2.5, -2.5, -2.5, 2.5, -2.5, 2.5, 2.5]
    assert residual.tolist() == [0.5, 1.5, 0, -1.5, -0.5, 2.5, 1.5, 1.5, 5.5, 0.5, -1.5, -0.5]


def test_zeros_cost_almost_nothing() -> None:
    vector = np.ones(100_000, np.float32)
    assert message(vector)[0].header.total_bytes == 4 + 12_500
    vector[::10] = 0
    assert message(vector)[0].header.total_bytes == 4 + 11_250 + 6_250  # 5 bits a zero
    vector[:] = 0
    vector[[5, 70_000]] = 1, -1
    assert message(vector)[0].header.total_bytes <= 4 + 1 + 5
    assert message(np.zeros(100_000, np.float32))[0].header.total_bytes == 4


@given(vector=vectors(2.0**60))
@settings(deadline=None)
def test_it_loses_what_the_paper_says_pathwise(vector: Array) -> None:
    _, decoded, _ = message(vector)
    x, lost = vector.astype(np.float64), ((vector - decoded.astype(np.float64)) ** 2).sum()
    norm, one_norm = (x * x).sum(), np.abs(x).sum()
    assert lost <= norm * (1 - one_norm**2 / (len(x) * norm) + 1e-6) if norm else lost == 0
    assert lost <= (1 - 1 / len(x)) * norm + 1e-6 * norm


def test_without_zeros_it_loses_exactly_that() -> None:
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    _, decoded, _ = message(x)
    wide = x.astype(np.float64)
    norm, one_norm = (wide * wide).sum(), np.abs(wide).sum()
    lost = ((wide - decoded) ** 2).sum() / norm
    assert lost == pytest.approx(1 - one_norm**2 / (len(x) * norm), rel=1e-6)
    assert lost == pytest.approx(1 - 2 / math.pi, abs=0.03)  # normal numbers


def test_one_coordinate_attains_delta() -> None:
    compressor = create("scaled-sign", 64, {})
    assert compressor.delta == 1 / 64
    vector = np.zeros(64, np.float32)
    vector[17] = -8.0
    _, decoded, _ = message(vector)
    # C(x) = -8/64 at one place: the loss is (1 - 1/d)^2 of the norm there.
    assert ((vector - decoded) ** 2).sum() == (8 * (1 - 1 / 64)) ** 2


# The scale.


@given(seed=st.integers(0, 2**32 - 1), dim=st.sampled_from([1, 2, 3, 1000, 32767, 32768, 32769, 100_001]))
@settings(deadline=None, max_examples=30)
def test_the_scale_is_the_mean_magnitude_summed_in_the_documented_order(seed: int, dim: int) -> None:
    vector = np.random.default_rng(seed).standard_cauchy(dim).astype(np.float32)
    width = min(dim, 1 << 15)
    padded = np.zeros(-(-dim // width) * width)
    padded[:dim] = np.abs(vector)
    sums = np.zeros(width)
    for row in padded.reshape(-1, width):
        sums = sums + row
    while len(sums) > 1:
        half = (len(sums) + 1) // 2
        sums = sums[:half] + np.append(sums[half:], np.zeros(2 * half - len(sums)))
    assert scale_of(vector) == np.float32(sums[0] / dim)
    exact = np.float32(math.fsum(map(abs, vector.tolist())) / dim)
    np.testing.assert_array_max_ulp(scale_of(vector), exact, maxulp=1)


@pytest.mark.parametrize(
    ("vector", "scale"),
    [
        (np.full(100_000, LARGEST, np.float32), LARGEST),
        (np.full(3, -SMALLEST, np.float32), SMALLEST),
        (np.append(np.zeros(999, np.float32), np.float32(SMALLEST)), SMALLEST),  # the mean rounds to zero
        (np.zeros(5, np.float32), 0.0),
        (floats(-0.0), 0.0),
        (floats(2.0**-140, 0, 0, 0), 2.0**-142),
    ],
)
def test_the_scale_neither_overflows_nor_vanishes(vector: Array, scale: float) -> None:
    assert scale_of(vector) == np.float32(scale)
    _, decoded, residual = message(vector)
    assert np.isfinite(residual).all()
    norm, lost = (np.linalg.norm(v.astype(np.float64)) for v in (vector, residual))
    assert lost < norm or norm == 0
    assert set(np.abs(decoded[vector != 0]).tolist()) <= {float(np.float32(scale))}


def test_it_takes_no_option() -> None:
    with pytest.raises(ConfigError) as caught:
        create("scaled-sign", 10, {"ratio": 0.5})
    assert str(caught.value) == "scaled-sign: unknown option 'ratio'; it takes none"


# What is refused.

COMPRESSOR: Compressor = create("scaled-sign", 20, {})
HEADER = PayloadHeader(
    Role.UPDATE, Encoding.SIGNS, 20, 18, 7, index_coding=Coding.PACKED, index_parameter=0, index_bytes=2
)
# Zeros at 3 and 7: two indices of five bits, a bit of the fifth plane-less stream after the other.
BYTES = struct.pack("<H", 3 | 7 << 5) + struct.pack("<f3B", 1.5, 0xFF, 0x00, 0x01)


def test_the_message_that_the_refused_ones_differ_from_is_right() -> None:
    check_header(HEADER, expected(COMPRESSOR))
    found = unpack(HEADER, BYTES)
    assert found.indices is not None
    assert found.signs is not None
    assert (found.values.tolist(), found.indices.tolist()) == ([1.5], [3, 7])
    assert found.signs.tolist() == [0xFF, 0, 1]
    again = pack(COMPRESSOR, found)
    assert again.header.total_bytes <= HEADER.total_bytes


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"count": 21, "value_bytes": 7}, "a payload whose count is 21; here it is 0 to 20"),
        ({"count": 2**63}, f"a payload whose count is {2**63}; here it is 0 to 20"),
        ({"value_bytes": 8}, "a payload whose value_bytes is 8; here it is 7"),
        ({"count": 16}, "a payload whose value_bytes is 7; here it is 6"),
        ({"value_bytes": 2**40}, f"a payload whose value_bytes is {2**40}; here it is 7"),
        ({"index_bytes": 3}, "a payload that claims 3 bytes of indices; 2 are the most for 18 of 20"),
        ({"count": 20, "index_bytes": 1}, "a payload that claims 1 bytes of indices; 0 are the most"),
        ({"count": 0, "value_bytes": 4}, "a payload that claims 2 bytes of indices; 0 are the most"),
        ({"dim": 1 << 40}, f"a payload whose dim is {1 << 40}; here it is 20"),
        ({"encoding": Encoding.SEEDED}, "a payload whose encoding is SEEDED; here it is SIGNS"),
        ({"role": Role.MODEL}, "a payload whose role is MODEL; here it is UPDATE"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_header(dataclasses.replace(HEADER, **changes), expected(COMPRESSOR))
    assert str(caught.value).startswith(what)


def test_signs_are_refused_where_values_are_due() -> None:
    with pytest.raises(ProtocolError, match="whose encoding is SIGNS; here it is DENSE"):
        check_header(HEADER, expected(create("identity", 20, {})))


@pytest.mark.parametrize(
    ("header", "data", "what"),
    [
        ({}, BYTES[:2] + struct.pack("<f", -1.5) + BYTES[6:], "a scale of -1.5 for 18 signs; it is positive"),
        ({}, BYTES[:2] + bytes(4) + BYTES[6:], "a scale of 0.0 for 18 signs; it is positive"),
        ({}, BYTES[:-1] + b"\x05", "18 signs with bits set behind the last"),
        ({}, BYTES[:-1] + b"\x81", "18 signs with bits set behind the last"),
        ({}, struct.pack("<H", 7 | 3 << 5) + BYTES[2:], "expected strictly ascending"),
        ({}, struct.pack("<H", 3 | 20 << 5) + BYTES[2:], "20, expected all below 20"),
        ({}, BYTES[:-1], "a payload of 8 bytes; its header says 9"),
        ({"index_coding": 9}, BYTES, "coding 9 is unknown"),
        ({"index_coding": 0}, BYTES, "coding 0 is unknown"),
        ({"index_coding": Coding.RICE, "index_parameter": 60}, BYTES, "parameter is 60"),
        ({"count": 20, "index_bytes": 0, "index_coding": 7}, BYTES[2:], "coding 7 is unknown"),
        (
            {"count": 0, "value_bytes": 4, "index_bytes": 0, "index_coding": 0},
            struct.pack("<f", 1.0),
            "a scale of 1.0 for 0 signs; it is zero where every coordinate is",
        ),
        (
            {"count": 0, "value_bytes": 4, "index_bytes": 0, "index_coding": 0},
            struct.pack("<f", -0.0),
            "a scale of -0.0 for 0 signs",
        ),
    ],
)
def test_bytes_that_do_not_fit_are_refused(header: dict[str, Any], data: bytes, what: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(dataclasses.replace(HEADER, **header), data)
    assert what in str(caught.value)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    with pytest.raises(NonFiniteError):
        unpack(HEADER, BYTES[:2] + struct.pack("<f", scale) + BYTES[6:])


@given(
    data=st.binary(min_size=4, max_size=30),
    dim=st.integers(1, 40),
    count=st.integers(0, 40),
    coding=st.integers(0, 4),
    parameter=st.integers(0, 8),
)
def test_garbage_is_refused_or_is_a_message(
    data: bytes, dim: int, count: int, coding: int, parameter: int
) -> None:
    compressor = create("scaled-sign", dim, {})
    value_bytes = 4 + -(-count // 8)
    header = PayloadHeader(
        Role.UPDATE,
        Encoding.SIGNS,
        dim,
        count,
        value_bytes,
        index_coding=coding,
        index_parameter=parameter,
        index_bytes=max(0, len(data) - value_bytes),
    )
    try:
        check_header(header, expected(compressor))
        found: Compressed = unpack(header, data)
    except (ProtocolError, NonFiniteError):
        return
    decoded = compressor.realize(STREAM).decode(found).numpy()
    assert np.count_nonzero(decoded) == count
    assert set(np.abs(decoded).tolist()) <= {0.0, float(found.values[0])}
    again = pack(compressor, found)
    assert again.header.count == count
    twice = unpack(again.header, b"".join(again.sections))
    assert bits(compressor.realize(STREAM).decode(twice).numpy()) == bits(decoded)
