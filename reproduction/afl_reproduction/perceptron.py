"""FEMNIST with a perceptron instead of LEAF's CNN, for hundreds of simulated workers on two cores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from afl.tasks.data.models import mlp
from afl.tasks.femnist import Femnist


class FemnistPerceptron(Femnist):
    """``femnist`` with the layers of the paper's Fashion-MNIST model.

    Args:
        widths: of the hidden layers.
        options: of ``femnist``; ``hidden`` plays no part.
    """

    def __init__(self, *, widths: Sequence[int] = (64, 64), **options: object) -> None:
        super().__init__(**options)
        self.widths = tuple(widths)

    def model(self) -> nn.Module:
        """The perceptron; input ``[n, 1, 28, 28]``."""
        return mlp(28 * 28, self.widths, self.classes)
