"""The projections: their matrices against independent ones, the class C_AI pathwise, delta in expectation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from core_compressors import compressed, dct_matrix, haar, normal
from core_philox import words
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core.algorithms.settings import CompressorChoice
from afl.core.compressors import Compressed, Realization, create
from afl.core.compressors import dct_projection as dct_module
from afl.core.compressors import projection as haar_module
from afl.core.compressors.dct_projection import blocks, dct, inverse_dct
from afl.core.messages import Encoding
from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import ConfigError, NonFiniteError

Array = NDArray[np.float32]
Doubles = NDArray[np.float64]

SEED = 2024
RANDOMNESS = SharedRandomness.from_int(SEED)
PROJECTIONS = ["projection", "dct-projection"]


def realization(name: str, dim: int, ratio: float, round_: int = 1) -> Realization:
    return create(name, dim, {"ratio": ratio}).realize(RANDOMNESS.stream(Purpose.COMPRESSOR, round_))


def image(of: Realization, vector: Array) -> Array:
    """P x."""
    return of.decode(of.split(torch.from_numpy(vector.copy()))).numpy()


def matrix(of: Realization, dim: int) -> Doubles:
    """P, a column at a time."""
    return np.stack([image(of, column) for column in np.eye(dim, dtype=np.float32)], axis=1).astype(float)


def norm(vector: Array) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


# Against the independent versions.


@given(
    name=st.sampled_from(PROJECTIONS),
    seed=st.integers(0, 2**32 - 1),
    dim=st.integers(1, 65),
    ratio=st.floats(0.01, 1),
    round_=st.integers(1, 9),
)
def test_it_is_the_independent_version_but_for_rounding(
    name: str, seed: int, dim: int, ratio: float, round_: int
) -> None:
    vector = np.random.default_rng(seed).standard_normal(dim).astype(np.float32)
    right = compressed(CompressorChoice(name, {"ratio": ratio}), vector, SEED, round_)
    found = image(realization(name, dim, ratio, round_), vector)
    assert norm(found - right) <= 1e-6 * norm(vector)


def test_what_travels_is_the_r_coefficients_of_the_documented_frame() -> None:
    dim, rank = 30, 7
    vector = np.random.default_rng(0).standard_normal(dim).astype(np.float32)
    of = realization("projection", dim, rank / dim)
    coefficients = of.split(torch.from_numpy(vector.copy())).values
    frame = haar(words(SEED, Purpose.COMPRESSOR, 1, 0), dim, rank)
    np.testing.assert_allclose(frame.T @ frame, np.eye(rank), atol=1e-14)
    np.testing.assert_allclose(coefficients, frame.T @ vector, rtol=0, atol=1e-6)


def test_the_frame_is_the_q_of_a_decomposition_with_a_positive_diagonal() -> None:
    """Of the matrix whose column j has the j-th normal vector where the reflections before it leave it, and
    any numbers above: those are normal too if the matrix is, since reflections keep the law."""
    dim, rank = 12, 5
    numbers = normal(words(SEED, Purpose.COMPRESSOR, 3, 0), dim * rank - rank * (rank - 1) // 2)
    above = np.random.default_rng(0)
    a, before = np.zeros((dim, rank)), np.eye(dim)
    for j in range(rank):
        own, numbers = numbers[: dim - j], numbers[dim - j :]
        a[:, j] = before @ [*above.standard_normal(j), *own]
        v = np.array([*np.zeros(j), own[0] + math.copysign(np.linalg.norm(own), own[0]), *own[1:]])
        before = before @ (np.eye(dim) - 2 * np.outer(v, v) / (v @ v))
    q, r = np.linalg.qr(a)
    of = realization("projection", dim, rank / dim, 3)
    assert isinstance(of, haar_module._Frame)
    found = np.stack([of.synthesise(column) for column in np.eye(rank, dtype=np.float32)], axis=1)
    np.testing.assert_allclose(found, q * np.sign(np.diag(r)), atol=1e-13)


def test_normal_numbers_are_those_of_the_documented_sequence() -> None:
    found = haar_module.normal(RANDOMNESS.stream(Purpose.COMPRESSOR, 5), 500)
    assert found.tolist() == pytest.approx(normal(words(SEED, Purpose.COMPRESSOR, 5, 0), 500), rel=1e-15)


def test_normal_numbers_are_normal() -> None:
    numbers = haar_module.normal(RANDOMNESS.stream(Purpose.COMPRESSOR, 6), 200_000)
    ordered = np.sort(numbers)
    cumulative = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in ordered])
    distance = np.abs(cumulative - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
    assert distance < 1.95 / math.sqrt(len(ordered))  # Kolmogorov and Smirnov's bound at 0.1 %
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        spread = (numbers**power).std() / math.sqrt(len(numbers))
        assert abs((numbers**power).mean() - moment) < 5 * spread


def test_a_frame_is_haar() -> None:
    """An entry of a uniform unit vector of R^d has moments 0, 1/d, 0, 3/(d (d + 2)); and a rotation of the
    frame changes nothing, in the first column as in the last."""
    dim, rank, draws = 6, 4, 3000
    rotation = np.linalg.qr(np.random.default_rng(1).standard_normal((dim, dim)))[0]
    frames = []
    for t in range(1, draws + 1):
        of = realization("projection", dim, rank / dim, t)
        assert isinstance(of, haar_module._Frame)
        frames.append(np.stack([of.synthesise(column) for column in np.eye(rank, dtype=np.float32)], axis=1))
    entries = np.array(frames)
    for sample in (entries, rotation @ entries):
        for column in range(rank):
            for power, moment in ((1, 0.0), (2, 1 / dim), (3, 0.0), (4, 3 / (dim * (dim + 2)))):
                values = sample[:, :, column] ** power
                assert (np.abs(values.mean(0) - moment) < 5 * values.std(0) / math.sqrt(draws)).all()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 17, 100, 101, 257])
def test_the_transform_is_the_orthonormal_dct(n: int) -> None:
    right = dct_matrix(n)
    np.testing.assert_allclose(right @ right.T, np.eye(n), atol=1e-12)
    found = np.stack([dct(column) for column in np.eye(n)], axis=1)
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-13)
    back = np.stack([inverse_dct(column) for column in np.eye(n)], axis=1)
    np.testing.assert_allclose(back, right.T, rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [16384, 16411, 32749, 32767])  # 16411 and 32749 are primes
def test_a_long_transform_at_some_places(n: int) -> None:
    vector = np.random.default_rng(n).standard_normal(n)
    found = dct(vector)
    for j in (0, 1, n // 2, n - 1):
        weight = math.sqrt((2 if j else 1) / n)
        right = weight * (np.cos(np.pi * (2 * np.arange(n) + 1) * j / (2 * n)) * vector).sum()
        assert found[j] == pytest.approx(right, abs=1e-9)
    np.testing.assert_allclose(inverse_dct(found), vector, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dim", "lengths"),
    [
        (1, [1]),
        (16384, [16384]),
        (32767, [32767]),
        (32768, [16384, 16384]),
        (32769, [16384, 16385]),
        (49151, [16384, 32767]),
        (49152, [16384] * 3),
    ],
)
def test_blocks_cover_the_vector_and_the_last_takes_what_remains(dim: int, lengths: Sequence[int]) -> None:
    found = blocks(dim)
    assert [stop - start for start, stop in found] == list(lengths)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == dim


def test_beyond_a_block_each_is_transformed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dct_module, "BLOCK", 8)
    dim, ratio = 29, 0.5
    assert blocks(dim) == [(0, 8), (8, 16), (16, 29)]
    transform = np.zeros((dim, dim))
    for start, stop in blocks(dim):
        transform[start:stop, start:stop] = dct_matrix(stop - start)
    stream = RANDOMNESS.stream(Purpose.COMPRESSOR, 4)
    word = int(stream.words(1)[0])
    signs = np.array([1 - 2 * (word >> j & 1) for j in range(dim)])
    rows = (transform * signs)[stream.subset(dim, 14)]
    np.testing.assert_allclose(
        matrix(realization("dct-projection", dim, ratio, 4), dim), rows.T @ rows, atol=1e-6
    )


# The class C_AI, pathwise.


@given(
    name=st.sampled_from(PROJECTIONS),
    seed=st.integers(0, 2**32 - 1),
    dim=st.integers(1, 200),
    ratio=st.floats(0.01, 1),
    round_=st.integers(1, 99),
)
def test_it_is_additive_idempotent_and_orthogonal_but_for_rounding(
    name: str, seed: int, dim: int, ratio: float, round_: int
) -> None:
    of = realization(name, dim, ratio, round_)
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.integers(-15, 15)
    one, other = (random.standard_normal((2, dim)) * scale).astype(np.float32)
    size = norm(one) + norm(other)
    of_one, of_other = image(of, one), image(of, other)
    assert norm(image(of, one + other) - (of_one + of_other)) <= 1e-6 * size
    assert norm(image(of, of_one) - of_one) <= 1e-6 * size
    # An orthogonal projection: the residual is at right angles to what is sent.
    product = float(of_one.astype(float) @ (one - of_one).astype(float))
    assert abs(product) <= 1e-6 * norm(one) ** 2


@pytest.mark.parametrize("name", PROJECTIONS)
def test_messages_sum_to_the_message_of_the_sum(name: str) -> None:
    dim = 300
    of = realization(name, dim, 0.2)
    vectors = np.random.default_rng(0).standard_normal((5, dim)).astype(np.float32)
    total = np.sum([of.split(torch.from_numpy(v.copy())).values for v in vectors], axis=0)
    whole = of.split(torch.from_numpy(vectors.sum(axis=0))).values
    assert norm(total - whole) <= 1e-6 * norm(whole)


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("dim", [1, 2, 37, 40_000])
def test_all_coefficients_lose_nothing_but_rounding(name: str, dim: int) -> None:
    if name == "projection" and dim > 1000:
        dim = 500
    vector = np.random.default_rng(0).standard_normal(dim).astype(np.float32)
    assert norm(image(realization(name, dim, 1.0), vector) - vector) <= 2e-7 * norm(vector)


# In expectation.


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize(("dim", "count"), [(7, 3), (12, 1), (9, 9)])
def test_the_mean_projection_is_r_over_d_times_the_identity(name: str, dim: int, count: int) -> None:
    draws = 400
    drawn = np.array([matrix(realization(name, dim, count / dim, t), dim) for t in range(1, draws + 1)])
    error = drawn.std(axis=0) / math.sqrt(draws)
    assert (np.abs(drawn.mean(axis=0) - count / dim * np.eye(dim)) <= 5 * error + 1e-6).all()
    assert np.abs(np.trace(drawn, axis1=1, axis2=2) - count).max() < 1e-5


@pytest.mark.parametrize("name", PROJECTIONS)
def test_it_contracts_by_its_delta_in_expectation(name: str) -> None:
    """Of a spike, a constant, a wave and a normal vector."""
    spike, wave = np.eye(1, 64, 5)[0], np.cos(np.arange(64))
    vectors = np.float32([spike, np.ones(64), wave, np.random.default_rng(0).standard_normal(64)])
    compressor, rounds = create(name, 64, {"ratio": 0.2}), 600
    assert (compressor.count, compressor.delta) == (13, 13 / 64)
    shares = np.empty((rounds, len(vectors)))
    for t in range(rounds):
        of = realization(name, 64, 0.2, t + 1)
        shares[t] = [norm(x - image(of, x)) ** 2 / norm(x) ** 2 for x in vectors]
    error = shares.std(axis=0) / math.sqrt(rounds)
    assert (np.abs(shares.mean(axis=0) - (1 - 13 / 64)) < 5 * error).all()


# Randomness, limits, overflow.


@pytest.mark.parametrize("name", PROJECTIONS)
def test_the_digest_follows_seed_and_round(name: str) -> None:
    def digest(seed: int, round_: int) -> bytes:
        stream = SharedRandomness.from_int(seed).stream(Purpose.COMPRESSOR, round_)
        return create(name, 50, {"ratio": 0.3}).realize(stream).digest_material()

    assert digest(1, 1) == digest(1, 1) != b""
    assert len({digest(seed, round_) for seed in (1, 2) for round_ in (1, 2)}) == 4


@pytest.mark.parametrize("name", PROJECTIONS)
def test_form_and_class(name: str) -> None:
    compressor = create(name, 1000, {"ratio": 0.0501})
    assert (compressor.count, compressor.delta) == (50, 0.05)
    assert (compressor.encoding, compressor.additive_idempotent) == (Encoding.SEEDED, True)
    assert not compressor.lossless


@pytest.mark.parametrize(("dim", "ratio"), [(2048, 1.0), (4096, 0.25), (1 << 22, 1e-9)])
def test_a_matrix_at_the_limit_is_accepted(dim: int, ratio: float) -> None:
    assert dim * create("projection", dim, {"ratio": ratio}).count == haar_module.LARGEST


@pytest.mark.parametrize(("dim", "ratio"), [(2049, 1.0), (4097, 0.25), (10_000_000, 0.1), (1 << 40, 1e-12)])
def test_a_larger_matrix_is_refused_with_a_way_out(dim: int, ratio: float) -> None:
    with pytest.raises(ConfigError) as caught:
        create("projection", dim, {"ratio": ratio})
    count = max(1, round(ratio * dim))
    assert str(caught.value) == (
        f"projection: a matrix of {dim} x {count} has more than 2^22 = 4194304 numbers; "
        "take a smaller ratio, or dct-projection, which needs no matrix"
    )


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "ratio is None; it must be a number in (0, 1]"),
        ({"ratio": "theory"}, "ratio is 'theory'; it must be a number in (0, 1]"),
        ({"ratio": 1.5}, "ratio is 1.5; it must be a number in (0, 1]"),
        ({"ratio": 0.5, "k": 1}, "unknown option 'k'; it takes only `ratio`, in (0, 1]"),
    ],
)
def test_a_wrong_option_is_named(name: str, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        create(name, 10, options)
    assert str(caught.value) == f"{name}: {what}"


@pytest.mark.parametrize("name", PROJECTIONS)
def test_coefficients_beyond_float32_are_refused_and_what_fits_is_not(name: str) -> None:
    dim = 400
    of = realization(name, dim, 1.0)
    direction = of.decode(Compressed(np.eye(1, dim, 3, dtype=np.float32)[0])).numpy()
    # All of this vector is in one coefficient, twenty times its largest coordinate or so.
    vector = direction / np.abs(direction).max() * np.float32(1e38)
    assert norm(vector) > 3.5e38
    with pytest.raises(NonFiniteError, match="the projection of the update overflows float32"):
        of.split(torch.from_numpy(vector.astype(np.float32)))
    residual = torch.from_numpy((vector * np.float32(0.01)).astype(np.float32))
    of.split(residual)
    assert norm(residual.numpy()) < 1e-6 * 0.01 * norm(vector)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_finite_coefficients_whose_vector_overflows_decode_to_infinity(name: str) -> None:
    of = realization(name, 400, 1.0)
    assert np.isinf(of.decode(Compressed(np.full(400, 3e38, np.float32))).numpy()).any()
