"""``digits``: 1,797 handwritten digits of 8x8 pixels that scikit-learn carries with it; no download."""

from __future__ import annotations

import gzip

import numpy as np
from pydantic import Field, PositiveInt
from torch import nn

from afl.optional_dependencies import packaged_file
from afl.tasks.data.images import ImageOptions, ImageSource, ImageTask, labelled
from afl.tasks.data.models import mlp
from afl.tasks.data.partitions import LabelPartition
from afl.tasks.options import parse_options

_FILE = "sklearn/datasets/data/digits.csv.gz"


class DigitsOptions(ImageOptions):
    """Options of ``digits``."""

    partition: LabelPartition | None = None
    """default: label-skew with 10 workers, otherwise dirichlet"""
    alpha: float = Field(default=1.0, gt=0)
    """concentration of the Dirichlet partition"""
    hidden: tuple[PositiveInt, ...] = (64, 32)
    """widths of the MLP's hidden layers"""


class Digits(ImageTask):
    """Ten classes of 8x8 digits and a small MLP: a federation to try on any machine."""

    allow_smaller_batch = True
    largest, mean, std = 16, (0.3053,), (0.3760,)

    def __init__(self, **options: object) -> None:
        self.options = parse_options(DigitsOptions, options)
        super().__init__(10, self.options)

    def model(self) -> nn.Module:
        """The MLP; input ``[n, 1, 8, 8]``."""
        return mlp(64, self.options.hidden, self.classes)

    def open_source(self) -> ImageSource:
        """scikit-learn's copy: pixels from 0 to 16, uint8 ``[1797, 8, 8]``."""
        # Read as a file: importing sklearn.datasets takes a worker longer than all else it imports.
        with gzip.open(packaged_file("scikit-learn", _FILE, "load the digits task's data"), "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        return labelled(table[:, -1].astype(np.int64), table[:, :-1].reshape(-1, 8, 8).__getitem__)
