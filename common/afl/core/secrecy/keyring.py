"""A process's own keys: what it offers, how it judges a roster, and the secrets that follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from afl.core.secrecy.keys import (
    KEY_BYTES,
    LARGEST_EPOCH,
    KeyOffer,
    KeyStore,
    OwnKey,
    all_keys,
    roster_digest,
    statement,
)
from afl.core.secrecy.masks import SECRET_BYTES, Masks
from afl.core.secrecy.neighbours import neighbours
from afl.errors import PeerError, ProtocolError

Sign = Callable[[bytes], tuple[bytes, tuple[bytes, ...], bytes]]
"""A statement to its signature, certificates and signer, as :class:`KeyOffer` has them."""

Verify = Callable[[KeyOffer], None]
"""Raises :class:`afl.errors.PeerError` unless the offer is signed by one who speaks for all its workers."""


class Keyring:
    """The keys of a process's workers in one run.

    Args:
        hosted: the process's workers, ascending.
        workers: m.
        least: the fewest workers of a federation that this process takes part in.
        random: so many bytes that nobody can guess.
        store: where keys are kept.
    """

    def __init__(
        self,
        run_id: str,
        hosted: Sequence[int],
        workers: int,
        *,
        least: int,
        sign: Sign,
        verify: Verify,
        random: Callable[[int], bytes],
        store: KeyStore,
    ) -> None:
        if workers < least:
            raise PeerError(
                f"the run has {workers} workers, and this worker takes part with {least} or more "
                "(--min-workers): of fewer, a sum tells too much of each"
            )
        self._run_id = run_id
        self._hosted = tuple(hosted)
        self._workers = workers
        self._sign, self._verify, self._random, self._store = sign, verify, random, store
        self._keys: dict[int, OwnKey] = {
            worker: key for worker, key in store.read().items() if worker in self._hosted
        }
        self._believed: frozenset[KeyOffer] = frozenset()
        """The offers of the last roster: after a cut most come again as they were."""
        self._made: tuple[bytes, Masks] | None = None
        """The last roster's digest, and what follows from it."""

    def offer(self, due: int, used: Collection[int] = ()) -> KeyOffer:
        """The keys of the process's workers, which are made where there are none.

        Args:
            due: the epoch that the server waits for.
            used: workers whose masks of the epoch may have been used for what is not known here any more; it
                is then over.

        Raises:
            PeerError: if there is no such epoch.
        """
        known = [key.epoch for key in self._keys.values()]
        epoch = max([1, due, *known])
        of_epoch = {worker: key for worker, key in self._keys.items() if key.epoch == epoch}
        # Of workers that go by different rosters, no one roster is right.
        if len({key.roster for key in of_epoch.values()} - {b""}) > 1 or not of_epoch.keys().isdisjoint(used):
            epoch += 1
        if epoch > LARGEST_EPOCH:
            raise PeerError(f"the server waits for keys of epoch {epoch}; the last is {LARGEST_EPOCH}")
        fresh = {
            worker: OwnKey(epoch, self._random(KEY_BYTES))
            for worker in self._hosted
            if worker not in self._keys or self._keys[worker].epoch < epoch
        }
        if fresh:
            self._keep(fresh)
        public = {worker: _public(self._keys[worker]) for worker in self._hosted}
        signature, certificates, signer = self._sign(statement(self._run_id, epoch, public))
        rosters = {self._keys[worker].roster for worker in self._hosted} - {b""}
        return KeyOffer(
            epoch,
            self._hosted,
            tuple(public.values()),
            signature,
            certificates,
            signer,
            next(iter(rosters), b""),
        )

    def take(self, epoch: int, offers: Sequence[KeyOffer]) -> Masks:
        """The masks that follow from a roster.

        Raises:
            PeerError: if it is not the roster of all workers, each with a key that it has signed itself, or
                another one than that of this epoch before.
        """
        # Each offer costs signatures to look at; what is wrong with a few too many is said in particular.
        most = 2 * self._workers
        if len(offers) > most or any(len(offer.workers) > most for offer in offers):
            raise PeerError(
                f"the roster of key epoch {epoch} has more than the keys of {self._workers} workers"
            )
        for offer in offers:
            if offer.epoch != epoch:
                raise PeerError(f"the roster of key epoch {epoch} has keys of epoch {offer.epoch}")
            if offer not in self._believed:
                self._verify(offer)
        try:
            keys = all_keys(offers)
        except ProtocolError as error:
            raise PeerError(f"the roster of key epoch {epoch} has {error}") from error
        missing = sorted(set(range(self._workers)) - keys.keys())
        if missing or len(keys) != self._workers:
            what = f"lacks worker {missing[0]}" if missing else f"names worker {max(keys)}"
            raise PeerError(
                f"the roster of key epoch {epoch} {what}; the workers are 0 to {self._workers - 1}"
            )
        own = {worker: self._keys.get(worker) for worker in self._hosted}
        for worker, key in own.items():
            if key is None or key.epoch != epoch or _public(key) != keys[worker]:
                raise PeerError(
                    f"the roster of key epoch {epoch} has another key of worker {worker} than its own"
                )
        public = [keys[worker] for worker in range(self._workers)]
        digest = roster_digest(self._run_id, epoch, public)
        held = {worker: key for worker, key in own.items() if key is not None}
        for worker, key in held.items():
            if key.roster not in {b"", digest}:
                raise PeerError(
                    f"the roster of key epoch {epoch} is another than the one that worker {worker} has had; "
                    "keys change only with the epoch"
                )
        self._keep({worker: replace(key, roster=digest) for worker, key in held.items() if not key.roster})
        self._believed = frozenset(offers)
        if self._made is None or self._made[0] != digest:
            secrets: dict[int, dict[int, bytes]] = {}
            for worker, key in held.items():
                secrets[worker] = self._secrets(worker, key, public, digest, secrets)
            self._made = digest, Masks(secrets)
        return self._made[1]

    def _secrets(
        self,
        worker: int,
        key: OwnKey,
        public: Sequence[bytes],
        digest: bytes,
        known: Mapping[int, Mapping[int, bytes]],
    ) -> dict[int, bytes]:
        private = X25519PrivateKey.from_private_bytes(key.private)
        secrets = {}
        for other in neighbours(worker, self._workers, digest):
            if other in known:
                secrets[other] = known[other][worker]
                continue
            try:
                shared = private.exchange(X25519PublicKey.from_public_bytes(public[other]))
            except ValueError as error:
                raise PeerError(f"the public key of worker {other} is none") from error
            pair = b"".join(each.to_bytes(4, "big") for each in sorted((worker, other)))
            # The digest stands for run, epoch and all keys: who sees another roster has other secrets.
            derive = HKDF(SHA256(), SECRET_BYTES, salt=digest, info=b"afl mask 2\0" + pair)
            secrets[other] = derive.derive(shared)
        return secrets

    def _keep(self, keys: Mapping[int, OwnKey]) -> None:
        self._store.write(keys)
        self._keys.update(keys)


def _public(key: OwnKey) -> bytes:
    return X25519PrivateKey.from_private_bytes(key.private).public_key().public_bytes_raw()
