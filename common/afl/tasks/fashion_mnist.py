"""``fashion-mnist``: 28x28 images of clothes in ten classes (Xiao, Rasul, Vollgraf, 2017), a three-layer MLP.

The paper's first label-skewed experiment (section "Communication Efficiency with Compression").
"""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt
from torch import nn

from afl.paths import kind_of
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
        kinds = ("images-idx3", "labels-idx1")
        self._names = [f"{prefix}-{kind}-ubyte" for prefix in prefixes for kind in kinds]

    def model(self) -> nn.Module:
        """The MLP; input ``[n, 1, 28, 28]``."""
        return mlp(28 * 28, self.options.hidden, self.classes)

    def find(self) -> list[ImageSource] | None:
        """The first folder with all files, each plain or packed."""
        for folder in self._folders:
            files = [file for name in self._names for file in _existing(folder / name)]
            if len(files) == len(self._names):
                arrays = [StoredArray(file) for file in files]
                return [
                    stored(images, labels, (28, 28))
                    for images, labels in zip(arrays[::2], arrays[1::2], strict=True)
                ]
        return None

    def missing(self) -> str:
        """The files, and their source."""
        return (
            f"{', '.join(self._names)} (each plain or .gz) in {', '.join(map(str, self._folders))}. Download "
            f"the files from {_SOURCE} into {self._folders[0]}"
        )


def _existing(file: Path) -> list[Path]:
    return [path for path in (file, file.with_name(f"{file.name}.gz")) if kind_of(path)][:1]
