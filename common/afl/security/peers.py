"""Who a peer is, by what this worker was told itself: the server, which passes statements on, has no say.

Needs ``cryptography``, the extra ``private``.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID

from afl.errors import ConfigError, PeerError
from afl.security.certificates import KeyPair, missing_issuer, pem_certificates, shown_time
from afl.security.identity import URI_PREFIX, HashEntry, WorkerIds, ids_of_hash, ids_of_names

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey

MOST_CERTIFICATES: Final = 4
"""The longest chain that is looked at: whoever sends it chose its length, and each costs a signature."""

MOST_CERTIFICATE_BYTES: Final = 16 * 1024

# TLS signs with the same key: nothing that it signs begins like this, so neither passes for the other.
_PURPOSE: Final = b"afl: from a worker to its peers\0"
_HASHES: Final = {"secp256r1": hashes.SHA256(), "secp384r1": hashes.SHA384()}
_PSS: Final = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
_LEAST_RSA_BITS: Final = 2048
_KINDS: Final = f"EC (P-256 or P-384), RSA (at least {_LEAST_RSA_BITS} bits) or Ed25519"
_UNREADABLE: Final = (ValueError, TypeError, UnsupportedAlgorithm, x509.UnsupportedGeneralNameType)


@dataclass(frozen=True)
class Signed:
    """A statement's signature, and who made it.

    Attributes:
        signature: of Ed25519, of RSA-PSS with SHA-256, or of ECDSA as r and s, big-endian, each as long as
            the curve's order; P-384 with SHA-384, P-256 with SHA-256.
        certificates: DER, the leaf first, then those up to (not with) the authority.
        public_key: of the signing key where there is no certificate: SubjectPublicKeyInfo in DER.
    """

    signature: bytes
    certificates: tuple[bytes, ...] = ()
    public_key: bytes = b""


class PeerSigner:
    """Signs what this worker tells its peers."""

    def __init__(self, key: PrivateKey, certificates: Sequence[bytes] = ()) -> None:
        self._key = key
        self._certificates = tuple(certificates)

    @classmethod
    def of_certificate(cls, pair: KeyPair, source: str) -> Self:
        """With a certificate's key; ``pair`` is as :func:`afl.security.certificates.read_pair` gives it.

        Raises:
            ConfigError: the key is of another kind than those that can sign.
        """
        chain = [x509.load_der_x509_certificate(der) for der in pem_certificates(pair.certificate)]
        # An authority that comes with the chain would be sent to every peer, and none would believe it.
        below = [each for each in chain if each.issuer != each.subject]
        encoding = serialization.Encoding.DER
        return cls(_private_key(pair.key, source), [each.public_bytes(encoding) for each in below or chain])

    @classmethod
    def of_key(cls, pem: bytes, source: str) -> Self:
        """With a private key in PEM, not encrypted, that has no certificate.

        Raises:
            ConfigError: it is no such key.
        """
        return cls(_private_key(pem, source))

    @classmethod
    def fresh(cls) -> Self:
        """With a new key, of which nobody can know whose it is."""
        return cls(ed25519.Ed25519PrivateKey.generate())

    def sign(self, statement: bytes) -> Signed:
        """The statement's signature."""
        key, text = self._key, _PURPOSE + statement
        if isinstance(key, ed25519.Ed25519PrivateKey):
            signature = key.sign(text)
        elif isinstance(key, rsa.RSAPrivateKey):
            signature = key.sign(text, _PSS, hashes.SHA256())
        else:
            size = _order_bytes(key.curve)
            halves = decode_dss_signature(key.sign(text, ec.ECDSA(_HASHES[key.curve.name])))
            signature = b"".join(half.to_bytes(size, "big") for half in halves)
        return Signed(
            signature, self._certificates, b"" if self._certificates else _public_der(key.public_key())
        )


class PeerTrust(ABC):
    """What this worker believes of its peers."""

    def verify(self, workers: Sequence[int], statement: bytes, signed: Signed, now: datetime) -> None:
        """Check that someone signed the statement who may speak for all these workers.

        Args:
            now: with its time zone.

        Raises:
            PeerError: nobody did; the message says why, and names the workers.
        """
        if not workers:
            raise PeerError("a statement in the name of no worker")
        named = WorkerIds.of(workers).named
        try:
            key = self._key(workers, signed, now)
        except PeerError as error:
            raise PeerError(f"{named}: {error}") from error
        if not _fits(key, signed.signature, _PURPOSE + statement):
            raise PeerError(f"{named}: the signature does not fit what is said to be signed")

    @abstractmethod
    def _key(self, workers: Sequence[int], signed: Signed, now: datetime) -> PublicKey:
        """The signer's key, if it may speak for these workers. Raises PeerError."""


