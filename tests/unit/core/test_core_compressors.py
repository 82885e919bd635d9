"""Compressors, their registry, and error feedback: against brute force, numpy and the definitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import afl.core.compressors as registry
from afl.core.compressors import Compressed, Compressor, Realization, create
from afl.core.compressors.base import Selection, kept
from afl.core.error_feedback import ErrorFeedback
from afl.core.messages import Encoding
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.vectors import is_finite
from afl.errors import ConfigError

Array = NDArray[np.float32]

RANDOMNESS = SharedRandomness.from_int(2024)
LARGEST = 2.0**127
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126, LARGEST, -LARGEST, 1 + 2.0**-23]


def bits(values: Array) -> list[int]:
    return np.ascontiguousarray(values).view(np.uint32).tolist()


def realization(name: str, dim: int, options: Mapping[str, Any], round_: int = 1) -> Realization:
    return create(name, dim, options).realize(RANDOMNESS.stream(Purpose.COMPRESSOR, round_))


def split(of: Realization, vector: Array) -> tuple[Array, Array]:
    """C(x) and x - C(x)."""
    residual = torch.from_numpy(vector.copy())
    compressed = of.split(residual)
    return of.decode(compressed).numpy(), residual.numpy()


def brute_force_top(vector: Array, count: int) -> list[int]:
    return sorted(sorted(range(len(vector)), key=lambda j: (-abs(float(vector[j])), j))[:count])


@st.composite
def vectors(draw: st.DrawFn, most: float = LARGEST) -> Array:
    special = st.sampled_from([value for value in SPECIAL if abs(value) <= most])
    values = special | st.floats(-most, most, width=32)
    return np.array(draw(st.lists(values, min_size=1, max_size=40)), dtype=np.float32)


# Top-k.


@given(vector=vectors(), ratio=st.floats(0.001, 1.0))
@example(vector=np.zeros(7, np.float32), ratio=0.5)
@example(vector=np.array([-0.0, 0.0, -0.0], np.float32), ratio=0.7)
@example(vector=np.array([1, -1, 1, -1, 1], np.float32), ratio=0.4)
@example(vector=np.array([1e-45, -1.4e-45, 0, 3e-45], np.float32), ratio=0.5)
def test_top_k_is_the_brute_force_order_by_magnitude_then_index(vector: Array, ratio: float) -> None:
    compressor = create("top-k", len(vector), {"ratio": ratio})
    chosen = brute_force_top(vector, compressor.count)
    compressed = realization("top-k", len(vector), {"ratio": ratio}).split(torch.from_numpy(vector.copy()))
    assert compressed.indices is not None
    assert compressed.indices.dtype == np.int64
    assert compressed.indices.tolist() == chosen
    assert bits(compressed.values) == bits(vector[chosen])


def test_top_k_takes_absolute_values_and_breaks_ties_by_the_lower_index() -> None:
    vector = torch.tensor([1.0, -3.0, 2.0, 3.0, -2.0, 2.0])
    compressed = realization("top-k", 6, {"ratio": 0.5}).split(vector)
    assert compressed.indices is not None
    assert compressed.indices.tolist() == [1, 2, 3]
    assert compressed.values.tolist() == [-3.0, 2.0, 3.0]
    assert vector.tolist() == [1.0, 0.0, 0.0, 0.0, -2.0, 2.0]


def test_top_k_tells_neighbouring_floats_and_denormals_apart() -> None:
    vector = np.array([1.0, np.nextafter(np.float32(1), np.float32(2)), 1.0, 1e-45, 2.8e-45], np.float32)
    assert brute_force_top(vector, 1) == [1]
    for count, chosen in ((1, [1]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 2, 4])):
        found, _ = split(realization("top-k", 5, {"ratio": count / 5}), vector)
        assert np.flatnonzero(found).tolist() == chosen


@pytest.mark.parametrize("count", [1, 700, 7000, 30_000])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "hidden", "shown", "descending"])
def test_top_k_of_a_long_vector_is_that_order_whatever_a_sample_of_it_says(kind: str, count: int) -> None:
    dim = 70_000
    vector = np.random.default_rng(3).standard_normal(dim, dtype=np.float32)
    every = np.arange(dim) % 61 == 0
    match kind:
        case "ties":
            vector = np.round(vector).astype(np.float32)
        case "zeros":
            vector[500:] = 0.0
        case "hidden":
            vector[every] = 0.0
        case "shown":
            vector[~every] *= np.float32(1e-3)
        case "descending":
            vector = np.arange(dim, 0, -1).astype(np.float32)
    found, _ = split(realization("top-k", dim, {"ratio": count / dim}), vector)
    order = np.lexsort((np.arange(dim), -np.abs(vector)))[:count]
    right = np.zeros(dim, dtype=np.float32)
    right[order] = vector[order]
    assert bits(found) == bits(right)


@given(vector=vectors(2.0**50), ratio=st.floats(0.001, 1.0))
@settings(deadline=None)
def test_top_k_contracts_by_its_delta(vector: Array, ratio: float) -> None:
    compressor = create("top-k", len(vector), {"ratio": ratio})
    assert compressor.delta == compressor.count / len(vector)
    _, residual = split(realization("top-k", len(vector), {"ratio": ratio}), vector)
    lost = float((residual.astype(np.float64) ** 2).sum())
    norm = float((vector.astype(np.float64) ** 2).sum())
    assert lost <= (1 - compressor.delta) * norm * (1 + 1e-12)


# How many are kept.


@pytest.mark.parametrize(
    ("ratio", "dim", "count"),
    [
        (0.1, 4, 1),  # 0.4 rounds to 0: one is always kept
        (1e-12, 100, 1),
        (0.3, 10, 3),
        (0.5, 5, 2),  # 2.5 rounds to even
        (0.5, 7, 4),
        (0.26, 10, 3),
        (1, 7, 7),
        (1.0, 1, 1),
        (0.3, 6_603_710, 1_981_113),
        (0.5, 1 << 40, 1 << 39),
    ],
)
def test_count_is_ratio_times_dim_rounded_but_never_zero(ratio: float, dim: int, count: int) -> None:
    assert kept(ratio, dim) == count
    for name in ("top-k", "rand-k"):
        compressor = create(name, dim, {"ratio": ratio})
        assert (compressor.count, compressor.delta) == (count, count / dim)


# Rand-k.


@given(
    seed=st.integers(0, 2**32 - 1), dim=st.integers(1, 60), ratio=st.floats(0.01, 1), round_=st.integers(1, 9)
)
@settings(deadline=None)
def test_rand_k_is_additive_and_idempotent_to_the_bit(seed: int, dim: int, ratio: float, round_: int) -> None:
    of = realization("rand-k", dim, {"ratio": ratio}, round_)
    random = np.random.default_rng(seed)
    scales = 10.0 ** random.integers(-20, 20, (2, dim))
    one, other = (random.standard_normal((2, dim)) * scales).astype(np.float32)
    of_one, of_other = split(of, one)[0], split(of, other)[0]
    assert bits(of_one + of_other) == bits(split(of, one + other)[0])
    again, lost = split(of, of_one)
    assert bits(again) == bits(of_one)
    assert bits(lost) == [0] * dim


def test_rand_k_keeps_the_coordinates_that_shared_randomness_names_unscaled() -> None:
    vector = np.arange(1, 21, dtype=np.float32)
    for round_ in (1, 2, 3):
        support = RANDOMNESS.stream(Purpose.COMPRESSOR, round_).subset(20, 6)
        found, residual = split(realization("rand-k", 20, {"ratio": 0.3}, round_), vector)
        assert np.flatnonzero(found).tolist() == support.tolist()
        assert (found + residual == vector).all()
        assert (found[support] == vector[support]).all()


def test_rand_k_contracts_by_its_delta_in_expectation() -> None:
    vector = np.array([5, 1, 1, 1, -1, 0.5, 0.25, 2], np.float32)
    norm, rounds = float((vector.astype(np.float64) ** 2).sum()), 1200
    shares = np.array(
        [
            (split(realization("rand-k", 8, {"ratio": 0.25}, t), vector)[1].astype(np.float64) ** 2).sum()
            for t in range(1, rounds + 1)
        ]
    )
    error = shares.std() / norm / math.sqrt(rounds)
    assert abs(shares.mean() / norm - (1 - 2 / 8)) < 5 * error


def test_rand_k_digest_names_the_support() -> None:
    support = RANDOMNESS.stream(Purpose.COMPRESSOR, 1).subset(20, 6)
    material = realization("rand-k", 20, {"ratio": 0.3}).digest_material()
    assert material == b"".join(int(index).to_bytes(8, "little") for index in support)


# What all have in common.


@given(vector=vectors(), case=st.sampled_from(["identity", "top-k", "rand-k"]), ratio=st.floats(0.01, 1.0))
def test_the_residual_is_what_the_message_leaves_to_the_bit(vector: Array, case: str, ratio: float) -> None:
    of = realization(case, len(vector), {} if case == "identity" else {"ratio": ratio})
    found, residual = split(of, vector)
    assert bits(residual) == bits(vector - found)
    # A selector loses nothing in the split itself (+0 and -0 are the same number).
    assert (found + residual == vector).all()


@given(vector=vectors())
@settings(deadline=None)
def test_identity_sends_everything_and_keeps_nothing(vector: Array) -> None:
    compressor = create("identity", len(vector), {})
    assert (compressor.count, compressor.delta, compressor.lossless) == (len(vector), 1.0, True)
    found, residual = split(realization("identity", len(vector), {}), vector)
    assert bits(found) == bits(vector)
    assert bits(residual) == [0] * len(vector)


def test_the_message_does_not_share_memory_with_what_it_was_taken_from() -> None:
    for name, options in (("identity", {}), ("top-k", {"ratio": 0.5}), ("rand-k", {"ratio": 0.5})):
        vector = torch.ones(8)
        compressed = realization(name, 8, options).split(vector)
        vector.fill_(7.0)
        assert set(compressed.values.tolist()) == {1.0}


@given(
    seed=st.integers(0, 2**32 - 1),
    eta=st.floats(1e-6, 10),
    case=st.sampled_from(["identity", "top-k", "rand-k"]),
)
@settings(deadline=None)
def test_a_model_step_is_a_rounded_product_then_a_rounded_difference(
    seed: int, eta: float, case: str
) -> None:
    random = np.random.default_rng(seed)
    params, vector = random.standard_normal((2, 33)).astype(np.float32)
    of = realization(case, 33, {} if case == "identity" else {"ratio": 0.4})
    compressed = of.split(torch.from_numpy(vector))
    moved = torch.from_numpy(params.copy())
    of.step(moved, compressed, eta)
    change = (of.decode(compressed).numpy() * np.float32(eta)).astype(np.float32)
    assert bits(moved.numpy()) == bits((params - change).astype(np.float32))


def test_a_model_step_is_not_a_fused_multiply_add() -> None:
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, which rounds to 1 + 2^-11: the difference is exactly 0.
    factor = 1.0 + 2.0**-12
    params = torch.full((1,), 1.0 + 2.0**-11)
    realization("identity", 1, {}).step(params, Compressed(np.full(1, factor, np.float32)), factor)
    assert params.item() == 0.0


def test_a_model_step_over_many_blocks_moves_every_coordinate_once() -> None:
    dim = 3 * 65536 + 17
    values = np.arange(dim, dtype=np.float32)
    params = torch.zeros(dim)
    realization("identity", dim, {}).step(params, Compressed(values), 0.5)
    assert (params.numpy() == -0.5 * values).all()


@pytest.mark.parametrize("case", ["identity", "top-k", "rand-k"])
def test_add_to_adds_the_message_at_its_places_and_takes_read_only_memory(case: str) -> None:
    of = realization(case, 10, {} if case == "identity" else {"ratio": 0.3})
    compressed = of.split(torch.arange(1.0, 11.0))
    compressed.values.flags.writeable = False
    total = torch.arange(10.0, 0.0, -1.0)
    of.add_to(total, compressed)
    right = np.arange(10, 0, -1, dtype=np.float32) + of.decode(compressed).numpy()
    assert total.tolist() == right.tolist()


# Error feedback.


@pytest.mark.parametrize("case", ["identity", "top-k", "rand-k"])
def test_error_feedback_is_the_recursion_written_in_numpy(case: str) -> None:
    dim, ratio = 50, 0.2
    random = np.random.default_rng(5)
    feedback = ErrorFeedback(dim)
    residual = np.zeros(dim, np.float32)
    for t in range(1, 30):
        signal = (random.standard_normal(dim) * 10.0 ** random.integers(-3, 4, dim)).astype(np.float32)
        of = realization(case, dim, {} if case == "identity" else {"ratio": ratio}, t)
        message = of.decode(feedback.compress(torch.from_numpy(signal), of)).numpy()
        p = residual + signal
        if case == "identity":
            mask = np.ones(dim, dtype=np.bool_)
        elif case == "top-k":
            mask = np.zeros(dim, dtype=np.bool_)
            mask[np.lexsort((np.arange(dim), -np.abs(p)))[:10]] = True
        else:
            mask = np.isin(np.arange(dim), RANDOMNESS.stream(Purpose.COMPRESSOR, t).subset(dim, 10))
        right = np.where(mask, p, np.float32(0))
        residual = p - right
        assert bits(message) == bits(right)
        assert bits(feedback.residual.numpy()) == bits(residual)
    assert residual.any() == (case != "identity")


@given(vector=vectors(), place=st.integers(0, 39), poison=st.sampled_from([math.nan, math.inf, -math.inf]))
@settings(deadline=None)
def test_is_finite_is_a_matter_of_elements_not_of_their_sum(vector: Array, place: int, poison: float) -> None:
    assert is_finite(torch.from_numpy(vector))
    vector[place % len(vector)] = poison
    assert not is_finite(torch.from_numpy(vector))


def test_is_finite_survives_a_sum_that_overflows() -> None:
    assert is_finite(torch.full((4,), 3e38))
    assert not is_finite(torch.tensor([math.inf, -math.inf]))


# Options.


@pytest.mark.parametrize("name", ["top-k", "rand-k"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "ratio is None; it must be a number in (0, 1]"),
        ({"ratio": 0}, "ratio is 0; it must be a number in (0, 1]"),
        ({"ratio": -0.1}, "ratio is -0.1; it must be a number in (0, 1]"),
        ({"ratio": 1.0001}, "ratio is 1.0001; it must be a number in (0, 1]"),
        ({"ratio": math.nan}, "ratio is nan; it must be a number in (0, 1]"),
        ({"ratio": math.inf}, "ratio is inf; it must be a number in (0, 1]"),
        ({"ratio": True}, "ratio is True; it must be a number in (0, 1]"),
        ({"ratio": "0.1"}, "ratio is '0.1'; it must be a number in (0, 1]"),
        ({"ratio": [0.1]}, "ratio is [0.1]; it must be a number in (0, 1]"),
        ({"ratio": 0.1, "k": 3}, "unknown option 'k'; it takes only `ratio`, in (0, 1]"),
    ],
)
def test_a_sparsifier_refuses_a_wrong_option_by_name(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        create(name, 10, options)
    assert str(caught.value) == f"{name}: {message}"


def test_identity_refuses_any_option() -> None:
    with pytest.raises(ConfigError) as caught:
        create("identity", 10, {"ratio": 0.5})
    assert str(caught.value) == "identity: unknown option 'ratio'; it takes none"


# Registry.


class Halves(Compressor):
    """A user's own: the first half of the coordinates."""

    name = "halves"
    encoding = Encoding.SEEDED
    additive_idempotent = True

    @property
    def count(self) -> int:
        return (self.dim + 1) // 2

    @property
    def delta(self) -> float:
        return 0.0

    def realize(self, stream: Any, device: torch.device | str = "cpu") -> Realization:
        return _FirstHalf(self.dim, self.count)


