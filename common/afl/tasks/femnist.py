"""``femnist``: 28x28 handwritten characters by writer (LEAF, Caldas et al., 2018), LEAF's two-layer CNN.

The paper's experiment on the number of workers (section "Scaling with the Number of Workers").
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt
from torch import Tensor, nn

from afl.errors import ConfigError, DataError
from afl.paths import expanded
from afl.tasks.base import TaskContext
from afl.tasks.data.images import ImageOptions, ImageSource, ImageTask, Pixels
from afl.tasks.data.leaf_files import find_layout
from afl.tasks.data.models import femnist_cnn
from afl.tasks.data.partitions import Indices, by_writer
from afl.tasks.options import DataOptions, parse_options

_SOURCE = "https://github.com/TalwalkarLab/leaf/tree/master/data/femnist"
_PLACES = ("femnist", "femnist.npz", "femnist-by-writer.npz", "femnist.parquet", "femnist.json")


class FemnistOptions(ImageOptions, DataOptions):
    """Options of ``femnist``."""

    file: Path | None = None
    """npz, parquet or json file, or a folder of them, relative to data_dir; default: the first that exists of
    femnist, femnist.npz, femnist-by-writer.npz, femnist.parquet and femnist.json"""
    partition: Literal["by-writer", "label-skew", "dirichlet", "iid"] = "by-writer"
    """how the images are divided among the workers"""
    classes: int = Field(default=62, ge=2)
    """62 characters, or 10 for digits alone"""
    hidden: int = Field(default=2048, ge=1)
    """width of the CNN's hidden layer"""
    channels: tuple[PositiveInt, PositiveInt] = (32, 64)
    """of the CNN's two convolutions"""
    ink: Literal["dark", "light"] = "dark"
    """dark on white as in LEAF, or light on black as in MNIST"""
    mean: float = Field(default=0.0385, ge=0, le=1)
    """of the ink (0 paper, 1 full ink)"""
    std: float = Field(default=0.1641, gt=0)
    """standard deviation of the ink"""


class Femnist(ImageTask):
    """FEMNIST as in the paper: the writers with the most examples, split 80/20 anew.

    Pixels become ink (0 for paper, so that the convolutions' zero padding is nearly paper too), then are
    standardized. The server builds the model without the data, so ``classes`` is an option.
    """

    local_options = frozenset({"data_dir", "file"})

    def __init__(self, **options: object) -> None:
        self.options = parse_options(FemnistOptions, options)
        super().__init__(self.options.classes, self.options)
        self.mean, self.std = (self.options.mean,), (self.options.std,)

    def model(self) -> nn.Module:
        """LEAF's CNN; input ``[n, 1, 28, 28]``."""
        return femnist_cnn(self.options.hidden, self.classes, self.options.channels)

    def open_source(self) -> ImageSource:
        """The first place at which data is found."""
        folder = self.options.folder().absolute()
        file = self.options.file
        places = [folder / expanded(file)] if file else [folder / name for name in _PLACES]
        for source in map(find_layout, places):
            if source is not None:
                return source
        raise DataError(
            f"FEMNIST was not found: looked for {', '.join(map(str, places))} (a folder may hold LEAF's json "
            f"files, also in data/all_data or in train and test, parquet files, or an npz). Make LEAF's json "
            f"files by {_SOURCE} and put them into {folder / _PLACES[0]}, or name another folder "
            "with --data-dir (or AFL_DATA), or a file in it with --task-option file=NAME"
        )

    def divide(self, source: ImageSource, context: TaskContext) -> list[Indices]:
        """The rows of each worker, by the option ``partition``; each ascending."""
        if self.options.partition == "by-writer":
            assert source.writers is not None
            return by_writer(source.writers, workers=context.workers)
        return super().divide(source, context)

    def brightness(self, images: Pixels) -> Tensor:
        """Ink, ``[n, 1, 28, 28]``: 0 is paper.

        Raises:
            afl.ConfigError: if most of the images would be ink: ``ink`` is the other way round.
        """
        brightness = super().brightness(images)
        ink = brightness if self.options.ink == "light" else 1 - brightness
        if ink.mean() > 0.5:
            other = "light" if self.options.ink == "dark" else "dark"
            raise ConfigError(
                f"task.options.ink: the images are mostly {self.options.ink}, so their ink is {other}; "
                f"set ink: {other}"
            )
        return ink
