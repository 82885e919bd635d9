"""``fashion-mnist``: 28x28 images of clothes in ten classes (Xiao, Rasul, Vollgraf, 2017), a three-layer MLP.

The paper's first label-skewed experiment (section "Communication Efficiency with Compression").
"""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt
from torch import nn

from afl.tasks.data.arrays import StoredArray
from afl.tasks.data.images import ImageSource, TorchvisionOptions, TorchvisionTask, stored
from afl.tasks.data.models import mlp
from afl.tasks.options import parse_options

_DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where the Debian package dataset-fashion-mnist puts the files."""

_SOURCE = "https://github.com/zalandoresearch/fashion-mnist"


class FashionMnistOptions(TorchvisionOptions):
    """Options of ``fashion-mnist``."""

    hidden: tuple[PositiveInt, ...] = (256, 128)
    """widths of the MLP's hidden layers"""


class FashionMnist(TorchvisionTask):
    """Fashion-MNIST as in the paper, from its IDX files."""

    # Of the training images' brightness, as published with torchvision's examples.
    mean, std = (0.2860,), (0.3530,)
    title, dataset, fetched = "Fashion-MNIST", "FashionMNIST", "FashionMNIST"

    def __init__(self, **options: object) -> None:
        self.options = parse_options(FashionMnistOptions, options)
        super().__init__(10, self.options)
        own = self.data_dir
        self._folders = [own / "FashionMNIST" / "raw", own / "raw", own, _DEBIAN_FOLDER]
        prefixes = [{"train": "train", "test": "t10k"}[split] for split in self.splits]
        self._names = [(f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte") for prefix in prefixes]

    def model(self) -> nn.Module:
        """The MLP; input ``[n, 1, 28, 28]``."""
        return mlp(28 * 28, self.options.hidden, self.classes)

    def find(self) -> list[ImageSource] | None:
        """The first folder with all files, each plain or packed."""
        for folder in self._folders:
            files = [[_existing(folder / name) for name in pair] for pair in self._names]
            if all(map(all, files)):
                return [
                    stored(StoredArray(images), StoredArray(labels), (28, 28))
                    for images, labels in files
                    if images and labels
                ]
        return None

    def missing(self) -> str:
        """The files, and their source."""
        names = ", ".join(name for pair in self._names for name in pair)
        return (
            f"{names} (each plain or .gz) in {', '.join(map(str, self._folders))}. Download the files from "
            f"{_SOURCE} into {self._folders[0]}"
        )


def _existing(file: Path) -> Path | None:
    return next((path for path in (file, file.with_name(f"{file.name}.gz")) if path.is_file()), None)
