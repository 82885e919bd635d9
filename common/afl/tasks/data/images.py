"""What the image tasks share: a source of images and labels, divided, split, and turned into tensors."""

from __future__ import annotations

import abc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, ClassVar, Literal, TypeAlias
from urllib.error import URLError

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import DataError
from afl.optional_dependencies import require
from afl.paths import naming_paths
from afl.tasks.base import Classification, TaskContext, WorkerData
from afl.tasks.data.arrays import StoredArray, StoredRows
from afl.tasks.data.partitions import Indices, LabelPartition, partition_by_labels, train_test_split
from afl.tasks.options import DataOptions, SplitOptions


class ImageOptions(SplitOptions):
    """Options of every image task."""

    partition: str | None
    """how the images are divided among the workers"""
    alpha: float = Field(default=0.5, gt=0)
    """concentration of the Dirichlet partition"""


class TorchvisionOptions(ImageOptions, DataOptions):
    """Options of a task that torchvision can fetch."""

    partition: LabelPartition = "label-skew"
    """how the images are divided among the workers"""
    pool: Literal["train", "all"] = "train"
    """divide and split the official training images, or those and the 10,000 test images"""
    download: bool = False
    """fetch missing files through torchvision"""


Pixels: TypeAlias = NDArray[np.uint8] | NDArray[np.float32]


@dataclass(frozen=True)
class ImageSource:
    """A data set of ``count`` labelled images on disk."""

    count: int
    labels: Callable[[Indices], Indices]
    """Those of ascending rows, int64 ``[rows]``."""
    images: Callable[[Indices], Pixels]
    """Those of ascending rows, as the data set stores them: ``[rows, ...]``."""
    writers: NDArray[np.str_] | None = None
    """The name of each row's writer, ``[count]``, where they are known."""

    def all_labels(self) -> Indices:
        """The labels of all rows: int64 ``[n]``."""
        return self.labels(np.arange(self.count, dtype=np.int64))


def labelled(
    labels: Indices, images: Callable[[Indices], Pixels], writers: NDArray[np.str_] | None = None
) -> ImageSource:
    """A source whose labels are held, int64 ``[n]``."""
    return ImageSource(len(labels), labels.__getitem__, images, writers)


def stored(
    images: StoredRows, labels: StoredArray, row: tuple[int, ...], writers: NDArray[np.str_] | None = None
) -> ImageSource:
    """Two stored arrays: uint8 images ``[n, *row]``, read as they are asked for, and labels.

    Raises:
        afl.DataError: if the arrays are of another shape or type.
    """
    expected = (labels.shape[0], *row)
    if images.shape != expected or images.dtype != np.uint8:
        of = "" if labels.path == images.path else f" of {labels.path}"
        raise DataError(
            f"{images.path}: images is {images.dtype} of shape {images.shape} beside "
            f"{labels.shape[0]} labels{of}; uint8 {expected} is needed"
        )
    return labelled(labels.whole().astype(np.int64), images.take, writers)


def concatenated(sources: Sequence[ImageSource]) -> ImageSource:
    """Several sources, one after the other: the official training images, then the official test images."""
    starts = np.cumsum([0, *(source.count for source in sources)])

    def images(rows: Indices) -> Pixels:
        cuts = np.searchsorted(rows, starts)
        parts = zip(sources, starts[:-1], pairwise(cuts), strict=True)
        return np.concatenate([source.images(rows[low:high] - start) for source, start, (low, high) in parts])

    return labelled(np.concatenate([source.all_labels() for source in sources]), images)


