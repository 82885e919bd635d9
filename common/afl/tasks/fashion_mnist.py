"""``fashion-mnist``: 28x28 images of clothes in ten classes (Xiao, Rasul, Vollgraf, 2017), a three-layer MLP.

The paper's first label-skewed experiment (section "Communication Efficiency with Compression").
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from afl.errors import DataError
from afl.optional_dependencies import require
from afl.tasks.data.arrays import StoredArray, idx_array
from afl.tasks.data.downloads import download_into
from afl.tasks.data.images import Concatenated, ImageTask, StoredImages, standardized
from afl.tasks.data.models import mlp
from afl.tasks.options import DataOptions, SplitOptions, parse_options

_MEAN, _STD = 0.2860, 0.3530
"""Of the training images' brightness, as published with torchvision's examples."""

_DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where the Debian package dataset-fashion-mnist puts the files."""

_SOURCE = "https://github.com/zalandoresearch/fashion-mnist"


class FashionMnistOptions(DataOptions, SplitOptions):
    """Options of ``fashion-mnist``."""

    partition: Literal["label-skew", "dirichlet", "iid"] = Field(
        default="label-skew", description="how the images are divided among the workers"
    )
    alpha: float = Field(default=0.5, gt=0, description="concentration of the Dirichlet partition")
    pool: Literal["train", "all"] = Field(
        default="train",
        description="divide and split the 60,000 training images, or those and the 10,000 test images",
    )
    hidden: tuple[PositiveInt, ...] = Field(
        default=(256, 128), description="widths of the MLP's hidden layers"
    )
    download: bool = Field(default=False, description="fetch missing files through torchvision")


class FashionMnist(ImageTask[Concatenated]):
    """Fashion-MNIST as in the paper."""

    local_options = frozenset({"data_dir", "download"})

    def __init__(self, **options: object) -> None:
        self.options = parse_options(FashionMnistOptions, options)
        super().__init__(10, partition=self.options.partition, alpha=self.options.alpha, split=self.options)

    def model(self) -> nn.Module:
        """The MLP; input ``[n, 1, 28, 28]``."""
        return mlp(28 * 28, self.options.hidden, self.classes)

    def open_source(self) -> Concatenated:
        """The IDX files, the first complete set of :meth:`_folders`."""
        folder = self._find()
        if folder is None and self.options.download:
            torchvision = require("torchvision.datasets", "download Fashion-MNIST")
            download_into(
                self.options.folder(),
                "FashionMNIST",
                lambda root: torchvision.FashionMNIST(str(root), download=True),
            )
            folder = self._find()
        if folder is None:
            raise DataError(
                f"Fashion-MNIST was not found: looked for {', '.join(self._names())} (each plain or .gz) in "
                f"{', '.join(str(place) for place in self._folders())}. Download the files from "
                f"{_SOURCE} into {self._folders()[0]}, or name another folder with --data-dir "
                "(or AFL_DATA), or start the worker with --task-option download=true"
            )
        names = self._names()
        return Concatenated(
            [
                StoredImages(_opened(folder, images), _opened(folder, labels), (28, 28))
                for images, labels in zip(names[::2], names[1::2], strict=True)
            ]
        )

    def inputs(self, images: NDArray[np.uint8] | NDArray[np.float32]) -> Tensor:
        """Standardized brightness, ``[n, 1, 28, 28]``."""
        return standardized(torch.from_numpy(images).float().div_(255).unsqueeze(1), [_MEAN], [_STD])

    def _names(self) -> list[str]:
        prefixes = ["train"] if self.options.pool == "train" else ["train", "t10k"]
        return [f"{prefix}-{kind}-ubyte" for prefix in prefixes for kind in ("images-idx3", "labels-idx1")]

    def _folders(self) -> list[Path]:
        own = self.options.folder().absolute()
        return [own / "FashionMNIST" / "raw", own / "raw", own, _DEBIAN_FOLDER]

    def _find(self) -> Path | None:
        for folder in self._folders():
            if all(_existing(folder, name) is not None for name in self._names()):
                return folder
        return None


def _existing(folder: Path, name: str) -> Path | None:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    return None


def _opened(folder: Path, name: str) -> StoredArray:
    file = _existing(folder, name)
    assert file is not None
    return idx_array(file)