class TrustInAuthorities(PeerTrust):
    """Peers have certificates from these authorities, which name the workers that they speak for."""

    def __init__(self, authorities: bytes, source: str) -> None:
        """``authorities`` are PEM; ``source`` names them in messages.

        Raises:
            ConfigError: one of them is no authority, or of a kind that is not supported.
        """
        self._source = source
        self._ders = pem_certificates(authorities)
        try:
            self._authorities = [x509.load_der_x509_certificate(der) for der in self._ders]
            for authority in self._authorities:
                _check_authority(authority, source)
        except _UNREADABLE as error:
            raise ConfigError(f"{source} holds a damaged certificate: {error}") from error
        self._store = verification.Store(self._authorities)

    def _key(self, workers: Sequence[int], signed: Signed, now: datetime) -> PublicKey:
        chain = _chain(signed)
        if not chain:
            raise PeerError(
                f"it shows no certificate, and this worker knows its peers by {self._source};"
                " give it --certificate and --key, or know it by --peer-keys"
            )
        try:
            _verifier(self._store, now).verify(chain[0], chain[1:])
        except verification.VerificationError as error:
            raise PeerError(self._why_not(chain, signed, now) or _shown(str(error))) from error
        leaf = chain[0]
        ids = _ids(leaf)
        if not ids.ranges:
            raise PeerError(
                "its certificate names no worker: it needs a subject alternative name of type URI such as"
                f" {URI_PREFIX}{workers[0]}"
            )
        _check_ids(workers, ids, "certificate")
        return _public_key(leaf)

    def _why_not(self, chain: Sequence[x509.Certificate], signed: Signed, now: datetime) -> str:
        """What most often is wrong with a chain, in plain words; empty if it is something else."""
        issuer = missing_issuer(signed.certificates, self._ders)
        if issuer:
            return f"its certificate is not from an authority in {self._source}: it leads to {issuer}"
        names = {each.issuer for each in chain}
        for each in (*chain, *(each for each in self._authorities if each.subject in names)):
            begin, end = each.not_valid_before_utc, each.not_valid_after_utc
            if not begin <= now <= end:
                what = "its certificate" if each is chain[0] else "an authority of its certificate"
                when = ("expired on", end) if now > end else ("is not valid before", begin)
                return f"{what} {when[0]} {shown_time(when[1].timestamp())} by this machine's clock"
        return ""


class TrustInKeys(PeerTrust):
    """Peers have keys of these fingerprints."""

    def __init__(self, entries: Sequence[HashEntry], source: str) -> None:
        self._entries = entries
        self._source = source

    def _key(self, workers: Sequence[int], signed: Signed, now: datetime) -> PublicKey:  # noqa: ARG002
        key = _shown_key(signed)
        presented = fingerprint_of(key)
        ids = ids_of_hash(presented, self._entries)
        if ids is None:
            raise PeerError(f"its key, {presented}, is not in {self._source}")
        _check_ids(workers, ids, "key")
        return key


class TrustInServer(PeerTrust):
    """Any key will do: whose it is, only the server says."""

    def _key(self, workers: Sequence[int], signed: Signed, now: datetime) -> PublicKey:  # noqa: ARG002
        return _shown_key(signed)


def fingerprint(pem: bytes, source: str) -> str:
    """That of the key in PEM: a certificate's, a private or a public one's.

    Raises:
        ConfigError: it holds none, or one that cannot sign for a worker.
    """
    try:
        ders = pem_certificates(pem)
        if ders:
            return fingerprint_of(_public_key(x509.load_der_x509_certificate(ders[0])))
        if b"PUBLIC KEY-----" in pem:
            return fingerprint_of(_checked(serialization.load_pem_public_key(pem)))
    except (PeerError, *_UNREADABLE) as error:
        raise ConfigError(f"{source} holds no key that can sign for a worker: {error}") from error
    return fingerprint_of(_private_key(pem, source).public_key())


def fingerprint_of(key: PublicKey) -> str:
    """``sha256:`` and 64 hexadecimal digits: of its SubjectPublicKeyInfo in DER."""
    return f"sha256:{hashlib.sha256(_public_der(key)).hexdigest()}"


def new_signing_key() -> bytes:
    """A fresh Ed25519 key, as PEM."""
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _private_key(pem: bytes, source: str) -> PrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, None)
        _checked(key.public_key())
    except PeerError as error:
        raise ConfigError(f"{source} cannot sign for a worker: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{source} is encrypted, and nobody can type its passphrase; decrypt it") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{source} holds no private key in PEM (-----BEGIN PRIVATE KEY-----)") from error
    assert isinstance(key, PrivateKey)
    return key


def _public_key(certificate: x509.Certificate) -> PublicKey:
    try:
        return _checked(certificate.public_key())
    except _UNREADABLE as error:
        raise PeerError(f"its key cannot be read: {_shown(str(error))}") from error


def _shown_key(signed: Signed) -> PublicKey:
    """The key that a peer shows, by its certificate or as it is."""
    chain = _chain(signed)
    if chain:
        return _public_key(chain[0])
    try:
        return _checked(serialization.load_der_public_key(signed.public_key))
    except _UNREADABLE as error:
        raise PeerError(f"its key cannot be read: {_shown(str(error))}") from error


