"""What the image tasks share: a source of images and labels, divided, split, and turned into tensors."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import DataError
from afl.tasks.base import Classification, TaskContext, WorkerData
from afl.tasks.data.arrays import StoredArray
from afl.tasks.data.partitions import Indices, LabelPartition, partition_by_labels, train_test_split
from afl.tasks.options import SplitOptions


class ImageSource(Protocol):
    """A data set on disk; nothing but the labels is held whole."""

    def labels(self, rows: Indices | None = None) -> Indices:
        """The labels of ``rows`` (ascending), or of all: int64 ``[n]``."""

    def images(self, rows: Indices) -> NDArray[np.uint8] | NDArray[np.float32]:
        """The images of ``rows`` (ascending), as the data set stores them: ``[n, ...]``."""


SourceT = TypeVar("SourceT", bound=ImageSource)


class Labelled:
    """What sources that hold their labels, int64 ``[n]``, have in common."""

    def __init__(self, labels: Indices) -> None:
        self._labels = labels

    def labels(self, rows: Indices | None = None) -> Indices:
        """The labels of ``rows`` (ascending), or of all: int64 ``[n]``."""
        return self._labels if rows is None else self._labels[rows]


class StoredImages(Labelled):
    """Two stored arrays: uint8 images ``[n, *row]``, read as they are asked for, and labels.

    Raises:
        afl.DataError: if the arrays are of another shape or type.
    """

    def __init__(self, images: StoredArray, labels: StoredArray, row: tuple[int, ...]) -> None:
        super().__init__(labels.whole().astype(np.int64))
        self._images = images
        expected = (len(self._labels), *row)
        if images.shape != expected or images.dtype != np.uint8:
            of = "" if labels.path == images.path else f" of {labels.path}"
            raise DataError(
                f"{images.path}: images is {images.dtype} of shape {images.shape} beside "
                f"{len(self._labels)} labels{of}; uint8 {expected} is needed"
            )

    def images(self, rows: Indices) -> NDArray[np.uint8]:
        """The images of ``rows`` (ascending): uint8 ``[n, *row]``, 0 to 255."""
        return self._images.take(rows)


class ImageTask(Classification, Generic[SourceT]):
    """A classification task over an :class:`ImageSource`.

    A subclass opens the source and makes the network's input from images.
    Source and partition are kept, for processes that host several workers.

    Args:
        partition: by the labels; ``None`` is label-skew with as many workers as classes, else Dirichlet.
        alpha: concentration of the Dirichlet partition.
        split: what to evaluate on, and the data's own seed.
    """

    def __init__(
        self, classes: int, *, partition: LabelPartition | None, alpha: float, split: SplitOptions
    ) -> None:
        self.classes = classes
        self._split = split
        self._partition = partition
        self._alpha = alpha
        self._opened: SourceT | None = None
        self._divided: tuple[int, bytes, list[Indices]] | None = None

    @abc.abstractmethod
    def open_source(self) -> SourceT:
        """The data on this machine.

        Raises:
            afl.DataError: if it is missing or damaged.
        """

    @abc.abstractmethod
    def inputs(self, images: NDArray[np.uint8] | NDArray[np.float32]) -> Tensor:
        """The network's input, float32 ``[n, ...]``, made from images as the source stores them."""

    def divide(self, source: SourceT, context: TaskContext) -> list[Indices]:
        """The rows of each worker, each ascending."""
        default: LabelPartition = "label-skew" if context.workers == self.classes else "dirichlet"
        return partition_by_labels(
            self._partition or default,
            source.labels(),
            classes=self.classes,
            workers=context.workers,
            randomness=context.randomness,
            alpha=self._alpha,
        )

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        """The worker's rows, split 80/20: two pairs (inputs float32 ``[n, ...]``, labels int64 ``[n]``)."""
        assert 0 <= worker < context.workers
        if self._split.data_seed is not None:
            context = replace(context, randomness=SharedRandomness.from_int(self._split.data_seed))
        if self._opened is None:
            self._opened = self.open_source()
        source = self._opened
        key = (context.workers, context.randomness.seed)
        if self._divided is None or self._divided[:2] != key:
            self._divided = (*key, self.divide(source, context))
        rows = self._divided[2][worker]
        places = np.arange(len(rows), dtype=np.int64)
        train, test = train_test_split(places, randomness=context.randomness, worker=worker)
        if self._split.evaluate_on == "validation":
            # The test part stays unseen.
            train, test = train_test_split(
                train, randomness=context.randomness, worker=worker, purpose=Purpose.VALIDATION_SPLIT
            )
        labels = source.labels(rows)
        if int(labels.min()) < 0 or int(labels.max()) >= self.classes:
            raise DataError(
                f"worker {worker} has labels from {labels.min()} to {labels.max()}; "
                f"the model has {self.classes} classes, 0 to {self.classes - 1}"
            )
        images = source.images(rows)
        return WorkerData(
            train=(self.inputs(images[train]), torch.from_numpy(labels[train])),
            test=(self.inputs(images[test]), torch.from_numpy(labels[test])),
        )


class Concatenated(Labelled):
    """Several sources, one after the other: the official training images, then the official test images."""

    def __init__(self, sources: Sequence[ImageSource]) -> None:
        self._sources = sources
        super().__init__(np.concatenate([source.labels() for source in sources]))
        self._starts = np.cumsum([0, *(len(source.labels()) for source in sources)])

    def images(self, rows: Indices) -> NDArray[np.uint8]:
        """The images of ``rows`` (ascending): uint8 ``[n, ...]``."""
        cuts = np.searchsorted(rows, self._starts)
        return np.concatenate(
            [
                source.images(rows[low:high] - start)
                for source, start, low, high in zip(
                    self._sources, self._starts[:-1], cuts[:-1], cuts[1:], strict=True
                )
            ]
        ).astype(np.uint8, copy=False)


def standardized(brightness: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """``(brightness - mean) / std`` for each channel, in place.

    Args:
        brightness: float32 ``[n, channels, height, width]``, 0 to 1.
        mean: one for each channel.
        std: one for each channel.
    """
    shape = (1, len(mean), 1, 1)
    return brightness.sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(std).view(shape))
