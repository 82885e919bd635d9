"""Who a peer is, by what this worker was told itself: the server, which passes statements on, has no say.

Needs ``cryptography``, the extra ``private``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from afl.errors import PeerError
from afl.security import keys
from afl.security.certificates import KeyPair, pem_certificates
from afl.security.chains import Authorities, ids_of, read_chain
from afl.security.identity import URI_PREFIX, HashEntry, WorkerIds, ids_of_hash

# A certificate's key is TLS's too. Nothing that TLS signs begins like this, so neither passes for the other.
_PURPOSE: Final = b"afl: a worker to its peers\0"


@dataclass(frozen=True)
class Signed:
    """A statement's signature, and who made it.

    Attributes:
        signature: as :func:`afl.security.keys.sign` makes it.
        certificates: DER, the leaf first, then those up to (not with) the authority.
        public_key: where there is no certificate, the signing key's SubjectPublicKeyInfo in DER.
    """

    signature: bytes
    certificates: tuple[bytes, ...] = ()
    public_key: bytes = b""


class PeerSigner:
    """Signs what this worker tells its peers."""

    def __init__(self, key: keys.PrivateKey, certificates: Sequence[bytes] = ()) -> None:
        self._key = key
        self._certificates = tuple(certificates)
        self._public_key = b"" if certificates else keys.public_der(key.public_key())

    @classmethod
    def of_certificate(cls, pair: KeyPair, source: str) -> Self:
        """With a certificate's key; ``pair`` is as :func:`afl.security.certificates.read_pair` gives it.

        Raises:
            ConfigError: the key is of a kind that cannot sign; begins with ``source``.
        """
        key = keys.read_private_key(pair.key, source)
        leaf, *above = pem_certificates(pair.certificate)
        return cls(key, [leaf, *(der for der in above if not _is_root(der))])

    @classmethod
    def of_key(cls, pem: bytes, source: str) -> Self:
        """With a private key that has no certificate.

        Raises:
            ConfigError: it is none in PEM, encrypted, or of a kind that cannot sign; begins with ``source``.
        """
        return cls(keys.read_private_key(pem, source))

    @classmethod
    def fresh(cls) -> Self:
        """With a new key, of which nobody can know whose it is."""
        return cls(ed25519.Ed25519PrivateKey.generate())

    def sign(self, statement: bytes) -> Signed:
        """The statement's signature, with what shows whose it is."""
        return Signed(keys.sign(self._key, _PURPOSE + statement), self._certificates, self._public_key)


class PeerTrust(ABC):
    """What this worker believes of its peers."""

    def verify(self, workers: Sequence[int], statement: bytes, signed: Signed, now: datetime) -> None:
        """Check that the statement was signed by someone who may speak for all these workers.

        That the statement itself names them, and the run, is the caller's business.

        Args:
            now: with its time zone.

        Raises:
            PeerError: it was not; the message names the workers, and says why.
        """
        if not workers:
            raise PeerError("a statement in the name of no worker")
        named = WorkerIds.of(workers).named
        try:
            key = self._key(workers, signed, now)
        except PeerError as error:
            raise PeerError(f"{named}: {error}") from error
        if not keys.fits(key, signed.signature, _PURPOSE + statement):
            raise PeerError(f"{named}: the signature does not fit what is said to be signed")

    @abstractmethod
    def _key(self, workers: Sequence[int], signed: Signed, now: datetime) -> keys.PublicKey:
        """The signer's key, if it may speak for these workers; a :class:`PeerError` if it may not."""


class TrustInAuthorities(PeerTrust):
    """Peers have certificates from these authorities, which name the workers that they speak for."""

    def __init__(self, authorities: Authorities) -> None:
        self._authorities = authorities

    def _key(self, workers: Sequence[int], signed: Signed, now: datetime) -> keys.PublicKey:
        if not signed.certificates:
            raise PeerError(
                f"it shows no certificate, and this worker knows its peers by {self._authorities.source};"
                " start it with --certificate and --key, and without --signing-key"
            )
        leaf, *above = read_chain(signed.certificates)
        self._authorities.check([leaf, *above], now)
        ids = ids_of(leaf)
        if not ids.ranges:
            name = f"{URI_PREFIX}{workers[0]}"
            raise PeerError(f"its certificate has no subject alternative name of type URI such as {name}")
        _check_ids(workers, ids, "certificate")
        return _key_of(leaf)


class TrustInKeys(PeerTrust):
    """Peers have keys, with or without certificates, of these fingerprints."""

    def __init__(self, entries: Sequence[HashEntry], source: str) -> None:
        """Messages call the list ``source``."""
        self._entries = entries
        self._source = source

    def _key(self, workers: Sequence[int], signed: Signed, now: datetime) -> keys.PublicKey:  # noqa: ARG002
        key = _shown_key(signed)
        presented = keys.fingerprint(key)
        ids = ids_of_hash(presented, self._entries)
        if ids is None:
            raise PeerError(f"its key {presented} is not in {self._source}")
        _check_ids(workers, ids, "key")
        return key


class TrustInServer(PeerTrust):
    """Any key will do: whose it is, only the server says."""

    def _key(self, workers: Sequence[int], signed: Signed, now: datetime) -> keys.PublicKey:  # noqa: ARG002
        return _shown_key(signed)


def _shown_key(signed: Signed) -> keys.PublicKey:
    """What a peer shows as its key, by its certificate or bare."""
    if signed.certificates:
        return _key_of(read_chain(signed.certificates)[0])
    try:
        return keys.checked(serialization.load_der_public_key(signed.public_key))
    except keys.UNREADABLE as error:
        raise PeerError(f"its key {keys.UNUSABLE}") from error


def _key_of(certificate: x509.Certificate) -> keys.PublicKey:
    try:
        return keys.checked(certificate.public_key())
    except keys.UNREADABLE as error:
        raise PeerError(f"its certificate's key {keys.UNUSABLE}") from error


def _check_ids(workers: Sequence[int], ids: WorkerIds, proof: str) -> None:
    outside = next((worker for worker in workers if worker not in ids), None)
    if outside is not None:
        raise PeerError(f"its {proof} speaks for {ids.named}, not for worker {outside}")


def _is_root(der: bytes) -> bool:
    """An authority that has signed itself: peers know it, or do not believe it."""
    certificate = x509.load_der_x509_certificate(der)
    return certificate.issuer == certificate.subject
