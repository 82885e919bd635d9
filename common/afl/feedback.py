"""Error feedback over dual-weighted gradients (AFL-Com, Algorithm 2, lines 5 and 9)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from afl.compressors.base import Compressed, Realization
from afl.errors import NonFiniteError

_BLOCK = 1 << 15
"""128 kB of float32 a vector: two vectors and a product stay in the second-level cache."""


class ErrorFeedback:
    """A residual e and its recursion: ``p = e + x; c = C(p); e <- p - c``.

    The same recursion serves a worker (x is the weighted gradient) and the server (x is the sum of the
    workers' messages). The residual is what C really lost: the wire carries c in float32, so what is
    decoded is c itself.

    Args:
        dim: d.
        device: where the residual lives.
    """

    def __init__(self, dim: int, device: torch.device | str = "cpu") -> None:
        self.residual = torch.zeros(dim, dtype=torch.float32, device=device)

    def compress(self, signal: Tensor, realization: Realization, *, weight: float = 1.0) -> Compressed:
        """One step of the recursion with ``x = weight * signal``.

        The weight is rounded to float32; then each coordinate takes one rounded product and one rounded
        sum. The passes are made block by block: a block that is still in cache costs one trip to memory
        where whole passes cost one each.

        Args:
            signal: float32 ``[dim]``, finite; unchanged.

        Raises:
            NonFiniteError: if p leaves float32's range; the residual is lost then.
        """
        factor = float(np.float32(weight))
        block = _BLOCK if self.residual.device.type == "cpu" else len(signal)
        for start in range(0, len(signal), block):
            p = self.residual[start : start + block]
            x = signal[start : start + block]
            p.add_(x if factor == 1.0 else x * factor)
            if not is_finite(p):
                raise NonFiniteError("the sum of the residual and the update overflows float32")
        return realization.split(self.residual)


def weigh(gradient: Tensor, weight: float, *, out: Tensor) -> Tensor:
    """``q_i g_i``: the weight rounded to float32, then one rounded product a coordinate."""
    return torch.mul(gradient, float(np.float32(weight)), out=out)


def is_finite(vector: Tensor) -> bool:
    """Whether all elements are finite; float32.

    A finite sum proves it in one pass; only an infinite one needs the look at each element, since the sum
    of finite numbers may overflow.
    """
    return math.isfinite(float(vector.sum())) or bool(torch.isfinite(vector).all())
