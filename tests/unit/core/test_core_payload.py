"""Payloads: bytes laid down by hand, round trips, and headers that do not fit."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afl.core.codecs.indices import Coding
from afl.core.codecs.payload import check_header, expected, pack, unpack
from afl.core.codecs.plain import bytes_of, values_of
from afl.core.compressors import Compressed, create
from afl.core.messages import Encoding, Payload, PayloadHeader, Role, ValueType
from afl.errors import NonFiniteError, ProtocolError


def whole(payload: Payload) -> bytes:
    return b"".join(payload.sections)


def floats(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def test_dense_values_are_little_endian_float32() -> None:
    payload = pack(create("identity", 3, {}), Compressed(floats(1.0, -2.0, 0.5)))
    assert payload.header == PayloadHeader(Role.UPDATE, Encoding.DENSE, 3, 3, 12)
    assert whole(payload) == bytes.fromhex("0000803f 000000c0 0000003f")
    assert payload.header.total_bytes == 12


def test_seeded_values_travel_alone() -> None:
    compressor = create("rand-k", 10, {"ratio": 0.2})
    payload = pack(compressor, Compressed(floats(1.0, -2.0)), Role.MODEL)
    assert payload.header == PayloadHeader(Role.MODEL, Encoding.SEEDED, 10, 2, 8)
    assert whole(payload) == struct.pack("<2f", 1.0, -2.0)


def test_indexed_values_follow_their_indices() -> None:
    compressor = create("top-k", 16, {"ratio": 0.25})
    payload = pack(compressor, Compressed(floats(1, 2, 3, 4), np.array([0, 3, 8, 15])))
    # A bitmap of 16 bits is two bytes: bits 0 and 3, then bits 8 and 15.
    assert payload.header == PayloadHeader(
        Role.UPDATE, Encoding.INDEXED, 16, 4, 16, index_coding=Coding.BITMAP, index_bytes=2
    )
    assert whole(payload) == bytes([0b00001001, 0b10000001]) + struct.pack("<4f", 1, 2, 3, 4)
    assert payload.header.total_bytes == 18


def test_packing_copies_no_values() -> None:
    values = floats(*range(100))
    payload = pack(create("identity", 100, {}), Compressed(values))
    values[7] = 99.0
    assert struct.unpack_from("<f", payload.sections[0], 28) == (99.0,)


def test_unpacking_copies_no_values() -> None:
    data = bytearray(struct.pack("<3f", 1, 2, 3))
    unpacked = unpack(PayloadHeader(Role.UPDATE, Encoding.DENSE, 3, 3, 12), data)
    data[4:8] = struct.pack("<f", 9)
    assert unpacked.values.tolist() == [1, 9, 3]
    assert unpacked.indices is None


@given(
    name=st.sampled_from(["identity", "rand-k", "top-k"]),
    dim=st.integers(1, 400),
    ratio=st.floats(0.01, 1),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_what_is_packed_is_unpacked_to_the_bit(name: str, dim: int, ratio: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    compressor = create(name, dim, {} if name == "identity" else {"ratio": ratio})
    values = (random.standard_normal(compressor.count) * 1e-30).astype(np.float32)
    indices = np.sort(random.choice(dim, compressor.count, replace=False)) if name == "top-k" else None
    payload = pack(compressor, Compressed(values, indices))
    data = whole(payload)
    assert len(data) == payload.header.total_bytes
    check_header(payload.header, expected(compressor))
    for form in (data, bytearray(data), memoryview(data)):
        found = unpack(payload.header, form)
        assert found.values.tobytes() == values.tobytes()
        assert (found.indices is None) == (indices is None)
        assert indices is None or np.array_equal(found.indices, indices)


@pytest.mark.parametrize("missing", [-1, 1, 4, 12])
def test_another_length_than_the_header_s_is_refused(missing: int) -> None:
    header = PayloadHeader(Role.UPDATE, Encoding.DENSE, 3, 3, 12)
    with pytest.raises(ProtocolError) as caught:
        unpack(header, bytes(12 - missing))
    assert str(caught.value) == f"a payload of {12 - missing} bytes; its header says 12"


@given(
    data=st.binary(max_size=80),
    coding=st.integers(0, 5),
    parameter=st.integers(0, 70),
    dim=st.integers(0, 200),
)
def test_garbage_indices_are_refused_or_read_as_indices(
    data: bytes, coding: int, parameter: int, dim: int
) -> None:
    header = PayloadHeader(
        Role.UPDATE,
        Encoding.INDEXED,
        dim,
        3,
        12,
        index_coding=coding,
        index_parameter=parameter,
        index_bytes=len(data),
    )
    try:
        found = unpack(header, data + struct.pack("<3f", 1, 2, 3))
    except ProtocolError:
        return
    assert found.indices is not None
    first, second, third = found.indices.tolist()
    assert 0 <= first < second < third < dim


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 4])
def test_a_value_that_is_not_finite_is_named_with_its_place(value: float, place: int) -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    values[place] = value
    with pytest.raises(NonFiniteError) as caught:
        values_of(struct.pack("<5f", *values))
    assert str(caught.value) == f"the value {value} is not finite (value {place} of 5 received)"


def test_infinities_that_cancel_are_found() -> None:
    with pytest.raises(NonFiniteError):
        values_of(struct.pack("<2f", math.inf, -math.inf))


def test_finite_values_whose_sum_overflows_pass() -> None:
    data = struct.pack("<4f", 3e38, 3e38, -3e38, -3e38)
    assert values_of(data).tobytes() == data


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4095])
def test_part_of_a_value_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"{length} bytes of float32 values; the length must be"):
        values_of(bytes(length))


def test_bytes_of_is_a_view_of_raw_bytes() -> None:
    values = floats(1.0, 2.0)
    view = bytes_of(values)
    assert (view.format, view.nbytes) == ("B", 8)
    assert bytes(view) == struct.pack("<2f", 1, 2)
    assert len(bytes_of(values[:0])) == 0


HEADER = PayloadHeader(Role.UPDATE, Encoding.INDEXED, 100, 10, 40, index_bytes=13)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"role": Role.FROZEN}, "a payload whose role is FROZEN; here it is UPDATE"),
        ({"encoding": Encoding.SEEDED}, "a payload whose encoding is SEEDED; here it is INDEXED"),
        ({"value_type": ValueType.BYTES}, "a payload whose value_type is BYTES; here it is FLOAT32"),
        ({"dim": 1 << 40}, f"a payload whose dim is {1 << 40}; here it is 100"),
        ({"count": 0}, "a payload whose count is 0; here it is 10"),
        ({"value_bytes": 2**63}, f"a payload whose value_bytes is {2**63}; here it is 40"),
        (
            {"index_bytes": 14},
            "a payload that claims 14 bytes of indices; 13 are the most for 10 of 100",
        ),
    ],
)
def test_a_header_is_refused_by_field_value_and_what_is_right(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        check_header(dataclasses.replace(HEADER, **changes), HEADER)
    assert str(caught.value) == message


@pytest.mark.parametrize("index_bytes", [0, 5, 13])
def test_any_length_of_indices_up_to_the_most_is_accepted(index_bytes: int) -> None:
    check_header(dataclasses.replace(HEADER, index_bytes=index_bytes), HEADER)


@pytest.mark.parametrize(
    ("name", "options", "right"),
    [
        ("identity", {}, PayloadHeader(Role.UPDATE, Encoding.DENSE, 1000, 1000, 4000)),
        ("rand-k", {"ratio": 0.1}, PayloadHeader(Role.UPDATE, Encoding.SEEDED, 1000, 100, 400)),
        # 10 of 1000 at 10 bits each are 13 bytes; 500 are cheaper as a bitmap of 125 bytes.
        (
            "top-k",
            {"ratio": 0.01},
            PayloadHeader(Role.UPDATE, Encoding.INDEXED, 1000, 10, 40, index_bytes=13),
        ),
        (
            "top-k",
            {"ratio": 0.5},
            PayloadHeader(Role.UPDATE, Encoding.INDEXED, 1000, 500, 2000, index_bytes=125),
        ),
        # A scale and a bit a coordinate; at most half of the coordinates are listed, as a bitmap.
        (
            "scaled-sign",
            {},
            PayloadHeader(Role.UPDATE, Encoding.SIGNS, 1000, 1000, 129, index_bytes=125),
        ),
        ("projection", {"ratio": 0.1}, PayloadHeader(Role.UPDATE, Encoding.SEEDED, 1000, 100, 400)),
        ("dct-projection", {"ratio": 0.1}, PayloadHeader(Role.UPDATE, Encoding.SEEDED, 1000, 100, 400)),
    ],
)
def test_the_expected_header_by_hand(name: str, options: dict[str, float], right: PayloadHeader) -> None:
    assert expected(create(name, 1000, options)) == right
