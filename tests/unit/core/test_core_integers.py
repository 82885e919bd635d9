"""Integers on the wire: round trips, lengths near the entropy, and what is refused before memory is taken."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable
from itertools import product
from typing import Any

import constriction
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core.codecs.integers import (
    MOST_SYMBOLS,
    Form,
    _tuple_size,
    integers_of,
    probe,
)
from afl.core.codecs.payload import check_header, expected, pack, unpack
from afl.core.compressors import Compressed, Compressor, create
from afl.core.grid import integer_type
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
    assert payload.data[0] != Form.FIXED
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
    # The form, 0, one integer, 0x3E8 times: nothing else is left to say.
    assert bytes(packed(integers, 4).data) == bytes([1, 0, 1, 0, 0xE8, 0x03])
    integers[3] = -2
    data = bytes(packed(integers, 4).data)
    # -2, three integers, once, never, and 999 times; then a word.
    assert data[:10] == bytes([1, 0xFE, 3, 0, 1, 0, 0, 0, 0xE7, 0x03])
    assert len(data) == 10 + 4
    # Beyond 8 bits the smallest integer takes two bytes; of up to 255 integers, a count takes one.
    integers = np.zeros(200, dtype=np.int32)
    assert bytes(packed(integers - 2, 9).data) == bytes([1, 0xFE, 0xFF, 1, 0, 200])


@pytest.mark.parametrize("count", [996, 997, 998, 999])
@pytest.mark.parametrize(("width", "size"), [(2, 4), (4, 4), (5, 2), (16, 2), (17, 1)])
def test_tuples_of_integers_are_coded_as_one(width: int, size: int, count: int) -> None:
    integers = np.full(count, -3)
    integers[: width - 1] += np.arange(1, width)
    # Independent of how they are made: probabilities by product, the most likely tuple first.
    tuples = [tuple(integers[start : start + size].tolist()) for start in range(0, count, size)]
    tuples[-1] += (int(integers[-1]),) * (size - len(tuples[-1]))
    share = {value: float(np.mean(integers == value)) for value in range(-3, width - 3)}
    chances = {each: _product(share[value] for value in each) for each in product(share, repeat=size)}
    ranked = sorted(chances, key=lambda each: -chances[each])
    coder = constriction.stream.stack.AnsCoder()
    model = constriction.stream.model.Categorical(np.array([chances[each] for each in ranked]), perfect=False)
    coder.encode_reverse(np.array([ranked.index(each) for each in tuples], dtype=np.int32), model)
    words = coder.get_compressed().tobytes()
    histogram = np.bincount(integers + 3).astype("<u2").tobytes()
    assert bytes(packed(integers, 8).data) == bytes([Form.ANS, 0xFD, width, 0]) + histogram + words


@pytest.mark.parametrize("count", [996, 997, 998, 999])
@pytest.mark.parametrize(("width", "size"), [(3, 4), (5, 2), (16, 2), (17, 1), (255, 1)])
def test_huffman_codes_of_tuples_by_hand(width: int, size: int, count: int) -> None:
    integers = np.arange(count) * 7 % width - width // 2
    data = bytes(packed(integers, 9).data)
    smallest = (-(width // 2)).to_bytes(2, "little", signed=True)
    assert data[:5] == bytes([Form.HUFFMAN]) + smallest + bytes([width, 0])
    numbers = zlib.decompress(data[5:], -zlib.MAX_WBITS)
    filled = np.append(integers, [integers[-1]] * (-count % size)).reshape(-1, size) + width // 2
    assert list(numbers) == (filled @ (width ** np.arange(size)[::-1])).tolist()


def _product(factors: Iterable[float]) -> float:
    """As the coder's model has it: of each half first."""
    products = list(factors)
    while len(products) > 1:
        products = [first * second for first, second in zip(products[::2], products[1::2], strict=True)]
    return products[0]