class ImageTask(Classification):
    """A classification task over an :class:`ImageSource`.

    A subclass opens the source. Source and partition are kept, for processes that host several workers.
    Without the option ``partition``, it is label-skew with as many workers as classes, else Dirichlet.
    """

    largest = 255
    """The largest value of a pixel that is stored as uint8."""
    mean: tuple[float, ...]
    """Of each channel's brightness, from 0 to 1."""
    std: tuple[float, ...]
    """Standard deviation of each channel's brightness."""

    def __init__(self, classes: int, options: ImageOptions) -> None:
        self.classes = classes
        self._options = options
        self._opened: ImageSource | None = None
        self._divided: tuple[int, bytes, list[Indices]] | None = None

    @abc.abstractmethod
    def open_source(self) -> ImageSource:
        """The data on this machine.

        Raises:
            afl.DataError: if it is missing or damaged.
        """

    def brightness(self, images: Pixels) -> Tensor:
        """Images from 0 to 1: float32 ``[n, channels, height, width]``; float32 images are so already."""
        first = images[:, None] if images.ndim == 3 else np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        brightness = torch.from_numpy(first).float()
        return brightness.div_(self.largest) if images.dtype == np.uint8 else brightness

    def divide(self, source: ImageSource, context: TaskContext) -> list[Indices]:
        """The rows of each worker, each ascending."""
        default = "label-skew" if context.workers == self.classes else "dirichlet"
        return partition_by_labels(
            self._options.partition or default,
            source.all_labels(),
            classes=self.classes,
            workers=context.workers,
            randomness=context.randomness,
            alpha=self._options.alpha,
        )

    @naming_paths(DataError)
    def data(self, worker: int, context: TaskContext) -> WorkerData:
        """The worker's rows, split 80/20: two pairs (inputs float32 ``[n, ...]``, labels int64 ``[n]``)."""
        assert 0 <= worker < context.workers
        if self._options.data_seed is not None:
            context = replace(context, randomness=SharedRandomness.from_int(self._options.data_seed))
        if self._opened is None:
            self._opened = self.open_source()
        source = self._opened
        key = (context.workers, context.randomness.seed)
        if self._divided is None or self._divided[:2] != key:
            self._divided = (*key, self.divide(source, context))
        rows = self._divided[2][worker]
        places = np.arange(len(rows), dtype=np.int64)
        train, test = train_test_split(places, randomness=context.randomness, worker=worker)
        if self._options.evaluate_on == "validation":
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
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return WorkerData(
            *(
                (self.brightness(images[part]).sub_(mean).div_(std), torch.from_numpy(labels[part]))
                for part in (train, test)
            )
        )


class TorchvisionTask(ImageTask):
    """A data set of official training and test images, which torchvision can fetch."""

    local_options = frozenset({"data_dir", "download"})

    title: ClassVar[str]
    """Its name for people."""
    dataset: ClassVar[str]
    """Its name in ``torchvision.datasets``."""
    fetched: ClassVar[str]
    """The folder that torchvision makes."""

    def __init__(self, classes: int, options: TorchvisionOptions) -> None:
        super().__init__(classes, options)
        self.data_dir = options.folder().absolute()
        self.splits = ["train"] if options.pool == "train" else ["train", "test"]
        self._downloads = options.download

    @abc.abstractmethod
    def find(self) -> list[ImageSource] | None:
        """The first complete data on this machine: a source for each of ``splits``."""

    @abc.abstractmethod
    def missing(self) -> str:
        """What was looked for and where, and what to fetch from where."""

    def open_source(self) -> ImageSource:
        """The first complete data found, else a download if the option asks for it."""
        found = self.find()
        if found is None and self._downloads:
            self._download()
            found = self.find()
        if found is None:
            raise DataError(
                f"{self.title} was not found: looked for {self.missing()}, or name another folder with "
                "--data-dir (or AFL_DATA), or start the worker with --task-option download=true"
            )
        return concatenated(found)

    def _download(self) -> None:
        """Moved into place whole, so that another process sees all or nothing; the first to finish wins."""
        torchvision = require("torchvision.datasets", f"download {self.title}")
        place = self.data_dir / self.fetched
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".download-", dir=self.data_dir) as temporary:
                getattr(torchvision, self.dataset)(temporary, download=True)
                if not place.exists():
                    (Path(temporary) / self.fetched).rename(place)
        except (URLError, OSError, RuntimeError) as error:
            if not place.exists():
                folder = self.data_dir.resolve()
                raise DataError(f"could not download {self.fetched} into {folder}: {error}") from error


def decoded(image: Path | IO[bytes], failure: str, mode: str = "RGB") -> NDArray[np.uint8]:
    """An encoded image's pixels: uint8 ``[height, width, 3]``, or ``[height, width]`` in the mode ``L``.

    Raises:
        afl.DataError: with ``failure``, if it cannot be read.
    """
    try:
        with require("PIL.Image", "read images").open(image) as opened:
            return np.asarray(opened.convert(mode))
    except OSError as error:
        raise DataError(f"{failure}: {error}") from error
