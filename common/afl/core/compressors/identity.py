"""The identity: AFL-Com with it is AFL-BR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.compressors.base import Compressed, Compressor, Realization
from afl.core.messages import Encoding
from afl.core.randomness import Stream
from afl.core.vectors import add_at, step_at
from afl.errors import ConfigError


class Identity(Compressor):
    """``C(x) = x``; delta = 1; all d values travel."""

    name = "identity"
    encoding = Encoding.DENSE
    additive_idempotent = True
    lossless = True
    in_coordinates = True

    def __init__(self, dim: int, options: Mapping[str, Any]) -> None:
        super().__init__(dim, options)
        if options:
            raise ConfigError(f"identity: unknown option {sorted(options)[0]!r}; it takes none")

    @property
    def count(self) -> int:
        """d: every value is sent."""
        return self.dim

    @property
    def delta(self) -> float:
        """1: nothing is lost."""
        return 1.0

    def realize(self, stream: Stream, device: torch.device | str = "cpu") -> Realization:  # noqa: ARG002
        """The identity, the same in every round; nothing is drawn."""
        return IDENTITY


class _IdentityRealization(Realization):
    def split(self, vector: Tensor) -> Compressed:
        values = vector.cpu().numpy().copy()
        vector.zero_()
        return Compressed(values)

    def decode(self, compressed: Compressed) -> Tensor:
        return torch.from_numpy(compressed.values.copy())

    def add_to(self, total: Tensor, compressed: Compressed) -> None:
        add_at(total, None, compressed.values)

    def step(self, params: Tensor, compressed: Compressed, eta: float) -> None:
        step_at(params, None, compressed.values, eta)

    def values(self, vector: Tensor) -> NDArray[np.float32]:
        return vector.cpu().numpy()

    def counts(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.diff(offsets)


IDENTITY: Final[Realization] = _IdentityRealization()
"""That of every round."""