class _FirstHalf(Selection):
    def __init__(self, dim: int, count: int) -> None:
        super().__init__(dim)
        self._count = count

    def split(self, vector: Tensor) -> Compressed:
        values = vector[: self._count].numpy().copy()
        vector[: self._count] = 0.0
        return Compressed(values)

    def indices(self, compressed: Compressed) -> Tensor:
        return torch.arange(self._count)

    def digest_material(self) -> bytes:
        return b"halves"


@dataclass(frozen=True)
class Point:
    """What the registry reads of an installed entry point."""

    name: str
    value: str
    target: Any

    def load(self) -> Any:
        return self.target


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two entry points of a user's package beside the built-in ones."""
    points = [*registry.entry_points(group="afl.compressors")]
    points += [Point("halves", "mine:Halves", Halves), Point("broken", "mine:VALUE", 3)]

    def entry_points(*, group: str) -> list[Any]:
        assert group == "afl.compressors"
        return points

    def forget() -> None:
        registry.compressor_names.cache_clear()
        registry.compressor_class.cache_clear()

    forget()
    monkeypatch.setattr(registry, "entry_points", entry_points)
    yield
    forget()


def test_a_user_s_compressor_is_found_by_its_entry_point(installed: None) -> None:
    names = registry.compressor_names()
    assert {"broken", "halves", "identity", "rand-k", "top-k"} <= set(names)
    assert list(names) == sorted(names)
    compressor = create("halves", 5, {})
    assert type(compressor) is Halves
    found, residual = split(realization("halves", 5, {}), np.arange(1, 6, dtype=np.float32))
    assert found.tolist() == [1, 2, 3, 0, 0]
    assert residual.tolist() == [0, 0, 0, 4, 5]


