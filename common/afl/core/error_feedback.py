"""Error feedback over dual-weighted gradients (AFL-Com, Algorithm 2, lines 5 and 9)."""

from __future__ import annotations

import torch
from torch import Tensor

from afl.core.compressors.base import Compressed, Realization
from afl.core.vectors import Weighted, add_finite, is_finite, scale
from afl.errors import NonFiniteError


class Spare:
    """A vector whose content nobody needs: p is made there, and the residual before it becomes the spare."""

    vector: Tensor | None = None

    def vector_like(self, other: Tensor) -> Tensor:
        """The vector, made when it is first needed."""
        if self.vector is None:
            self.vector = torch.empty_like(other)
        return self.vector


class ErrorFeedback:
    """A residual e and its recursion: ``p = e + x; c = C(p); e <- p - c``.

    The same recursion serves a worker (x is the weighted gradient) and the server (x is the sum of the
    workers' messages). The residual is what C really lost: the wire carries c in float32, so what is
    decoded is c itself.

    Args:
        dim: d.
        device: where the residual lives.
        spare: memory for p, which it may share with others of its dimension and device; without it p is made
            in the residual's own.
    """

    def __init__(self, dim: int, device: torch.device | str = "cpu", spare: Spare | None = None) -> None:
        self.residual = torch.zeros(dim, dtype=torch.float32, device=device)
        self._spare = spare

    def compress(
        self, signal: Tensor | Weighted, realization: Realization, factor: float = 1.0
    ) -> Compressed:
        """One step of the recursion with ``x = signal``: one rounded sum a coordinate.

        Args:
            signal: float32 ``[dim]``; unchanged.
            factor: what the residual is multiplied by first, one rounded product a coordinate, where its
                unit is not the signal's.

        Raises:
            NonFiniteError: if x, p or the message is not finite; the residual is as before if there is a
                spare, and lost else.
        """
        target = self.residual if self._spare is None else self._spare.vector_like(self.residual)
        residual = self.residual
        if factor != 1.0:
            scale(residual, factor, out=target)
            residual = target
        if not add_finite(residual, signal, out=target):
            raise NonFiniteError("the sum of the residual and the update overflows float32")
        compressed = realization.split(target)
        if self._spare is not None:
            self.residual, self._spare.vector = target, self.residual
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