@pytest.mark.parametrize("count", [10**4, 10**6])
@pytest.mark.parametrize(("bits", "scale"), [(4, 0.3), (4, 1.0), (8, 3.0), (8, 30.0), (3, 0.4)])
def test_the_length_is_within_a_fiftieth_of_the_entropy(count: int, bits: int, scale: float) -> None:
    limit = 2 ** (bits - 1) - 1
    integers = np.rint(np.random.default_rng(3).laplace(0, scale, count)).clip(-limit, limit).astype(np.int32)
    occurring = np.unique(integers, return_counts=True)[1]
    entropy = float((occurring * np.log2(count / occurring)).sum()) / 8
    data = packed(integers, bits).data
    assert data[0] in {Form.ANS, Form.HUFFMAN}
    header = 1 + 3 * (int(integers.max()) - int(integers.min()) + 3)
    assert entropy <= len(data) <= 1.02 * entropy + header


def altered(payload: Payload, data: bytes) -> Payload:
    header = dataclasses.replace(payload.header, value_bytes=len(data))
    return Payload(header, (memoryview(data),))


ANS = packed(np.repeat(np.arange(-3, 4, dtype=np.int32), [1, 18, 35, 5000, 69, 86, 103]), 8)
HUFFMAN = packed(np.repeat(np.arange(-3, 4, dtype=np.int32), 100), 8)
FIXED = packed(np.arange(-7, 8, dtype=np.int32), 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x03" + bytes(FIXED.data[1:]), r"unknown form 3; \[0, 1, 2\] are known"),
        (bytes(FIXED.data[:-1]), r"7 bytes of integers; 15 of 4 bits take 8"),
        (b"\x00" * 9, r"an integer of -8; in 4 bits they are from -7 to 7"),
        (b"\x01", r"integers that end before they say which may occur"),
        (b"\x01\x00\x01", r"integers that end before they say which may occur"),
        (b"\x01\x00\x03\x00\x05\x05", r"a histogram of 3 integers that ends within its counts"),
        (b"\x01\x00\x00\x00", r"a spread of 0 integers; in the form ANS it has 1 to 4096"),
        (
            b"\x01\x00\xff\x7f" + b"\x01" * 0x7FFF,
            r"a spread of 32767 integers; in the form ANS it has 1 to 4096",
        ),
        (
            b"\x01\x00\x01\x00\x0e",
            r"a histogram of 14 integers, 14 and 14 of them at its ends; the payload has 15",
        ),
        (b"\x01\x00\x02\x00\x0f\x00", r"15 and 0 of them at its ends"),
        (b"\x01\x00\x07\x00" + b"\xf1" * 7, r"the payload has 15"),
        (b"\x01\x07\x02\x00\x08\x07", r"integers from 7 to 8, beyond 4 bits"),
        (b"\x01\xf8\x02\x00\x08\x07", r"integers from -8 to -7, beyond 4 bits"),
        (b"\x01\x00\x01\x00\x0f\x01", r"1 bytes behind a payload of one integer alone"),
        (b"\x01\x00\x02\x00\x08\x07\x01", r"1 bytes of coded integers; they come in words of 4"),
        (b"\x01\x00\x02\x00\x08\x07" + b"\x00" * 4, r"coded integers whose last word is zero"),
        (b"\x01\x00\x02\x00\x08\x07" + b"\x09" * 8, r"coded integers that are not those of their histogram"),
    ],
)
def test_what_is_no_payload_of_so_many_is_refused(data: bytes, message: str) -> None:
    found = altered(FIXED, data)
    with pytest.raises(ProtocolError, match=message):
        unpack(found.header, found.data)


def test_a_histogram_that_lies_is_refused() -> None:
    data = bytearray(ANS.data)
    # The form, the smallest integer, how many, then their counts: one more here, one less there.
    assert data[:8] == bytes([1, 0xFD, 7, 0, 1, 0, 18, 0])
    data[6] -= 1
    data[8] += 1
    found = altered(ANS, bytes(data))
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
    assert packed(integers, 14).data[0] == Form.ANS


