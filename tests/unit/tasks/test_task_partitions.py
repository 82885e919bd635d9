from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afl.core.randomness import Purpose, SharedRandomness, Stream
from afl.errors import ConfigError, DataError
from afl.tasks.data.partitions import (
    Indices,
    by_writer,
    dirichlet,
    iid,
    label_skew,
    partition_by_labels,
    train_test_split,
)

seeds = st.integers(0, 2**128 - 1)


def partition_stream(seed: int) -> Stream:
    return SharedRandomness.from_int(seed).stream(Purpose.PARTITION)


def assert_divides(parts: list[Indices], count: int) -> None:
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))


@settings(deadline=None, max_examples=40)
@given(seed=seeds, classes=st.integers(2, 6), counts=st.data())
def test_label_skew_gives_each_worker_80_percent_of_its_own_label(
    seed: int, classes: int, counts: st.DataObject
) -> None:
    sizes = counts.draw(st.lists(st.integers(10, 60), min_size=classes, max_size=classes))
    labels = np.repeat(np.arange(classes), sizes)
    parts = label_skew(labels, classes=classes, workers=classes, stream=partition_stream(seed))
    assert_divides(parts, len(labels))
    table = np.array([np.bincount(labels[part], minlength=classes) for part in parts])
    for label, size in enumerate(sizes):
        others = np.delete(table[:, label], label)
        assert table[label, label] == round(0.8 * size)
        assert others.max() - others.min() <= 1


def test_label_skew_is_the_papers_exactly() -> None:
    labels = np.tile(np.arange(10), 6000)
    parts = label_skew(labels, classes=10, workers=10, stream=partition_stream(1))
    table = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    assert (np.diag(table) == 4800).all()
    assert table.sum(axis=1).tolist() == [6000] * 10
    assert set(table[~np.eye(10, dtype=bool)].tolist()) == {133, 134}


def test_label_skew_refuses_another_number_of_workers() -> None:
    with pytest.raises(ConfigError, match="3 workers and 10 classes"):
        label_skew(np.arange(10), classes=10, workers=3, stream=partition_stream(1))


def test_label_skew_refuses_an_empty_worker() -> None:
    with pytest.raises(DataError, match=r"worker 2 gets none of the 2 examples; .* 1, 1, 0"):
        label_skew(np.array([0, 1]), classes=3, workers=3, stream=partition_stream(1))


@settings(deadline=None, max_examples=40)
@given(names=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60))
def test_by_writer_takes_the_largest_writers_ties_by_name(names: list[str]) -> None:
    distinct = sorted(set(names), key=lambda name: (-names.count(name), name))
    for workers in range(1, len(distinct) + 1):
        parts = by_writer(names, workers=workers)
        for part, writer in zip(parts, distinct, strict=False):
            assert part.tolist() == [row for row, name in enumerate(names) if name == writer]
        assert len(parts) == workers


def test_by_writer_refuses_more_workers_than_writers() -> None:
    with pytest.raises(ConfigError, match="2 writers and the run 3 workers"):
        by_writer(["b", "a", "b"], workers=3)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, workers=st.integers(1, 5), alpha=st.floats(0.05, 100))
def test_dirichlet_divides_or_names_an_empty_worker(seed: int, workers: int, alpha: float) -> None:
    labels = np.arange(400) % 4
    try:
        parts = dirichlet(labels, classes=4, workers=workers, alpha=alpha, stream=partition_stream(seed))
    except DataError as error:
        assert re.search(r"counts would be .*\b0\b", str(error))  # noqa: PT017
    else:
        assert_divides(parts, 400)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_dirichlet_proportions_have_the_dirichlet_moments(alpha: float) -> None:
    workers, classes, each = 4, 600, 200
    labels = np.repeat(np.arange(classes), each)
    parts = dirichlet(labels, classes=classes, workers=workers, alpha=alpha, stream=partition_stream(3))
    shares = np.array([np.bincount(labels[part], minlength=classes) for part in parts]) / each
    mean = 1 / workers
    beta_variance = mean * (1 - mean) / (workers * alpha + 1)
    variance = beta_variance + (mean * (1 - mean) - beta_variance) / each
    assert shares.mean(axis=1) == pytest.approx([mean] * workers, abs=5 * np.sqrt(variance / classes))
    assert shares.var() == pytest.approx(variance, rel=0.12)


def test_dirichlet_with_a_huge_alpha_is_nearly_even_and_with_a_tiny_one_keeps_classes_whole() -> None:
    labels = np.repeat(np.arange(3), 3000)
    even = dirichlet(labels, classes=3, workers=3, alpha=1e9, stream=partition_stream(1))
    assert [len(part) for part in even] == pytest.approx([3000] * 3, rel=0.1)
    with pytest.raises(
        DataError, match=r"worker \d+ gets none of the 9000 examples; .*50 workers, \d+ of them"
    ):
        dirichlet(labels, classes=3, workers=50, alpha=1e-9, stream=partition_stream(1))


@settings(deadline=None, max_examples=40)
@given(seed=seeds, count=st.integers(1, 200), workers=st.integers(1, 20))
def test_iid_divides_evenly(seed: int, count: int, workers: int) -> None:
    if count < workers:
        with pytest.raises(DataError, match=f"worker {count} gets none of the {count} examples"):
            iid(count, workers=workers, stream=partition_stream(seed))
        return
    parts = iid(count, workers=workers, stream=partition_stream(seed))
    assert_divides(parts, count)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(seed=seeds, count=st.integers(2, 300), worker=st.integers(0, 1000))
def test_train_test_split_is_80_20_and_divides(seed: int, count: int, worker: int) -> None:
    rows = np.arange(count, dtype=np.int64) * 3
    train, test = train_test_split(rows, randomness=SharedRandomness.from_int(seed), worker=worker)
    assert sorted([*train.tolist(), *test.tolist()]) == rows.tolist()
    assert len(test) == max(1, round(count / 5))


@pytest.mark.parametrize("count", [0, 1])
def test_train_test_split_refuses_fewer_than_two(count: int) -> None:
    with pytest.raises(DataError, match=rf"worker 4 has {count} example"):
        train_test_split(np.arange(count), randomness=SharedRandomness.from_int(1), worker=4)


LABELS = np.array([0, 1, 2] * 5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("label-skew", [[2, 3, 6, 9, 12], [0, 1, 4, 10, 13], [5, 7, 8, 11, 14]]),
        ("dirichlet", [[1, 4, 6, 7, 8, 9, 10, 13, 14], [3, 11], [0, 2, 5, 12]]),
        ("iid", [[4, 5, 6, 9, 11], [3, 7, 8, 12, 14], [0, 1, 2, 10, 13]]),
    ],
)
def test_vectors(name: str, expected: list[list[int]]) -> None:
    """The same on every machine and with every version: these are what the first implementation drew."""
    parts = partition_by_labels(
        name,  # type: ignore[arg-type]
        LABELS,
        classes=3,
        workers=3,
        randomness=SharedRandomness.from_int(2024),
        alpha=1.0,
    )
    assert [part.tolist() for part in parts] == expected


def test_split_vector() -> None:
    train, test = train_test_split(np.arange(10), randomness=SharedRandomness.from_int(2024), worker=3)
    assert (train.tolist(), test.tolist()) == ([1, 2, 3, 4, 6, 7, 8, 9], [0, 5])


def test_workers_have_different_splits() -> None:
    rows = np.arange(100)
    randomness = SharedRandomness.from_int(1)
    splits = [train_test_split(rows, randomness=randomness, worker=worker)[1].tolist() for worker in range(5)]
    assert len({tuple(split) for split in splits}) == 5
