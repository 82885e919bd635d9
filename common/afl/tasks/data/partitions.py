"""How a data set is divided among the workers, and each worker's part into training and test examples.

Every function is pure: labels or writers and a stream of shared randomness in, one ascending int64 index
array for each worker out. Each example is given to at most one worker. Only additions, multiplications,
divisions and comparisons of doubles are used, which IEEE 754 fixes, so every machine computes the same
partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afl.core.randomness import Purpose, SharedRandomness, Stream
from afl.errors import ConfigError, DataError

Indices: TypeAlias = NDArray[np.int64]

LabelPartition: TypeAlias = Literal["label-skew", "dirichlet", "iid"]
"""The partitions that need nothing but labels."""


def partition_by_labels(
    name: str,
    labels: Indices,
    *,
    classes: int,
    workers: int,
    randomness: SharedRandomness,
    alpha: float,
) -> list[Indices]:
    """The partition called ``name``, drawn from the run's partition stream; ``alpha`` is Dirichlet's.

    Raises:
        afl.ConfigError: if the partition does not fit the number of workers.
        afl.DataError: if a label is not one of ``0..classes-1``, or a worker would get nothing.
    """
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise DataError(
            f"the data has labels from {labels.min()} to {labels.max()}, but the task has {classes} classes, "
            f"0 to {classes - 1}"
        )
    stream = randomness.stream(Purpose.PARTITION)
    if name == "label-skew":
        return label_skew(labels, classes=classes, workers=workers, stream=stream)
    if name == "dirichlet":
        return dirichlet(labels, classes=classes, workers=workers, alpha=alpha, stream=stream)
    assert name == "iid", name
    return iid(len(labels), workers=workers, stream=stream)


def label_skew(labels: Indices, *, classes: int, workers: int, stream: Stream) -> list[Indices]:
    """Worker ``i`` gets 80 % of label ``i``; the other 20 % go to the other workers in equal parts.

    This is the paper's partition for Fashion-MNIST and CIFAR-10 (appendix "Communication Efficiency with
    Compression"). 80 % is rounded to the nearest example; of the rest, the parts larger by one go to workers
    ``i+1, i+2, ...`` (cyclically). One permutation is drawn for each label, in ascending order.

    Raises:
        afl.ConfigError: unless there are as many workers as classes.
        afl.DataError: if a worker would get nothing.
    """
    if workers != classes:
        raise ConfigError(
            f"task.options.partition: label-skew gives each worker its own class, but there are {workers} "
            f"workers and {classes} classes; run with {classes} workers or choose another partition"
        )
    parts: list[list[Indices]] = [[] for _ in range(workers)]
    for own in range(classes):
        examples = np.flatnonzero(labels == own)
        examples = examples[stream.permutation(len(examples))]
        kept = (4 * len(examples) + 2) // 5
        parts[own].append(examples[:kept])
        for step, share in enumerate(np.array_split(examples[kept:], max(workers - 1, 1)), start=1):
            parts[(own + step) % workers].append(share)
    return _checked([np.concatenate(part) for part in parts], len(labels))


def by_writer(writers: Sequence[str] | NDArray[np.str_], *, workers: int) -> list[Indices]:
    """Worker ``i`` gets all examples of the writer with the ``i``-th most examples; others' are left out.

    This is the paper's partition for FEMNIST (section "Scaling with the Number of Workers"). ``writers`` has
    the name of each example's. Equal counts are ordered by it, whatever the order of the data.

    Raises:
        afl.ConfigError: if there are fewer writers than workers.
    """
    names, codes, counts = np.unique(np.asarray(writers), return_inverse=True, return_counts=True)
    if len(names) < workers:
        raise ConfigError(
            f"task.options.partition: by-writer needs a writer for each worker, but the data has "
            f"{len(names)} writers and the run {workers} workers"
        )
    rows = np.argsort(codes, kind="stable").astype(np.int64)
    ends = np.cumsum(counts)
    largest = np.argsort(-counts, kind="stable")[:workers]
    return [rows[ends[code] - counts[code] : ends[code]] for code in largest]


def dirichlet(labels: Indices, *, classes: int, workers: int, alpha: float, stream: Stream) -> list[Indices]:
    """Each class is divided among the workers in proportions drawn from a symmetric Dirichlet(``alpha``).

    Proportions and examples are drawn together, by Blackwell and MacQueen's urn (Annals of Statistics, 1973):
    the ``s``-th example of the class (from 0) copies the worker of an earlier one, uniform among them, with
    probability ``s / (workers * alpha + s)``, and otherwise takes a worker uniformly. This is exactly the
    Dirichlet-multinomial law, without the logarithms and cosines of gamma variates, whose last bits differ
    between machines. One uniform is drawn for each example, class by class.

    Raises:
        afl.DataError: if a worker gets nothing (a small ``alpha``, many workers, few examples).
    """
    owner = np.full(len(labels), -1, dtype=np.int64)
    for label in range(classes):
        examples = np.flatnonzero(labels == label)
        drawn: list[int] = []
        for seen, point in enumerate(stream.uniform(len(examples)).tolist()):
            position = point * (workers * alpha + seen)
            if position < seen:
                drawn.append(drawn[int(position)])
            else:
                drawn.append(min(int((position - seen) / alpha), workers - 1))
        owner[examples] = drawn
    return _checked([np.flatnonzero(owner == worker) for worker in range(workers)], len(labels))


def iid(count: int, *, workers: int, stream: Stream) -> list[Indices]:
    """A random division of ``count`` examples into parts that differ by at most one example.

    Raises:
        afl.DataError: if there are fewer examples than workers.
    """
    return _checked(np.array_split(stream.permutation(count), workers), count)


def train_test_split(
    indices: Indices,
    *,
    randomness: SharedRandomness,
    worker: int,
    purpose: Purpose = Purpose.TRAIN_TEST_SPLIT,
) -> tuple[Indices, Indices]:
    """A worker's examples, 80 % to train on and 20 % to test on (both of the paper's experiments).

    20 % is rounded to the nearest example, and is at least one. Both parts are ascending.

    Raises:
        afl.DataError: if there are fewer than two examples.
    """
    count = len(indices)
    if count < 2:
        raise DataError(
            f"worker {worker} has {count} example(s) in all; at least two are needed, one to train on and "
            "one to test on: use fewer workers, or another partition"
        )
    order = randomness.stream(purpose, worker=worker).permutation(count)
    test = max((count + 2) // 5, 1)
    return np.sort(indices[order[test:]]), np.sort(indices[order[:test]])


def _checked(parts: Sequence[Indices], examples: int) -> list[Indices]:
    """``parts`` in ascending order each, refused if one is empty."""
    counts = [len(part) for part in parts]
    if 0 in counts:
        shown = ", ".join(map(str, counts[:20]))
        if len(counts) > 20:
            shown += f", ... ({len(counts)} workers, {counts.count(0)} of them empty)"
        raise DataError(
            f"worker {counts.index(0)} gets none of the {examples} examples; the workers' counts would be "
            f"{shown}: use fewer workers, a larger task.options.alpha, or another partition"
        )
    return [np.sort(part).astype(np.int64) for part in parts]