def test_an_entry_point_that_is_no_compressor_is_named(installed: None) -> None:
    with pytest.raises(ConfigError) as caught:
        create("broken", 5, {})
    assert str(caught.value) == (
        "the entry point 'broken' of afl.compressors is mine:VALUE, which is not a subclass of afl.Compressor"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("topk", "; did you mean 'top-k'?"),
        ("rand_k", "; did you mean 'rand-k'?"),
        ("Identity", "; did you mean 'identity'?"),
        ("zzz", "."),
        ("", "."),
    ],
)
def test_an_unknown_compressor_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create(name, 10, {})
    message, _, installed_names = str(caught.value).partition(" Installed: ")
    assert message == f"no compressor is called {name!r}{hint}"
    assert {"identity", "rand-k", "top-k"} <= set(installed_names.split(", "))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "case", ["identity", "top-k", "rand-k", "scaled-sign", "projection", "dct-projection"]
)
def test_a_gpu_gives_the_bits_of_the_cpu(case: str) -> None:
    random = np.random.default_rng(3)
    vector = random.standard_normal(5000).astype(np.float32).round(1)
    params = random.standard_normal(5000).astype(np.float32)
    results = []
    for device in ("cpu", "cuda"):
        compressor = create(case, 5000, {} if case in {"identity", "scaled-sign"} else {"ratio": 0.1})
        of = compressor.realize(RANDOMNESS.stream(Purpose.COMPRESSOR, 1), device)
        residual = torch.from_numpy(vector.copy()).to(device)
        compressed = of.split(residual)
        moved = torch.from_numpy(params.copy()).to(device)
        of.step(moved, compressed, 0.3)
        of.add_to(residual, compressed)
        results.append((bits(compressed.values), bits(residual.cpu().numpy()), bits(moved.cpu().numpy())))
    assert results[0] == results[1]
