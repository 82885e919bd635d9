"""Error feedback over dual-weighted gradients (AFL-Com, Algorithm 2, lines 5 and 9)."""

from __future__ import annotations

import torch
from torch import Tensor

from afl.compressors.base import Compressed, Realization
from afl.errors import NonFiniteError
from afl.vectors import accumulate


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
        sum.

        Args:
            signal: float32 ``[dim]``, finite; unchanged.

        Raises:
            NonFiniteError: if p leaves float32's range; the residual is lost then.
        """
        if not accumulate(self.residual, signal, weight):
            raise NonFiniteError("the sum of the residual and the update overflows float32")
        return realization.split(self.residual)
