"""Public keys of an epoch: what workers sign, compare and derive masks' secrets from.

Each worker has an X25519 key pair for each epoch of a run; a process offers those of its workers in one
signed statement. All offers together are the epoch's roster, which the server only passes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from afl.errors import ProtocolError

KEY_BYTES = 32
"""Of an X25519 key, public or private."""

DIGEST_BYTES = 32
"""Of a roster's digest (SHA-256)."""

LARGEST_EPOCH = 1 << 32
"""No run loses its keys so often."""


@dataclass(frozen=True)
class KeyOffer:
    """What a process says of its workers' keys.

    Attributes:
        epoch: 1-based.
        workers: ascending.
        public_keys: of each of them, :data:`KEY_BYTES` bytes.
        signature: of the :meth:`statement`.
        certificates: in DER, the signer's own first; none where its key is known by itself.
        signer: the signer's public key, as SubjectPublicKeyInfo in DER, where there is no certificate.
        roster: digest of the epoch's roster that the process goes by, if it has one.
    """

    epoch: int
    workers: tuple[int, ...]
    public_keys: tuple[bytes, ...]
    signature: bytes
    certificates: tuple[bytes, ...] = ()
    signer: bytes = b""
    roster: bytes = b""

    def keys(self) -> dict[int, bytes]:
        """The public key of each worker.

        Raises:
            ProtocolError: if workers and keys cannot belong together.
        """
        if list(self.workers) != sorted(set(self.workers)) or len(self.workers) != len(self.public_keys):
            raise ProtocolError("an offer of keys whose workers are not ascending, each with one key")
        if any(len(key) != KEY_BYTES for key in self.public_keys):
            raise ProtocolError(f"an offer of keys that do not have {KEY_BYTES} bytes")
        if not 1 <= self.epoch <= LARGEST_EPOCH:
            raise ProtocolError(f"an offer of keys of epoch {self.epoch}; they are 1 to {LARGEST_EPOCH}")
        if self.roster and len(self.roster) != DIGEST_BYTES:
            raise ProtocolError(f"a roster's digest of {len(self.roster)} bytes; it has {DIGEST_BYTES}")
        return dict(zip(self.workers, self.public_keys, strict=True))

    def statement(self, run_id: str) -> bytes:
        """What is signed: that these are these workers' keys in this run and epoch."""
        return statement(run_id, self.epoch, self.keys())


@dataclass(frozen=True)
class OwnKey:
    """A worker's key of an epoch, as its process has it.

    Attributes:
        roster: digest of the roster that its masks are made of, if any has come.
    """

    epoch: int
    private: bytes = field(repr=False)
    roster: bytes = b""


class KeyStore(Protocol):
    """Where keys outlive the process."""

    def read(self) -> Mapping[int, OwnKey]:
        """Those that were kept, by worker."""
        ...

    def write(self, keys: Mapping[int, OwnKey]) -> None:
        """Keep keys, before anything made with them leaves the process."""
        ...


NO_KEYS = KeyOffer(0, (), (), b"")
"""Of a process in a run without secure aggregation."""


def statement(run_id: str, epoch: int, keys: Mapping[int, bytes]) -> bytes:
    """What a process signs of its workers' public keys."""
    named = b"".join(worker.to_bytes(4, "big") + keys[worker] for worker in sorted(keys))
    return b"afl key offer 1\0" + _of_run(run_id, epoch) + named


def roster_digest(run_id: str, epoch: int, public_keys: Sequence[bytes]) -> bytes:
    """What two workers have alike exactly if all public keys are the same to them."""
    return hashlib.sha256(b"afl roster 1\0" + _of_run(run_id, epoch) + b"".join(public_keys)).digest()


def all_keys(offers: Iterable[KeyOffer]) -> dict[int, bytes]:
    """The public keys of all workers that are offered.

    Raises:
        ProtocolError: if a worker has two.
    """
    found: dict[int, bytes] = {}
    for offer in offers:
        for worker, key in offer.keys().items():
            if found.setdefault(worker, key) != key:
                raise ProtocolError(f"two keys of worker {worker}")
    return found


def _of_run(run_id: str, epoch: int) -> bytes:
    name = run_id.encode()
    return len(name).to_bytes(4, "big") + name + epoch.to_bytes(8, "big")