def test_nothing_is_taken_for_a_count_before_the_histogram_is_right() -> None:
    # Forty bytes that claim 2^40 integers: the header check refuses the count; without it, the histogram.
    with pytest.raises(ProtocolError, match="the payload has 1099511627776"):
        integers_of(memoryview(b"\x01\x00\x02\x00" + b"\x07" * 36), 2**40, 4)


def test_a_tuple_filled_up_with_another_integer_is_refused() -> None:
    # Of 98 integers the last tuple has two. By the histogram each occurs 49 times; one more is 1 here, and
    # what fills up has one 1 less than it should.
    integers = np.array([0, 1] * 48 + [1, 1, 0, 1])
    tuples = (integers.reshape(-1, 4) @ (8, 4, 2, 1)).astype(np.int32)
    coder = constriction.stream.stack.AnsCoder()
    model = constriction.stream.model.Categorical(np.full(16, 1 / 16), perfect=False)
    coder.encode_reverse(tuples, model)
    data = bytes([1, 0, 2, 0, 49, 49]) + coder.get_compressed().tobytes()
    with pytest.raises(ProtocolError, match="filled up with others than the last"):
        integers_of(memoryview(data), 98, 4)
    with pytest.raises(ProtocolError, match="payload has 97"):
        integers_of(memoryview(data), 97, 4)
    as_it_should_be = np.array([0, 1] * 50)
    as_it_should_be[-2] = 1
    coder.clear()
    coder.encode_reverse((as_it_should_be.reshape(-1, 4) @ (8, 4, 2, 1)).astype(np.int32), model)
    right = bytes([1, 0, 2, 0, 49, 49]) + coder.get_compressed().tobytes()
    assert integers_of(memoryview(right), 98, 4).tolist() == [0, 1] * 49


def _deflated(content: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return coder.compress(content) + coder.flush()


@pytest.mark.parametrize(
    ("span", "coded", "message"),
    [
        (b"\xfd\x07\x00", HUFFMAN.data[4:-1], r"Huffman codes that are not those of 350 tuples below 49"),
        (b"\xfd\x07\x00", bytes(HUFFMAN.data[4:]) + b"\0", r"not those of 350 tuples"),
        (b"\xfd\x07\x00", _deflated(b"\0" * 349), r"not those of 350 tuples"),
        (b"\xfd\x07\x00", _deflated(b"\0" * 351), r"not those of 350 tuples"),
        (b"\xfd\x07\x00", _deflated(b"\0" * 10**7), r"not those of 350 tuples"),
        (b"\xfd\x07\x00", _deflated(b"\0" * 349 + b"\x31"), r"not those of 350 tuples below 49"),
        (b"\xfd\x07\x00", b"\xff" * 20, r"Huffman codes cannot be read"),
        (b"\xfd\x07\x00", b"", r"not those of 350 tuples"),
        (b"\x81\x01\x01", b"", r"a spread of 257 integers; in the form HUFFMAN it has 1 to 256"),
        (b"\x7d\x07\x00", b"", r"integers from 125 to 131, beyond 8 bits"),
        (b"\xfd\x07", b"", r"integers that end before they say which may occur"),
    ],
)
def test_huffman_codes_that_lie_are_refused(span: bytes, coded: bytes, message: str) -> None:
    assert HUFFMAN.data[0] == Form.HUFFMAN
    with pytest.raises(ProtocolError, match=message):
        integers_of(memoryview(bytes([Form.HUFFMAN]) + span + bytes(coded)), 700, 8)


def test_integers_that_never_differ_have_huffman_codes_that_can_be_read() -> None:
    data = bytes([Form.HUFFMAN, 3, 1, 0]) + _deflated(b"\0" * 25)
    assert integers_of(memoryview(data), 100, 8).tolist() == [3] * 100


def test_the_probe_has_the_form_whose_model_is_computed() -> None:
    for width, size in ((3, 4), (7, 2), (20, 1)):
        integers = np.repeat(np.arange(width), (4000, *range(1, width)))
        data = bytes(packed(integers, 16).data)
        assert data[0] == Form.ANS
        assert data in probe()
        assert _tuple_size(width) == size


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
