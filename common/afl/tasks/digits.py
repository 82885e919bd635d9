"""``digits``: 1,797 handwritten digits of 8x8 pixels that scikit-learn carries with it; no download."""

from __future__ import annotations

import gzip
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from afl.optional_dependencies import packaged_file
from afl.tasks.data.images import HeldImages, ImageTask, standardized
from afl.tasks.data.models import mlp
from afl.tasks.options import SplitOptions, parse_options

_FILE = "sklearn/datasets/data/digits.csv.gz"

_MEAN, _STD = 0.3053, 0.3760
"""Mean and standard deviation of all pixels, divided by 16."""


class DigitsOptions(SplitOptions):
    """Options of ``digits``."""

    partition: Literal["label-skew", "dirichlet", "iid"] | None = Field(
        default=None, description="default: label-skew with 10 workers, otherwise dirichlet"
    )
    alpha: float = Field(default=1.0, gt=0, description="concentration of the Dirichlet partition")
    hidden: tuple[PositiveInt, ...] = Field(default=(64, 32), description="widths of the MLP's hidden layers")


class Digits(ImageTask[HeldImages]):
    """Ten classes of 8x8 digits and a small MLP: a federation to try on any machine."""

    allow_smaller_batch = True

    def __init__(self, **options: object) -> None:
        self.options = parse_options(DigitsOptions, options)
        super().__init__(10, partition=self.options.partition, alpha=self.options.alpha, split=self.options)

    def model(self) -> nn.Module:
        """The MLP; input ``[n, 1, 8, 8]``."""
        return mlp(64, self.options.hidden, self.classes)

    def open_source(self) -> HeldImages:
        """scikit-learn's copy: pixels from 0 to 16, uint8 ``[1797, 8, 8]``."""
        # Read as a file: importing sklearn.datasets takes a worker longer than all else it imports.
        with gzip.open(packaged_file("scikit-learn", _FILE, "load the digits task's data"), "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        return HeldImages(table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64))

    def inputs(self, images: NDArray[np.uint8] | NDArray[np.float32]) -> Tensor:
        """Standardized pixels, ``[n, 1, 8, 8]``."""
        return standardized(torch.from_numpy(images).float().div_(16).unsqueeze(1), [_MEAN], [_STD])
