"""Masks: what a worker adds to its message, and its neighbours take away from theirs."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from afl.core.codecs.modular import word_type
from afl.core.messages import Position

BLOCK_BYTES = 1 << 17
"""What one neighbour's stream has written is still in cache when it is added."""

SECRET_BYTES = 16
"""Of a pair, and of the key of AES-128 that a stream has from it."""

_ZEROS = memoryview(bytes(BLOCK_BYTES))


class Masks:
    """Those that some workers of one process share with all others.

    The mask of worker i is ``sum_{j > i} stream(i, j) - sum_{j < i} stream(i, j)`` over its neighbours j
    (Bonawitz et al. 2017, section 4): in the sum over all workers each stream is there twice, once with
    either sign. A stream is AES-128 in counter mode. Its key is HMAC-SHA256 of what the worker was shown,
    under the pair's secret: masks of workers that were shown different things do not cancel. The counter
    begins with the round, the phase and the payload's number, so that no two messages have a part of it in
    common.

    Args:
        secrets: by a worker of this process, :data:`SECRET_BYTES` for each of its neighbours.
    """

    def __init__(self, secrets: Mapping[int, Mapping[int, bytes]]) -> None:
        self._secrets = secrets

    def draw(
        self,
        position: Position,
        payload: int,
        count: int,
        bits: int,
        workers: Collection[int],
        *,
        shown: bytes = b"",
    ) -> NDArray[Any]:
        """The mask of the sum of some workers' messages; what two of them share is left out.

        Args:
            payload: the payload's number in the report.
            count: residues.
            bits: of a residue; the mask is right modulo ``2^bits``, in the narrowest unsigned type.
            workers: whose messages are added, of this process.
            shown: what the messages are an answer to.
        """
        kind = word_type(bits)
        mask, little_endian = np.zeros(count, dtype=kind), np.dtype(kind).newbyteorder("<")
        # (round, phase, payload) and six bytes that count blocks of 16 bytes.
        counter = position.round.to_bytes(8, "big") + bytes([position.phase, payload]) + bytes(6)
        own = frozenset(workers)
        streams = [
            (_stream(secret, shown, counter), np.add if neighbour > worker else np.subtract)
            for worker in workers
            for neighbour, secret in self._secrets[worker].items()
            if neighbour not in own
        ]
        scratch = np.empty(BLOCK_BYTES + 15, dtype=np.uint8)
        block = BLOCK_BYTES // mask.itemsize
        for start in range(0, count, block):
            part = mask[start : start + block]
            for stream, add in streams:
                stream.update_into(_ZEROS[: part.nbytes], scratch.data)
                add(part, scratch[: part.nbytes].view(little_endian), out=part)
        return mask


def _stream(secret: bytes, shown: bytes, counter: bytes) -> CipherContext:
    key = hmac.digest(secret, shown, "sha256")[:SECRET_BYTES]
    return Cipher(AES(key), CTR(counter)).encryptor()
