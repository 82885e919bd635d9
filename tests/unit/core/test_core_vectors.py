"""A gradient in parts, times its weight: written or added as numpy computes it, whatever the blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from afl.core.vectors import BLOCK, Weighted, add_finite

Array = NDArray[np.float32]

LAYOUTS = {
    "one": [(3 * BLOCK + 7,)],
    "a-block": [(BLOCK,)],
    "small": [(1,), (2, 3), (), (4,)],
    "across": [(BLOCK - 1,), (3,), (2 * BLOCK,), (5, 0), (2, BLOCK // 2)],
}


def bits(values: Array) -> list[int]:
    return np.ascontiguousarray(values).view(np.uint32).tolist()


def gradient(layout: str, seed: int = 0) -> tuple[list[Tensor], list[int], Array]:
    """Parts, their sizes, and all their elements in order."""
    generator = np.random.default_rng(seed)
    parts = [
        torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)) for shape in LAYOUTS[layout]
    ]
    return parts, [part.numel() for part in parts], torch.cat([part.reshape(-1) for part in parts]).numpy()


@given(weight=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None)
@example(weight=1e-320, seed=0)
@example(weight=0.1, seed=1)
def test_the_weight_is_rounded_once_and_each_product_once(weight: float, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((8, 5)).astype(np.float32)
    strided = torch.from_numpy(values.T.copy()).T
    for part in (torch.from_numpy(values), strided, strided.double()):
        found = torch.empty(40)
        assert Weighted([part], [40], weight).write(found)
        assert bits(found.numpy()) == bits((values * np.float32(weight)).reshape(-1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_written_and_added_as_numpy_computes_it(layout: str) -> None:
    parts, sizes, whole = gradient(layout)
    total = np.random.default_rng(9).standard_normal(len(whole), dtype=np.float32)
    weighted, right = Weighted(parts, sizes, 0.3), whole * np.float32(0.3)
    found = torch.empty(len(whole))
    assert weighted.write(found)
    assert bits(found.numpy()) == bits(right)
    assert add_finite(torch.from_numpy(total), weighted, out=found)
    assert bits(found.numpy()) == bits(total + right)
    in_place = torch.from_numpy(total.copy())
    assert add_finite(in_place, weighted, out=in_place)
    assert bits(in_place.numpy()) == bits(total + right)
    assert bits(torch.cat([part.reshape(-1) for part in parts]).numpy()) == bits(whole)


def test_a_part_that_nothing_flowed_to_is_zero() -> None:
    weighted = Weighted([torch.ones(3), None, torch.ones(2)], [3, BLOCK, 2], 2.0)
    found = torch.full((BLOCK + 5,), math.nan)
    assert weighted.write(found)
    assert found.tolist() == [2.0] * 3 + [0.0] * BLOCK + [2.0] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_noticed(layout: str, poison: float) -> None:
    for place in (0, -1):
        parts, sizes, whole = gradient(layout)
        chosen = next(part for part in parts[:: 1 if place == 0 else -1] if part.numel())
        chosen.view(-1)[place] = poison
        weighted, found = Weighted(parts, sizes, 0.5), torch.zeros(len(whole))
        assert not weighted.is_finite()
        assert not add_finite(torch.zeros(len(whole)), weighted, out=found)
        assert not weighted.write(found)
        assert bits(found.numpy()) == bits(torch.cat([part.reshape(-1) for part in parts]).numpy() * 0.5)


def test_products_or_sums_beyond_float32_are_not_finite() -> None:
    huge = torch.full((BLOCK + 3,), 3e38)
    found = torch.empty_like(huge)
    assert not Weighted([huge], [len(huge)], 2.0).is_finite()
    weighted = Weighted([huge], [len(huge)], 1.0)
    assert weighted.is_finite()
    assert not add_finite(huge, weighted, out=found)
