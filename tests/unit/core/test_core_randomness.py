"""Shared randomness: published vectors, an independent implementation, and exact uniformity."""

from __future__ import annotations

import hashlib
import itertools
import math

import core_philox as reference
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core import randomness
from afl.core.randomness import Purpose, SharedRandomness, Stream

SEED = 0x0123456789ABCDEF_FEDCBA9876543210


def stream(purpose: int, round_: int = 0, worker: int = 0, seed: int = SEED) -> Stream:
    return Stream(seed.to_bytes(16, "little"), purpose, round_, worker)


def chi_square_bound(freedom: int) -> float:
    """What a chi-square exceeds about once in 10^6 (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 4.75 * math.sqrt(spread)) ** 3)


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        ((0,) * 4, (0, 0), "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        (
            (reference.MASK,) * 4,
            (reference.MASK,) * 2,
            "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0",
        ),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_the_tests_own_philox_gives_the_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], block: str
) -> None:
    assert [f"{word:016x}" for word in reference.philox(counter, key)] == block.split()


def test_key_one_counter_zero_gives_the_check_value() -> None:
    right = [5599841837815857887, 15655913098571550255, 2880178291573394738]
    assert stream(0, 0, 0, seed=1).words(3).tolist() == right
    assert list(itertools.islice(reference.words(1, 0, 0, 0), 3)) == right


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**128 - 1),
    purpose=st.sampled_from(Purpose),
    round_=st.integers(0, 2**64 - 1),
    worker=st.integers(0, 2**32 - 1),
)
@example(seed=2**128 - 1, purpose=Purpose.COMPRESSOR, round_=1, worker=0)
def test_a_stream_is_philox_at_the_documented_counters(
    seed: int, purpose: Purpose, round_: int, worker: int
) -> None:
    drawn = SharedRandomness.from_int(seed).stream(purpose, round_, worker)
    first, then = drawn.words(3).tolist(), drawn.words(7).tolist()
    assert first + then == list(itertools.islice(reference.words(seed, purpose, round_, worker), 10))


def test_vectors_of_words() -> None:
    assert stream(1, 2, 3).words(5).tolist() == [
        16941324853119186216,
        15011501412674018556,
        11049673211606915843,
        16031344733797231793,
        1654851153822521739,
    ]


def test_vectors_of_integers() -> None:
    drawn = stream(2, 7)
    assert [drawn.integer(10) for _ in range(12)] == [0, 8, 3, 8, 0, 9, 6, 2, 3, 7, 3, 8]


def test_vectors_of_uniform_doubles() -> None:
    right = ["0x1.f0a79f34fb804p-3", "0x1.b93efab28472cp-2", "0x1.1d1071eb3e0fep-2"]
    assert [value.hex() for value in stream(3, 7, 1).uniform(3).tolist()] == right


def test_vectors_of_permutations() -> None:
    assert stream(5).permutation(8).tolist() == [2, 4, 7, 5, 1, 6, 3, 0]


def test_vectors_of_subsets() -> None:
    assert stream(1, 5).subset(20, 6).tolist() == [4, 9, 13, 15, 18, 19]
    assert stream(1, 5).subset(20, 14).tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 14, 16, 17]
    assert stream(4, 1, 9).subset(1 << 40, 3).tolist() == [485963968771, 1040916382988, 1086074969817]
    large = stream(1, 9).subset(100_003, 10_000)
    assert large[:3].tolist() == [1, 20, 21]
    digest = hashlib.sha256(large.astype("<i8").tobytes()).hexdigest()
    assert digest == "6c6c63f30a06fea09c2e99564f9ee2a018b59411204b96b8e3eaa0450d9ac97f"


@given(bound=st.integers(1, 2**64), round_=st.integers(0, 1000))
@settings(deadline=None)
@example(bound=1, round_=0)
@example(bound=2**63 + 1, round_=3)
@example(bound=2**64, round_=3)
def test_integer_takes_the_highest_bits_and_rejects(bound: int, round_: int) -> None:
    drawn, words = stream(2, round_), reference.words(SEED, 2, round_, 0)
    assert [drawn.integer(bound) for _ in range(4)] == [reference.integer(words, bound) for _ in range(4)]


@st.composite
def subsets_asked_for(draw: st.DrawFn) -> tuple[int, int]:
    population = draw(st.integers(1, 3000) | st.sampled_from([2**31 + 1, 2**32 - 1, 2**32]))
    return population, draw(st.integers(0, min(population, 3000) if population <= 3000 else 700))


@given(asked=subsets_asked_for(), round_=st.integers(0, 2**40))
@example(asked=(1, 0), round_=0)
@example(asked=(1, 1), round_=0)
@example(asked=(2, 1), round_=0)
@example(asked=(2, 2), round_=0)
@example(asked=(3, 2), round_=0)
@example(asked=(1027, 513), round_=1)
@example(asked=(1027, 514), round_=1)
@example(asked=(2001, 1000), round_=1)
@example(asked=(2**31 + 1, 601), round_=2)
@example(asked=(2**32, 513), round_=2)
@example(asked=(2**32 + 1, 5), round_=2)
@example(asked=(2**33 - 1, 700), round_=2)
@example(asked=(2**40, 1), round_=2)
def test_subset_is_the_first_distinct_values_of_the_documented_sequence(
    asked: tuple[int, int], round_: int
) -> None:
    drawn = stream(1, round_).subset(*asked)
    assert drawn.dtype == np.int64
    assert drawn.tolist() == reference.subset(reference.words(SEED, 1, round_, 0), *asked)


@pytest.mark.parametrize(
    ("population", "size"), [(200_000, 40_000), (200_000, 150_000), (200_000, 3_000), (90_000, 45_000)]
)
@pytest.mark.parametrize("share", [0.5, 1.0, 2.0])
def test_a_large_subset_depends_on_no_pass_s_length(
    monkeypatch: pytest.MonkeyPatch, population: int, size: int, share: float
) -> None:
    monkeypatch.setattr(randomness, "_first_pass", lambda _, size: int(share * size))
    right = reference.subset(reference.words(SEED, 1, 7, 0), population, size)
    assert stream(1, 7).subset(population, size).tolist() == right


@pytest.mark.parametrize(("population", "size"), [(5, 6), (5, -1), (0, 1)])
def test_a_subset_that_does_not_exist_is_an_error(population: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"a subset of {size} from {population} does not exist"):
        stream(1).subset(population, size)


@pytest.mark.parametrize(("population", "size"), [(6, 3), (6, 2), (6, 4), (5, 1)])
def test_all_subsets_of_a_small_set_are_equally_likely(population: int, size: int) -> None:
    counts = dict.fromkeys(itertools.combinations(range(population), size), 0)
    draws = 200 * len(counts)
    for round_ in range(draws):
        counts[tuple(stream(1, round_).subset(population, size).tolist())] += 1
    mean = draws / len(counts)
    statistic = sum((count - mean) ** 2 / mean for count in counts.values())
    assert statistic < chi_square_bound(len(counts) - 1)


@pytest.mark.parametrize(
    ("population", "size", "draws"), [(50, 7, 4000), (50, 43, 4000), (1500, 600, 400), (2000, 1400, 400)]
)
def test_single_coordinates_are_equally_likely(population: int, size: int, draws: int) -> None:
    counts = np.zeros(population)
    for round_ in range(draws):
        counts[stream(1, round_).subset(population, size)] += 1
    share = size / population
    # Counts of one draw sum to `size`, which leaves population - 1 degrees of freedom.
    statistic = ((counts - draws * share) ** 2).sum() / (draws * share * (1 - share))
    assert statistic * (population - 1) / population < chi_square_bound(population - 1)


def test_integers_below_a_bound_are_equally_likely() -> None:
    drawn = stream(2)
    counts = np.bincount([drawn.integer(11) for _ in range(5500)], minlength=11)
    assert ((counts - 500) ** 2 / 500).sum() < chi_square_bound(10)


def test_streams_of_different_purpose_round_or_worker_share_no_block() -> None:
    blocks: list[bytes] = []
    for purpose, round_, worker in itertools.product(range(1, 9), range(6), range(5)):
        drawn = stream(purpose, round_, worker).words(16)
        blocks.extend(drawn[start : start + 4].tobytes() for start in range(0, 16, 4))
    assert len(set(blocks)) == len(blocks) == 8 * 6 * 5 * 4


def test_seeds_rounds_and_workers_with_equal_sums_do_not_collide() -> None:
    def first(seed: int, purpose: int, round_: int, worker: int) -> bytes:
        return stream(purpose, round_, worker, seed).words(2).tobytes()

    same_sum = [p for p in itertools.product(range(10), repeat=4) if sum(p) == 9]
    assert len({first(*parts) for parts in same_sum}) == len(same_sum) == math.comb(12, 3)
    # Nor do the halves of the 128-bit seed.
    assert first(1 << 64, 0, 0, 0) != first(1, 0, 0, 0)


def test_numpy_s_global_generator_is_neither_read_nor_moved() -> None:
    def global_state() -> NDArray[np.uint32]:
        state: NDArray[np.uint32] = np.random.get_state(legacy=False)["state"]["key"]  # noqa: NPY002
        return state.copy()

    np.random.seed(1)  # noqa: NPY002
    before = global_state()
    first = stream(1, 4).subset(1000, 300)
    assert (global_state() == before).all()
    np.random.seed(2)  # noqa: NPY002
    assert (stream(1, 4).subset(1000, 300) == first).all()


def test_an_integer_seed_is_little_endian_and_128_bits_long() -> None:
    assert SharedRandomness.from_int(0x0102).seed == b"\x02\x01" + bytes(14)
    with pytest.raises(OverflowError):
        SharedRandomness.from_int(1 << 128)


@pytest.mark.parametrize("length", [0, 15, 17])
def test_a_seed_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"the seed is {length} bytes long; it has 16"):
        SharedRandomness(bytes(length))


def test_fresh_seeds_differ() -> None:
    assert SharedRandomness.fresh().seed != SharedRandomness.fresh().seed


def test_the_numbers_of_purposes_are_those_of_the_protocol() -> None:
    assert {purpose.name: purpose.value for purpose in Purpose} == {
        "COMPRESSOR": 1,
        "RANDOM_OUTPUT": 2,
        "SNAPSHOT": 3,
        "MINIBATCH": 4,
        "INITIALIZATION": 5,
        "PARTITION": 6,
        "SYNTHETIC_DATA": 7,
        "TRAIN_TEST_SPLIT": 8,
        "MODEL_SAMPLING": 9,
        "LOSS_SAMPLING": 10,
        "LOSS_MINIBATCH": 11,
        "DOWNLINK_COMPRESSOR": 12,
        "VALIDATION_SPLIT": 13,
        "TASK_IN_GRADIENT": 14,
        "TASK_IN_LOSS": 15,
        "TASK_IN_EVALUATION": 16,
        "HELD_OUT_SPLIT": 17,
        "AUGMENTATION": 18,
    }
