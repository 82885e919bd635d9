"""``cifar10``: 32x32 colour images in ten classes (Krizhevsky, 2009), a two-block CNN.

The paper's second label-skewed experiment (section "Communication Efficiency with Compression").
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import nn

from afl.errors import DataError
from afl.optional_dependencies import require
from afl.paths import kind_of
from afl.tasks.data.arrays import StoredArray, StoredRows, npz_names
from afl.tasks.data.images import (
    ImageSource,
    TorchvisionOptions,
    TorchvisionTask,
    decoded,
    labelled,
    stored,
)
from afl.tasks.data.models import cifar_cnn
from afl.tasks.data.partitions import Indices
from afl.tasks.options import parse_options

_BATCHES = "cifar-10-batches-py"
_NPZ_NAMES = ("{}.npz", "cifar10-{}.npz")
_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_CLASSES = 10


class Cifar10Options(TorchvisionOptions):
    """Options of ``cifar10``."""

    channels: tuple[PositiveInt, PositiveInt] = (32, 64)
    """of the CNN's two blocks"""


class Cifar10(TorchvisionTask):
    """CIFAR-10 as in the paper, from whichever layout is on disk.

    In ``data_dir/cifar10``, then in ``data_dir``: folders ``train/<class>/*.png`` (and ``test/...``),
    their classes numbered in the order of their names; ``train.npz`` or ``cifar10-train.npz`` (and with
    ``test``) with ``labels`` and either ``images`` (uint8 ``[n, 32, 32, 3]``) or ``webp`` and ``offsets``
    (see :class:`_Sheets`); torchvision's ``cifar-10-batches-py``.
    """

    # Of the training images' brightness, for red, green and blue.
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    title, dataset, fetched = "CIFAR-10", "CIFAR10", _BATCHES

    def __init__(self, **options: object) -> None:
        self.options = parse_options(Cifar10Options, options)
        super().__init__(_CLASSES, self.options)
        self._folders = [self.data_dir / "cifar10", self.data_dir]

    def model(self) -> nn.Module:
        """The CNN; input ``[n, 3, 32, 32]``."""
        return cifar_cnn(self.options.channels, self.classes)

    def find(self) -> list[ImageSource] | None:
        """The first complete layout."""
        for folder in self._folders:
            if all(kind_of(folder / split) == "folder" for split in self.splits):
                return [_image_folder(folder / split) for split in self.splits]
            for name in _NPZ_NAMES:
                files = [folder / name.format(split) for split in self.splits]
                if all(map(kind_of, files)):
                    return [_npz_source(file) for file in files]
            if kind_of(folder / _BATCHES):
                return [_batches(folder, train=split == "train") for split in self.splits]
        return None

    def missing(self) -> str:
        """The layouts, and what torchvision reads."""
        names = ["{}/<class>/*.png", *_NPZ_NAMES]
        wanted = [name.format(split) for name in names for split in self.splits]
        return (
            f"{', '.join([*wanted, _BATCHES])} in {', '.join(map(str, self._folders))}. Download "
            f"cifar-10-python.tar.gz from {_SOURCE} and unpack it into {self._folders[0]}"
        )


def _image_folder(root: Path) -> ImageSource:
    """``<root>/<class>/*.png``; only the asked images are decoded."""
    classes = sorted(folder for folder in root.iterdir() if folder.is_dir())
    if len(classes) != _CLASSES:
        raise DataError(f"{root} has {len(classes)} class folders; CIFAR-10 has {_CLASSES}")
    files = [(label, file) for label, folder in enumerate(classes) for file in sorted(folder.glob("*.png"))]

    def images(rows: Indices) -> NDArray[np.uint8]:
        kept = np.empty((len(rows), 32, 32, 3), dtype=np.uint8)
        for place, row in enumerate(rows):
            file = files[row][1]
            pixels = decoded(file, f"{file} cannot be read as an image")
            if pixels.shape != (32, 32, 3):
                size = f"{pixels.shape[1]} x {pixels.shape[0]}"
                raise DataError(f"{file} is {size} pixels; CIFAR-10's are 32 x 32")
            kept[place] = pixels
        return kept

    return labelled(np.array([label for label, _ in files], dtype=np.int64), images)


def _npz_source(path: Path) -> ImageSource:
    images = _Sheets(path) if "webp" in npz_names(path) else StoredArray(path, "images")
    return stored(images, StoredArray(path, "labels"), (32, 32, 3))


class _Sheets(StoredRows):
    """``webp``: all sheets end to end (uint8), each of 10 x 10 images, row by row; ``offsets``: their
    bounds."""

    def __init__(self, path: Path) -> None:
        self._offsets: Indices = StoredArray(path, "offsets").whole().astype(np.int64)
        sheets, labels = len(self._offsets) - 1, StoredArray(path, "labels").shape[0]
        if sheets * 100 != labels:
            raise DataError(f"{path} has {sheets} sheets of 100 images but {labels} labels")
        super().__init__(path, (labels, 32, 32, 3), np.dtype(np.uint8))

    def read(self, rows: Indices) -> NDArray[np.uint8]:
        kept = np.empty((len(rows), 32, 32, 3), dtype=np.uint8)
        packed: NDArray[np.uint8] = StoredArray(self.path, "webp").whole()
        for sheet in np.unique(rows // 100).tolist():
            encoded = io.BytesIO(packed[self._offsets[sheet] : self._offsets[sheet + 1]].tobytes())
            pixels = decoded(encoded, f"{self.path}: sheet {sheet} cannot be read as an image")
            if pixels.shape != (320, 320, 3):
                raise DataError(f"{self.path}: sheet {sheet} is not 320 x 320 pixels")
            images = pixels.reshape(10, 32, 10, 32, 3).transpose(0, 2, 1, 3, 4).reshape(100, 32, 32, 3)
            places = rows // 100 == sheet
            kept[places] = images[rows[places] % 100]
        return kept


def _batches(folder: Path, *, train: bool) -> ImageSource:
    """torchvision's reading of the official files, which are pickles: their md5 is checked before."""
    torchvision = require("torchvision.datasets", f"read {_BATCHES}")
    try:
        loaded: Any = torchvision.CIFAR10(str(folder), train=train)
    except RuntimeError as error:
        raise DataError(
            f"{folder / _BATCHES} is incomplete or damaged (md5): unpack it again from {_SOURCE}"
        ) from error
    return labelled(np.asarray(loaded.targets, dtype=np.int64), loaded.data.__getitem__)
