"""Whether residues look random: what is uniform passes as often as promised, what is not fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from afl.core.codecs.modular import word_type
from afl.core.messages import Position
from afl.core.secrecy.masks import SECRET_BYTES, Masks
from afl.core.secrecy.uniformity import (
    FALSE_ALARM,
    HIGHEST,
    LEAST_EXPECTED,
    LOWEST,
    SINGLE,
    STEP,
    Uniformity,
)


def of(messages: list[NDArray[Any]], bits: int) -> Uniformity:
    uniformity = Uniformity(bits)
    for message in messages:
        uniformity.add(message)
    return uniformity


def uniform(rng: np.random.Generator, count: int, bits: int) -> NDArray[Any]:
    return rng.integers(0, 1 << bits, count, dtype=word_type(bits))


@pytest.mark.parametrize("bits", [2, 7, 8, 12, 16, 24, 32, 64])
def test_uniform_residues_pass(bits: int) -> None:
    rng = np.random.default_rng(bits)
    found = of(
        [rng.integers(0, 1 << bits, 5000, dtype=np.uint64).astype(word_type(bits)) for _ in range(4)], bits
    )
    assert found.count == 20_000
    probabilities = found.probabilities()
    assert set(probabilities) == {HIGHEST, LOWEST, STEP, SINGLE}
    assert min(probabilities.values()) > 1e-3


def test_the_probabilities_are_those_of_uniform_residues() -> None:
    """Also at the smallest counts, and out to one in ten thousand."""
    rng = np.random.default_rng(1)
    found: dict[str, list[float]] = {}
    for _ in range(5000):
        for name, value in of([uniform(rng, 300, 16), uniform(rng, 300, 16)], 16).probabilities().items():
            found.setdefault(name, []).append(value)
    for values in found.values():
        for threshold in (0.5, 0.1, 0.01):
            expected = 5000 * threshold
            assert abs(sum(value < threshold for value in values) - expected) < 5 * expected**0.5
        assert sum(value < 1e-4 for value in values) <= 6


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_integers_without_a_mask_fail(bits: int) -> None:
    rng = np.random.default_rng(2)
    small = [
        (np.rint(rng.normal(0, 1 << (bits - 4), 500)).astype(np.int64) % (1 << bits)).astype(word_type(bits))
        for _ in range(4)
    ]
    assert of(small, bits).probabilities()[HIGHEST] < FALSE_ALARM / 10


def test_a_mask_that_is_used_twice_is_seen() -> None:
    rng = np.random.default_rng(3)
    mask = uniform(rng, 4000, 16)
    found = of([mask + rng.integers(0, 40, 4000, dtype=np.uint16) for _ in range(2)], 16).probabilities()
    assert found[STEP] < FALSE_ALARM / 10


def test_one_bit_that_is_set_too_often_is_seen() -> None:
    rng = np.random.default_rng(4)
    residues = uniform(rng, 20_000, 24)
    residues |= np.where(rng.random(20_000) < 0.1, np.uint32(1 << 12), np.uint32(0)).astype(np.uint32)
    found = of([residues], 24).probabilities()
    assert found[SINGLE] < FALSE_ALARM / 10
    assert found[HIGHEST] > 1e-3


def test_real_masks_pass_on_any_message() -> None:
    masks = Masks({0: {1: bytes(range(SECRET_BYTES)), 2: bytes(SECRET_BYTES)}})
    for message in (np.zeros(3000, dtype=np.uint16), np.full(3000, 7, dtype=np.uint16)):
        sent = [message + masks.draw(Position(round_, 0), 0, 3000, 16, [0]) for round_ in range(1, 5)]
        assert min(of(sent, 16).probabilities().values()) > 1e-3


def test_too_few_residues_are_not_tested() -> None:
    few = np.zeros(LEAST_EXPECTED - 1, dtype=np.uint16)
    assert of([few], 16).probabilities() == {}


def test_two_draws_from_one_distribution_are_alike_and_others_are_not() -> None:
    rng = np.random.default_rng(5)
    first, second = (of([uniform(rng, 6000, 16) for _ in range(3)], 16) for _ in range(2))
    assert min(first.compared(second).values()) > 1e-3
    skewed = of([uniform(rng, 6000, 16) // 2 for _ in range(3)], 16)
    assert first.compared(skewed)[HIGHEST] < FALSE_ALARM / 10
    assert first.compared(of([uniform(rng, 20, 16)], 16)) == {}
