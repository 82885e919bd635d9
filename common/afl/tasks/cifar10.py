"""``cifar10``: 32x32 colour images in ten classes (Krizhevsky, 2009), a two-block CNN.

The paper's second label-skewed experiment (section "Communication Efficiency with Compression").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from afl.errors import DataError
from afl.extras import require
from afl.tasks.arrays import StoredArray, npz_array
from afl.tasks.downloads import download_into
from afl.tasks.images import Concatenated, ImageSource, ImageTask, standardized
from afl.tasks.models import cifar_cnn
from afl.tasks.options import DataOptions, SplitOptions, parse_options
from afl.tasks.partitions import Indices

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the training images' brightness, for red, green and blue."""

_BATCHES = "cifar-10-batches-py"
_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_CLASSES = 10


class Cifar10Options(DataOptions, SplitOptions):
    """Options of ``cifar10``."""

    partition: Literal["label-skew", "dirichlet", "iid"] = Field(
        default="label-skew", description="how the images are divided among the workers"
    )
    alpha: float = Field(default=0.5, gt=0, description="concentration of the Dirichlet partition")
    pool: Literal["train", "all"] = Field(
        default="train",
        description="divide and split the 50,000 training images, or those and the 10,000 test images",
    )
    channels: tuple[PositiveInt, PositiveInt] = Field(default=(32, 64), description="of the CNN's two blocks")
    download: bool = Field(default=False, description="fetch missing files through torchvision")


class Cifar10(ImageTask[Concatenated]):
    """CIFAR-10 as in the paper, from whichever layout is on disk.

    In ``data_dir/cifar10``, then in ``data_dir``: folders ``train/<class>/*.png`` (and ``test/...``),
    their classes numbered in the order of their names; ``train.npz`` (and ``test.npz``) with ``images``
    (uint8 ``[n, 32, 32, 3]``) and ``labels``; torchvision's ``cifar-10-batches-py``.
    """

    local_options = frozenset({"data_dir", "download"})

    def __init__(self, **options: object) -> None:
        self.options = parse_options(Cifar10Options, options)
        super().__init__(
            _CLASSES, partition=self.options.partition, alpha=self.options.alpha, split=self.options
        )

    def model(self) -> nn.Module:
        """The CNN; input ``[n, 3, 32, 32]``."""
        return cifar_cnn(self.options.channels, self.classes)

    def open_source(self) -> Concatenated:
        """The first complete layout found."""
        found = self._find()
        if found is None and self.options.download:
            torchvision = require("torchvision.datasets", "download CIFAR-10")
            download_into(
                self.options.folder(),
                _BATCHES,
                lambda root: torchvision.CIFAR10(str(root), download=True),
            )
            found = self._find()
        if found is None:
            splits = self._splits()
            wanted = [f"{split}/<class>/*.png" for split in splits] + [f"{split}.npz" for split in splits]
            raise DataError(
                f"CIFAR-10 was not found: looked for {', '.join([*wanted, _BATCHES])} in "
                f"{', '.join(str(place) for place in self._folders())}. Download cifar-10-python.tar.gz from "
                f"{_SOURCE} and unpack it into {self._folders()[0]}, or name another folder with "
                "--data-dir (or AFL_DATA), or start the worker with --task-option download=true"
            )
        return Concatenated(found)

    def inputs(self, images: NDArray[np.uint8] | NDArray[np.float32]) -> Tensor:
        """Standardized brightness, ``[n, 3, 32, 32]``, contiguous."""
        channels_first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        return standardized(torch.from_numpy(channels_first).float().div_(255), _MEAN, _STD)

    def _splits(self) -> list[str]:
        return ["train"] if self.options.pool == "train" else ["train", "test"]

    def _folders(self) -> list[Path]:
        own = self.options.folder().absolute()
        return [own / "cifar10", own]

    def _find(self) -> list[ImageSource] | None:
        splits = self._splits()
        for folder in self._folders():
            if all((folder / split).is_dir() for split in splits):
                return [_ImageFolder(folder / split) for split in splits]
            if all((folder / f"{split}.npz").is_file() for split in splits):
                return [_NpzImages(folder / f"{split}.npz") for split in splits]
            if (folder / _BATCHES).is_dir():
                return [_Batches(folder, train=split == "train") for split in splits]
        return None


class _ImageFolder:
    """``<root>/<class>/*.png``; only the asked images are decoded."""

    def __init__(self, root: Path) -> None:
        classes = sorted(folder for folder in root.iterdir() if folder.is_dir())
        if len(classes) != _CLASSES:
            raise DataError(f"{root} has {len(classes)} class folders; CIFAR-10 has {_CLASSES}")
        files = [sorted(folder.glob("*.png")) for folder in classes]
        self._files = [file for group in files for file in group]
        self._labels: Indices = np.repeat(
            np.arange(_CLASSES, dtype=np.int64), [len(group) for group in files]
        )
        self._pillow = require("PIL.Image", "read PNG images")

    def labels(self, rows: Indices | None = None) -> Indices:
        return self._labels if rows is None else self._labels[rows]

    def images(self, rows: Indices) -> NDArray[np.uint8]:
        kept = np.empty((len(rows), 32, 32, 3), dtype=np.uint8)
        for place, row in enumerate(rows):
            kept[place] = self._decoded(self._files[row])
        return kept

    def _decoded(self, file: Path) -> NDArray[np.uint8]:
        try:
            with self._pillow.open(file) as image:
                pixels: NDArray[np.uint8] = np.asarray(image.convert("RGB"))
        except OSError as error:
            raise DataError(f"{file} cannot be read as an image: {error}") from error
        if pixels.shape != (32, 32, 3):
            raise DataError(f"{file} is {pixels.shape[1]} x {pixels.shape[0]} pixels; CIFAR-10's are 32 x 32")
        return pixels


class _NpzImages:
    """``images`` uint8 ``[n, 32, 32, 3]`` and ``labels`` of an npz file."""

    def __init__(self, path: Path) -> None:
        self._images: StoredArray = npz_array(path, "images")
        self._labels: Indices = npz_array(path, "labels").whole().astype(np.int64)
        if self._images.shape != (len(self._labels), 32, 32, 3) or self._images.dtype != np.uint8:
            raise DataError(
                f"{path}: images is {self._images.dtype} {self._images.shape} beside {len(self._labels)} "
                f"labels; uint8 ({len(self._labels)}, 32, 32, 3) is needed"
            )

    def labels(self, rows: Indices | None = None) -> Indices:
        return self._labels if rows is None else self._labels[rows]

    def images(self, rows: Indices) -> NDArray[np.uint8]:
        return self._images.take(rows)


class _Batches:
    """torchvision's reading of the official files, which are pickles: their md5 is checked before."""

    def __init__(self, folder: Path, *, train: bool) -> None:
        torchvision = require("torchvision.datasets", f"read {_BATCHES}")
        try:
            loaded: Any = torchvision.CIFAR10(str(folder), train=train)
        except RuntimeError as error:
            raise DataError(
                f"{folder / _BATCHES} is incomplete or damaged (md5): unpack it again from {_SOURCE}"
            ) from error
        self._images: NDArray[np.uint8] = loaded.data
        self._labels: Indices = np.asarray(loaded.targets, dtype=np.int64)

    def labels(self, rows: Indices | None = None) -> Indices:
        return self._labels if rows is None else self._labels[rows]

    def images(self, rows: Indices) -> NDArray[np.uint8]:
        return self._images[rows]
