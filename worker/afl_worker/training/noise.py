"""Randomness that nobody else can know: which records a step draws, and the noise that it adds."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray
from torch import Tensor

from afl.core.randomness import Stream

_PAIRS = 1 << 14
"""Normal numbers are made of so many pairs of words at a time, which stay in a second-level cache."""

_ZEROS = memoryview(bytes(16 * _PAIRS))


class SecretStream(Stream):
    """A :class:`Stream` of which the words are AES-128 in counter mode.

    Args:
        key: 16 bytes that are used for nothing else; by default the operating system draws them.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._cipher = Cipher(AES(os.urandom(16) if key is None else key), CTR(bytes(16))).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next ``count`` words; shape ``[count]``, uint64."""
        # A cipher wants room for a block less a byte more than it writes.
        room = np.empty(8 * count + 15, dtype=np.uint8)
        zeros = _ZEROS[: 8 * count] if 8 * count <= len(_ZEROS) else bytes(8 * count)
        self._cipher.update_into(zeros, room.data)
        return room[: 8 * count].view(np.uint64)

    def add_normals(self, values: Tensor, deviation: float) -> None:
        """Add to each of ``values``, ``[n]``, an independent normal number of this standard deviation.

        By Box and Muller's method (1958, "A note on the generation of random normal deviates"), in float64,
        of a whole word for the radius and another for the angle. No number is beyond 9.42 standard
        deviations, where one in 2e20 should be.
        """
        most = min(_PAIRS, (len(values) + 1) // 2)
        radii, angles = np.empty(most), torch.empty(most, dtype=torch.float64)
        normals = torch.empty(2 * most, dtype=torch.float64)
        for start in range(0, len(values), 2 * _PAIRS):
            part = values[start : start + 2 * _PAIRS]
            pairs = (len(part) + 1) // 2
            words: NDArray[Any] = self.words(2 * pairs).view(np.int64)
            # numpy is faster than PyTorch at logarithms and roots, and slower at sines (measured).
            radius = radii[:pairs]
            radius[:] = words[:pairs]
            np.abs(radius, out=radius)
            # The logarithm of (|word| + 1/2) / 2^63, which is at most 1.
            radius += 0.5
            radius *= 2.0**-63
            np.log(radius, out=radius)
            radius *= -2.0
            np.sqrt(radius, out=radius)
            radius *= deviation
            factors, angle = torch.from_numpy(radius), angles[:pairs]
            angle.copy_(torch.from_numpy(words[pairs:])).mul_(math.pi * 2.0**-63)
            torch.cos(angle, out=normals[:pairs]).mul_(factors)
            torch.sin(angle, out=normals[pairs : 2 * pairs]).mul_(factors)
            # In float64: of noise that was rounded before it is added, more could be told.
            part.copy_(normals[: len(part)].to(part.device).add_(part))
