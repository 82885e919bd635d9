"""Integers on the wire: round trips, lengths near the entropy, and what is refused before memory is taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core.codecs.integers import MOST_SYMBOLS, Form, integer_type, integers_of
from afl.core.codecs.payload import check_header, expected, pack, unpack
from afl.core.compressors import Compressed, Compressor, create
from afl.core.messages import BIT_WIDTHS, Payload
from afl.errors import ConfigError, ProtocolError


def compressor_of(count: int, bits: int) -> Compressor:
    """One whose messages are ``count`` integers, the last of which is a group's."""
    compressor = create("identity", max(1, count - 1), {"bits": bits if bits <= BIT_WIDTHS[-1] else 24})
    compressor.bits, compressor.groups = bits, count - compressor.count
    return compressor


def packed(integers: NDArray[Any], bits: int) -> Payload:
    payload = pack(compressor_of(len(integers), bits), Compressed(integers))
    check_header(payload.header, expected(compressor_of(len(integers), bits)))
    assert payload.header.total_bytes == len(payload.data)
    return payload


@st.composite
def messages(draw: st.DrawFn) -> tuple[NDArray[Any], int]:
    bits = draw(st.integers(2, 40))
    limit = 2 ** (bits - 1) - 1
    count = draw(st.integers(1, 300))
    spread = draw(st.one_of(st.integers(0, limit), st.integers(0, min(limit, 5))))
    centre = draw(st.integers(-limit + spread, limit - spread))
    seed = draw(st.integers(0, 2**32))
    values = np.random.default_rng(seed).integers(centre - spread, centre + spread, count, endpoint=True)
    return values.astype(integer_type(bits)), bits


@given(messages())
def test_there_and_back(message: tuple[NDArray[Any], int]) -> None:
    integers, bits = message
    payload = packed(integers, bits)
    found = unpack(payload.header, payload.data).values
    assert found.dtype == integer_type(bits)
    assert found.tobytes() == integers.tobytes()
    assert len(payload.data) <= 1 + (len(integers) * bits + 7) // 8


@pytest.mark.parametrize("smallest", [2**31 - 2, 2**31, 2**32, -(2**31) - 3, -(2**32)])
def test_few_different_sums_beyond_32_bits(smallest: int) -> None:
    integers = smallest + np.arange(100) % 5
    payload = packed(integers, 34)
    assert payload.data[0] == Form.ENTROPY
    found = unpack(payload.header, payload.data).values
    assert (found.dtype, found.tolist()) == (np.int64, integers.tolist())


def test_sums_beyond_32_bits() -> None:
    integers = np.array([-(2**34), 2**34, 5], dtype=np.int64)
    payload = packed(integers, 36)
    found = unpack(payload.header, payload.data).values
    assert (found.dtype, found.tolist()) == (np.int64, integers.tolist())


def test_the_fixed_width_by_hand() -> None:
    # 8 is added; four bits a value, the first in the lowest.
    assert bytes(packed(np.array([-7, 7, 0], np.int32), 4).data) == bytes([0, 0xF1, 0x08])


def test_the_histogram_by_hand() -> None:
    integers = np.zeros(1000, dtype=np.int32)
    # The form, 0 in zigzag, one integer, a thousand times: nothing else is left to say.
    assert bytes(packed(integers, 4).data) == bytes([1, 0, 1, 0xE8, 0x07])
    integers[3] = -2
    data = bytes(packed(integers, 4).data)
    # -2 in zigzag, three integers, once, never, and 999 times; then words.
    assert data[:7] == bytes([1, 3, 3, 1, 0, 0xE7, 0x07])
    assert len(data) == 7 + 2 * 4


@pytest.mark.parametrize("count", [10**4, 10**6])
@pytest.mark.parametrize(("bits", "scale"), [(4, 0.3), (4, 1.0), (8, 3.0), (8, 30.0), (3, 0.4)])
def test_the_length_is_within_a_fiftieth_of_the_entropy(count: int, bits: int, scale: float) -> None:
    limit = 2 ** (bits - 1) - 1
    integers = np.rint(np.random.default_rng(3).laplace(0, scale, count)).clip(-limit, limit).astype(np.int32)
    occurring = np.unique(integers, return_counts=True)[1]
    entropy = float((occurring * np.log2(count / occurring)).sum()) / 8
    data = packed(integers, bits).data
    assert data[0] == Form.ENTROPY
    header = 1 + 3 * (int(integers.max()) - int(integers.min()) + 3)
    assert entropy <= len(data) <= 1.02 * entropy + header


def altered(payload: Payload, data: bytes) -> Payload:
    header = dataclasses.replace(payload.header, value_bytes=len(data))
    return Payload(header, (memoryview(data),))


