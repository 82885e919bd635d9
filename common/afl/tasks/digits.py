"""``digits``: 1,797 handwritten digits of 8x8 pixels that scikit-learn carries with it; no download."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from pydantic import Field, PositiveInt
from torch import nn

from afl.optional_dependencies import check_installed
from afl.tasks.data.images import ImageOptions, ImageSource, ImageTask, labelled
from afl.tasks.data.models import mlp
from afl.tasks.data.partitions import LabelPartition
from afl.tasks.options import parse_options


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
        check_installed("sklearn", "load the digits task's data", "tasks")
        # Read as a file: importing sklearn.datasets takes a worker longer than all else it imports.
        package = find_spec("sklearn")
        assert package is not None
        assert package.origin is not None
        with gzip.open(Path(package.origin).parent / "datasets/data/digits.csv.gz", "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        return labelled(table[:, -1].astype(np.int64), table[:, :-1].reshape(-1, 8, 8).__getitem__)
