"""Error feedback over dual-weighted gradients (AFL-Com, Algorithm 2, lines 5 and 9)."""

from __future__ import annotations

import torch
from torch import Tensor

from afl.core.compressors.base import Compressed, Realization
from afl.core.vectors import add_finite, is_finite
from afl.errors import NonFiniteError


class ErrorFeedback:
    """A residual e and its recursion: ``p = e + x; c = C(p); e <- p - c``.

    The same recursion serves a worker (x is the weighted gradient) and the server (x is the sum of the
    workers' messages). The residual is what C really lost: the wire carries c in float32, so what is
    decoded is c itself.

    Args:
        dim: d.
        device: where the residual lives.
        keeps_old: whether a sum that overflows leaves the residual as it was; it takes a second vector,
            and no time.
    """

    def __init__(self, dim: int, device: torch.device | str = "cpu", *, keeps_old: bool = False) -> None:
        self.residual = torch.zeros(dim, dtype=torch.float32, device=device)
        self._spare = torch.empty_like(self.residual) if keeps_old else None

    def compress(self, signal: Tensor, realization: Realization) -> Compressed:
        """One step of the recursion with ``x = signal``: one rounded sum a coordinate.

        Args:
            signal: float32 ``[dim]``, finite; unchanged.

        Raises:
            NonFiniteError: if p or the message leaves float32's range; the residual is lost then, unless it
                was made with ``keeps_old``.
        """
        target = self.residual if self._spare is None else self._spare
        if not add_finite(self.residual, signal, out=target):
            raise NonFiniteError("the sum of the residual and the update overflows float32")
        compressed = realization.split(target)
        if self._spare is not None:
            self.residual, self._spare = target, self.residual
        return compressed

    def put_back(self, compressed: Compressed, realization: Realization) -> None:
        """``e <- e + c``: a message of that realization that did not count.

        Raises:
            NonFiniteError: if the sum leaves float32's range; the residual is as before.
        """
        total = self.residual.clone()
        realization.add_to(total, compressed)
        if not is_finite(total):
            raise NonFiniteError("the sum of the residual and a late message overflows float32")
        self.residual.copy_(total)
