"""Integers modulo 2^bits, masks that cancel, and whose masks each worker's has."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core.aggregation import ModularSum
from afl.core.codecs.modular import modular, signed, word_type
from afl.core.codecs.payload import unpack
from afl.core.messages import Encoding, Position, Role
from afl.core.secrecy.masks import SECRET_BYTES, Masks
from afl.core.secrecy.neighbours import COMPLETE_UP_TO, degree, neighbours
from afl.errors import DivergedError, ProtocolError

WIDTHS = st.integers(2, 24) | st.sampled_from([32, 33, 63, 64])


@given(bits=WIDTHS, count=st.integers(1, 70), seed=st.integers(0, 2**32))
def test_residues_travel_in_bits_bits_and_come_back_as_the_integers(bits: int, count: int, seed: int) -> None:
    half = 1 << (bits - 1)
    integers = np.random.default_rng(seed).integers(-half, half - 1, count, dtype=np.int64, endpoint=True)
    payload = modular(Encoding.SEEDED, bits).whole(integers, Role.UPDATE, 1000)
    assert len(payload.data) == payload.header.value_bytes == -(-count * bits // 8)
    found = unpack(payload.header, payload.data).values
    assert found.dtype == word_type(bits)
    assert signed(found, bits).tolist() == integers.tolist()


def test_a_payload_of_another_length_is_refused() -> None:
    payload = modular(Encoding.SEEDED, 16).whole(np.arange(5), Role.UPDATE, 10)
    with pytest.raises(ProtocolError, match="a payload of 9 bytes; its header says 10"):
        unpack(payload.header, payload.data[:-1])


def masks_of(workers: int, hosted: list[int], public: bytes = b"roster") -> Masks:
    def secret(one: int, other: int) -> bytes:
        return hashlib.sha256(b"%d %d" % (min(one, other), max(one, other))).digest()[:SECRET_BYTES]

    return Masks(
        {one: {other: secret(one, other) for other in neighbours(one, workers, public)} for one in hosted}
    )


def groups(draw: Any, workers: int) -> list[list[int]]:
    places = draw(st.lists(st.integers(0, 3), min_size=workers, max_size=workers))
    found = [[worker for worker in range(workers) if places[worker] == place] for place in range(4)]
    return [group for group in found if group]


@given(data=st.data(), workers=st.integers(2, 9), bits=WIDTHS, count=st.integers(1, 40))
def test_masks_cancel_in_the_sum_of_all_however_the_workers_are_grouped(
    data: st.DataObject, workers: int, bits: int, count: int
) -> None:
    position = Position(data.draw(st.integers(1, 2**40)), data.draw(st.sampled_from([0, 255])))
    total = np.zeros(count, dtype=word_type(bits))
    for group in groups(data.draw, workers):
        masks = masks_of(workers, group)
        if data.draw(st.booleans()):
            total += masks.draw(position, 0, count, bits, group)
        else:
            for worker in group:
                total += masks.draw(position, 0, count, bits, [worker])
    assert not signed(total, bits).any()


def test_each_position_payload_and_pair_has_a_stream_of_its_own() -> None:
    masks = masks_of(3, [0, 1, 2])
    drawn: list[NDArray[Any]] = [
        masks.draw(Position(round_, phase), payload, 100, 64, [worker])
        for round_ in (1, 2)
        for phase in (0, 255)
        for payload in (0, 1)
        for worker in (0, 1, 2)
    ]
    words = np.concatenate(drawn)
    assert len(set(words.tolist())) == len(words)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_masks_of_workers_that_were_shown_different_things_do_not_cancel(one: bytes, other: bytes) -> None:
    at = Position(3, 0)
    first = masks_of(2, [0]).draw(at, 0, 8, 64, [0], shown=one)
    left = first + masks_of(2, [1]).draw(at, 0, 8, 64, [1], shown=other)
    assert (not left.any()) == (one == other)
    # Nor does one lead to the other.
    assert len({*first.tolist(), *left.tolist()}) == (9 if one == other else 16)


def test_a_mask_is_the_same_whatever_was_drawn_before_and_however_long_it_is() -> None:
    masks, others = masks_of(4, [2]), masks_of(4, [2])
    others.draw(Position(9, 0), 0, 1000, 16, [2])
    long = others.draw(Position(3, 0), 0, 200_000, 16, [2])
    short = masks.draw(Position(3, 0), 0, 100, 16, [2])
    assert long[:100].tolist() == short.tolist()


def test_a_mask_looks_like_noise_in_every_bit() -> None:
    drawn = masks_of(3, [1]).draw(Position(1, 0), 0, 100_000, 12, [1]) & 0xFFF
    ones = np.unpackbits(drawn.astype("<u2").view(np.uint8).reshape(-1, 2), axis=1, bitorder="little").mean(
        axis=0
    )
    # Five standard deviations of 100,000 tosses.
    assert np.abs(ones[:12] - 0.5).max() < 5 * 0.5 / np.sqrt(100_000)
    counts = np.bincount(drawn, minlength=4096)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 4095 + 5 * np.sqrt(2 * 4095)


@pytest.mark.parametrize("workers", [2, 10, COMPLETE_UP_TO, COMPLETE_UP_TO + 1, 300])
def test_neighbours_are_mutual_and_as_many_as_the_degree(workers: int) -> None:
    of_each = [set(neighbours(worker, workers, b"public")) for worker in range(workers)]
    assert {len(near) for near in of_each} == {degree(workers)}
    assert all(one in of_each[other] for one in range(workers) for other in of_each[one])
    assert all(worker not in near for worker, near in enumerate(of_each))


def test_the_degree_is_the_least_even_one_for_which_colluding_runs_are_as_rare_as_said() -> None:
    for workers in (65, 100, 1000, 10_000):
        near = degree(workers)
        assert near % 2 == 0
        assert workers**2 / 2 * 3.0**-near < 2.0**-80 <= workers**2 / 2 * 3.0 ** -(near - 2)


def test_a_mask_that_is_left_in_a_sum_is_told() -> None:
    total = ModularSum(3, 1, 16, workers=2)
    header = modular(Encoding.SEEDED, 16).header(10, 4, Role.UPDATE)
    for worker, residues in enumerate(([1, 2, 65535, 1], [5, 65530, 1, 0])):
        payload = modular(Encoding.SEEDED, 16).whole(np.array(residues), Role.UPDATE, 10)
        assert payload.header == header
        total.add(worker, header, payload.data)
    assert total.checked("round 1", "updates").tolist() == [6, -4, 0, 1]
    total.total[3] += 2
    with pytest.raises(DivergedError, match="round 1: the workers' updates do not add up"):
        total.checked("round 1", "updates")