def _checked(key: object) -> PublicKey:
    """The key, if it is of a kind that signs statements."""
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _HASHES:
        return key
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= _LEAST_RSA_BITS:
        return key
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    raise PeerError(f"its key is of another kind than {_KINDS}")


def _public_der(key: PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _order_bytes(curve: ec.EllipticCurve) -> int:
    return (curve.key_size + 7) // 8


def _fits(key: PublicKey, signature: bytes, text: bytes) -> bool:
    """Whether the signature is this key's."""
    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, text)
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(signature, text, _PSS, hashes.SHA256())
        else:
            size = _order_bytes(key.curve)
            if len(signature) != 2 * size:
                return False
            halves = (int.from_bytes(half, "big") for half in (signature[:size], signature[size:]))
            key.verify(encode_dss_signature(*halves), text, ec.ECDSA(_HASHES[key.curve.name]))
    except InvalidSignature:
        return False
    return True


def _chain(signed: Signed) -> list[x509.Certificate]:
    """A peer's certificates."""
    ders = signed.certificates
    if len(ders) > MOST_CERTIFICATES or sum(map(len, ders)) > MOST_CERTIFICATE_BYTES:
        raise PeerError(
            f"it shows more than {MOST_CERTIFICATES} certificates, or more than"
            f" {MOST_CERTIFICATE_BYTES:,} bytes of them"
        )
    try:
        return [x509.load_der_x509_certificate(der) for der in ders]
    except _UNREADABLE as error:
        raise PeerError(f"its certificate is damaged: {_shown(str(error))}") from error


def _ids(leaf: x509.Certificate) -> WorkerIds:
    """The workers that a certificate speaks for: by URIs alone, as at the server."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return WorkerIds()
    except (x509.DuplicateExtension, *_UNREADABLE) as error:
        raise PeerError(f"its certificate's names cannot be read: {_shown(str(error))}") from error
    return ids_of_names(names.get_values_for_type(x509.UniformResourceIdentifier))


def _check_ids(workers: Sequence[int], ids: WorkerIds, proof: str) -> None:
    outside = next((worker for worker in workers if worker not in ids), None)
    if outside is not None:
        raise PeerError(f"its {proof} speaks for {ids.named}, not for worker {outside}")


def _check_authority(authority: x509.Certificate, source: str) -> None:
    """That it can be an authority: what is wrong is said at start, not with the first peer."""
    name = _shown(authority.subject.rfc4514_string())
    try:
        is_authority = authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_authority = False
    if not is_authority:
        raise ConfigError(
            f"{source}: {name} is no authority: its certificate's basic constraints do not say CA; name the"
            " file of who signed the workers' certificates"
        )
    if isinstance(authority.public_key(), ed25519.Ed25519PublicKey):
        raise ConfigError(
            f"{source}: the authority {name} has an Ed25519 key, and chains are checked with EC and RSA keys"
            " only; use such an authority, or know the peers by --peer-keys"
        )


def _verifier(store: verification.Store, now: datetime) -> verification.ClientVerifier:
    """Checks chains as for TLS clients, but asks for no extension that private authorities leave out."""
    policy, either = verification.ExtensionPolicy, verification.Criticality.AGNOSTIC
    of_all = policy.permit_all().may_be_present(x509.ExtendedKeyUsage, either, _check_purpose)
    authority = of_all.require_present(x509.BasicConstraints, either, _check_is_authority).may_be_present(
        x509.KeyUsage, either, _check_signs_certificates
    )
    leaf = of_all.may_be_present(x509.KeyUsage, either, _check_signs)
    return (
        verification.PolicyBuilder()
        .store(store)
        .time(now)
        .max_chain_depth(MOST_CERTIFICATES - 1)
        .extension_policies(ca_policy=authority, ee_policy=leaf)
        .build_client_verifier()
    )


def _check_purpose(
    _policy: verification.Policy, _certificate: x509.Certificate, purposes: x509.ExtendedKeyUsage | None
) -> None:
    client, any_purpose = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE
    if purposes is not None and client not in purposes and any_purpose not in purposes:
        raise ValueError("its extended key usage is not of clients")


def _check_is_authority(
    _policy: verification.Policy, _certificate: x509.Certificate, constraints: x509.BasicConstraints
) -> None:
    if not constraints.ca:
        raise ValueError("who signed it is no authority")


def _check_signs_certificates(
    _policy: verification.Policy, _certificate: x509.Certificate, usage: x509.KeyUsage | None
) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("who signed it may not sign certificates, by its key usage")


def _check_signs(
    _policy: verification.Policy, _certificate: x509.Certificate, usage: x509.KeyUsage | None
) -> None:
    if usage is not None and not usage.digital_signature:
        raise ValueError("its key usage is not of signatures")


def _shown(text: str) -> str:
    """What a peer may have chosen, fit for a message."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:300]
