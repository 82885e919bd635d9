"""``cifar10``: 32x32 colour images in ten classes (Krizhevsky, 2009), a two-block CNN.

The paper's second label-skewed experiment (section "Communication Efficiency with Compression").
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from afl.errors import DataError
from afl.optional_dependencies import require
from afl.tasks.data.arrays import npz_array, npz_names
from afl.tasks.data.downloads import download_into
from afl.tasks.data.images import Concatenated, ImageSource, ImageTask, Labelled, StoredImages, standardized
from afl.tasks.data.models import cifar_cnn
from afl.tasks.data.partitions import Indices
from afl.tasks.options import DataOptions, SplitOptions, parse_options

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the training images' brightness, for red, green and blue."""

_BATCHES = "cifar-10-batches-py"
_NPZ_NAMES = ("{}.npz", "cifar10-{}.npz")
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
    their classes numbered in the order of their names; ``train.npz`` or ``cifar10-train.npz`` (and with
    ``test``) with ``labels`` and either ``images`` (uint8 ``[n, 32, 32, 3]``) or ``webp`` and ``offsets``
    (see :class:`_SheetImages`); torchvision's ``cifar-10-batches-py``.
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
            wanted = [f"{split}/<class>/*.png" for split in splits] + [
                name.format(split) for name in _NPZ_NAMES for split in splits
            ]
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
            for name in _NPZ_NAMES:
                files = [folder / name.format(split) for split in splits]
                if all(file.is_file() for file in files):
                    return [_npz_source(file) for file in files]
            if (folder / _BATCHES).is_dir():
                return [_Batches(folder, train=split == "train") for split in splits]
        return None


class _ImageFolder(Labelled):
    """``<root>/<class>/*.png``; only the asked images are decoded."""

    def __init__(self, root: Path) -> None:
        classes = sorted(folder for folder in root.iterdir() if folder.is_dir())
        if len(classes) != _CLASSES:
            raise DataError(f"{root} has {len(classes)} class folders; CIFAR-10 has {_CLASSES}")
        files = [sorted(folder.glob("*.png")) for folder in classes]
        self._files = [file for group in files for file in group]
        super().__init__(np.repeat(np.arange(_CLASSES, dtype=np.int64), [len(group) for group in files]))
        self._pillow = require("PIL.Image", "read PNG images")

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


def _npz_source(path: Path) -> ImageSource:
    if "webp" in npz_names(path):
        return _SheetImages(path)
    return StoredImages(npz_array(path, "images"), npz_array(path, "labels"), (32, 32, 3))


class _SheetImages(Labelled):
    """``webp``: all sheets end to end (uint8), each of 10 x 10 images, row by row; ``offsets``: their bounds.

    As with a :class:`afl.tasks.data.arrays.StoredArray`, the second call of :meth:`images` keeps all images.
    """

    _SIDE = 10

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pillow = require("PIL.Image", "read WebP images")
        self._offsets: Indices = npz_array(path, "offsets").whole().astype(np.int64)
        super().__init__(npz_array(path, "labels").whole().astype(np.int64))
        self._taken = False
        self._whole: NDArray[np.uint8] | None = None
        if (len(self._offsets) - 1) * self._SIDE**2 != len(self._labels):
            raise DataError(
                f"{path} has {len(self._offsets) - 1} sheets of {self._SIDE**2} images but "
                f"{len(self._labels)} labels"
            )

    def images(self, rows: Indices) -> NDArray[np.uint8]:
        if self._taken and self._whole is None:
            self._whole = self._decoded(np.arange(len(self._labels), dtype=np.int64))
        self._taken = True
        return self._decoded(rows) if self._whole is None else self._whole[rows]

    def _decoded(self, rows: Indices) -> NDArray[np.uint8]:
        kept = np.empty((len(rows), 32, 32, 3), dtype=np.uint8)
        packed: NDArray[np.uint8] = npz_array(self._path, "webp").whole()
        sheets = rows // self._SIDE**2
        for sheet in np.unique(sheets).tolist():
            places = sheets == sheet
            part = packed[self._offsets[sheet] : self._offsets[sheet + 1]]
            kept[places] = self._unpacked(part.tobytes(), sheet)[rows[places] % self._SIDE**2]
        return kept

    def _unpacked(self, data: bytes, sheet: int) -> NDArray[np.uint8]:
        try:
            with self._pillow.open(io.BytesIO(data)) as image:
                pixels: NDArray[np.uint8] = np.asarray(image.convert("RGB"))
        except OSError as error:
            raise DataError(f"{self._path}: sheet {sheet} cannot be read as an image: {error}") from error
        side = self._SIDE
        if pixels.shape != (32 * side, 32 * side, 3):
            raise DataError(f"{self._path}: sheet {sheet} is not {32 * side} x {32 * side} pixels")
        return pixels.reshape(side, 32, side, 32, 3).transpose(0, 2, 1, 3, 4).reshape(side**2, 32, 32, 3)


class _Batches(Labelled):
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
        super().__init__(np.asarray(loaded.targets, dtype=np.int64))

    def images(self, rows: Indices) -> NDArray[np.uint8]:
        return self._images[rows]