ENTROPY = packed(np.repeat(np.arange(-3, 4, dtype=np.int32), np.arange(1, 120, 17)), 8)
FIXED = packed(np.arange(-7, 8, dtype=np.int32), 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x02" + bytes(FIXED.data[1:]), r"unknown form 2; \[0, 1\] are known"),
        (bytes(FIXED.data[:-1]), r"7 bytes of integers; 15 of 4 bits take 8"),
        (b"\x00" * 9, r"an integer of -8; in 4 bits they are from -7 to 7"),
        (b"\x01", r"a histogram that ends within a number"),
        (b"\x01\x00\x80", r"a histogram that ends within a number"),
        (b"\x01\x00" + b"\xff" * 30, r"a histogram that ends within a number, or has one beyond 63 bits"),
        (b"\x01\x00\x00", r"a histogram of 0 integers; it has 1 to 4096"),
        (b"\x01\x00\xff\xff\xff\x7f", r"a histogram of \d+ integers; it has 1 to 4096"),
        (
            b"\x01\x00\x01\x0e",
            r"a histogram of 14 integers, 14 and 14 of them at its ends; the payload has 15",
        ),
        (b"\x01\x00\x02\x0f\x00", r"15 and 0 of them at its ends"),
        (b"\x01\x00\x02" + b"\xff" * 8 + b"\x7f" + b"\xff" * 8 + b"\x7f", r"the payload has 15"),
        (b"\x01\x0e\x02\x08\x07", r"a histogram from 7 to 8, beyond 4 bits"),
        (b"\x01\x0f\x02\x08\x07", r"a histogram from -8 to -7, beyond 4 bits"),
        (b"\x01\x00\x01\x0f\x01", r"1 bytes behind a payload of one integer alone"),
        (b"\x01\x00\x02\x08\x07\x01", r"1 bytes of coded integers; they come in words of 4"),
        (b"\x01\x00\x02\x08\x07" + b"\x00" * 4, r"coded integers whose last word is zero"),
        (b"\x01\x00\x02\x08\x07" + b"\x09" * 8, r"coded integers that are not those of their histogram"),
    ],
)
def test_what_is_no_payload_of_so_many_is_refused(data: bytes, message: str) -> None:
    found = altered(FIXED, data)
    with pytest.raises(ProtocolError, match=message):
        unpack(found.header, found.data)


def test_a_histogram_that_lies_is_refused() -> None:
    data = bytearray(ENTROPY.data)
    # The form, the smallest integer, how many, then their counts: one more here, one less there.
    assert 0 < data[3] < data[4] < 0x7F
    data[3] += 1
    data[4] -= 1
    found = altered(ENTROPY, bytes(data))
    with pytest.raises(ProtocolError, match="not those of their histogram"):
        unpack(found.header, found.data)


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_a_length_beyond_the_fixed_width_is_refused_by_its_header(count: int) -> None:
    right = expected(compressor_of(count, 4))
    for value_bytes in (right.value_bytes + 1, 2**62, 1, 0):
        if value_bytes == right.value_bytes:
            continue
        with pytest.raises(ProtocolError, match=f"value_bytes is {value_bytes}; here it is"):
            check_header(dataclasses.replace(right, value_bytes=value_bytes), right)
    for other in ({"bits": 5}, {"count": count + 1}, {"dim": right.dim + 1}):
        with pytest.raises(ProtocolError, match=f"{next(iter(other))} is"):
            check_header(dataclasses.replace(right, **other), right)


def test_a_wide_spread_is_not_coded_by_a_histogram() -> None:
    integers = np.zeros(100_000, dtype=np.int32)
    integers[0] = MOST_SYMBOLS
    assert packed(integers, 14).data[0] == Form.FIXED
    integers[0] = MOST_SYMBOLS - 1
    assert packed(integers, 14).data[0] == Form.ENTROPY


def test_nothing_is_taken_for_a_count_before_the_histogram_is_right() -> None:
    # Forty bytes that claim 2^40 integers: the header check refuses the count; without it, the histogram.
    with pytest.raises(ProtocolError, match="the payload has 1099511627776"):
        integers_of(memoryview(b"\x01\x00\x02\x05\x05" + b"\x07" * 36), 2**40, 4)


@pytest.mark.parametrize(("name", "options"), [("top-k", {"ratio": 0.1}), ("scaled-sign", {})])
def test_only_compressors_whose_messages_add_up_take_bits(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="it takes no `bits`, since a sum of its messages is no message of its own"
    ):
        create(name, 100, {**options, "bits": 4})


@pytest.mark.parametrize("bits", [1, 25, 4.0, "4", True, None])
def test_bits_are_a_whole_number(bits: object) -> None:
    with pytest.raises(ConfigError, match=r"rand-k: bits is .*; it must be a whole number from 2 to 24"):
        create("rand-k", 100, {"ratio": 0.1, "bits": bits})
