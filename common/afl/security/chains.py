"""Whether a certificate leads to an authority that this worker was told of. Needs ``cryptography``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID

from afl.errors import ConfigError, PeerError
from afl.security.certificates import missing_issuer, pem_certificates, shown_time
from afl.security.identity import WorkerIds, ids_of_names
from afl.security.keys import UNREADABLE

MOST_CERTIFICATES: Final = 4
"""The longest chain that is looked at: whoever sends it chose its length, and each costs a signature."""

MOST_BYTES: Final = 16 * 1024
"""Of all certificates in a chain, in DER."""

_CLIENT, _ANY = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE
_AUTHORITIES_KEYS: Final = (ec.EllipticCurvePublicKey, rsa.RSAPublicKey)
# Words of the library's about its own doings around the reason.
_NOISE: Final = re.compile(
    r"validation failed: |candidates exhausted: |invalid extension: |Python extension validator failed: "
    r"|ValueError: | \(encountered processing .*\)",
    re.DOTALL,
)


class Authorities:
    """Those whose certificates a file holds; they need not have signed themselves."""

    def __init__(self, pem: bytes, source: str) -> None:
        """Messages call the file ``source``.

        Raises:
            ConfigError: one of them is no authority, or has a key of a kind that chains are not checked with.
        """
        self.source = source
        self._ders = pem_certificates(pem)
        try:
            self._certificates = [_read(der) for der in self._ders]
            for certificate in self._certificates:
                _check_authority(certificate, source)
        except UNREADABLE as error:
            raise ConfigError(f"{source} holds a damaged certificate: {error}") from error
        self._store = verification.Store(self._certificates)

    def check(self, chain: Sequence[x509.Certificate], now: datetime) -> None:
        """Raises PeerError unless the chain, the leaf first, is valid now and leads to one of them."""
        try:
            _verifier(self._store, now).verify(chain[0], list(chain[1:]))
        except verification.VerificationError as error:
            raise PeerError(
                self._why_not(chain, now) or f"its certificate is refused: {_why(error)}"
            ) from error

    def _why_not(self, chain: Sequence[x509.Certificate], now: datetime) -> str:
        """What most often is wrong with a chain; empty if it is something else."""
        issuers = {each.issuer for each in chain}
        above = [each for each in self._certificates if each.subject in issuers]
        for each in (*chain, *above):
            begin, end = each.not_valid_before_utc, each.not_valid_after_utc
            if not begin <= now <= end:
                what = "its certificate" if each is chain[0] else "an authority of its certificate"
                when, date = ("expired on", end) if now > end else ("is not valid before", begin)
                return f"{what} {when} {shown_time(date.timestamp())} by this machine's clock"
        ders = [each.public_bytes(serialization.Encoding.DER) for each in chain]
        name = missing_issuer(ders, self._ders) if not above else ""
        return f"its certificate leads to {name}, which is not in {self.source}" if name else ""


def read_chain(ders: Sequence[bytes]) -> list[x509.Certificate]:
    """A peer's certificates, from DER. Raises PeerError if they are damaged, or too many."""
    if len(ders) > MOST_CERTIFICATES or sum(map(len, ders)) > MOST_BYTES:
        most = f"{MOST_CERTIFICATES} certificates, or {MOST_BYTES:,} bytes of them"
        raise PeerError(f"it shows more than {most}")
    try:
        return [_read(der) for der in ders]
    except UNREADABLE as error:
        raise PeerError("its certificate is damaged") from error


def ids_of(leaf: x509.Certificate) -> WorkerIds:
    """The workers that a certificate speaks for: by names of type URI alone, as at the server."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return WorkerIds()
    return ids_of_names(names.get_values_for_type(x509.UniformResourceIdentifier))


def _read(der: bytes) -> x509.Certificate:
    """A certificate of which later no part turns out to be damaged, except for its key."""
    certificate = x509.load_der_x509_certificate(der)
    # The library reads these when they are asked for.
    for part in ("issuer", "subject", "not_valid_before_utc", "not_valid_after_utc", "extensions"):
        getattr(certificate, part)
    return certificate


def _check_authority(certificate: x509.Certificate, source: str) -> None:
    """What would refuse every peer is said at start."""
    name = certificate.subject.rfc4514_string()
    try:
        is_authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_authority = False
    if not is_authority:
        raise ConfigError(
            f"{source}: {name} is no authority, by its basic constraints; name the certificate of who signed"
            " the workers'"
        )
    if not isinstance(certificate.public_key(), _AUTHORITIES_KEYS):
        raise ConfigError(
            f"{source}: {name} has neither an EC nor an RSA key, which chains are checked with; use another"
            " authority, or know the peers by --peer-keys"
        )


def _verifier(store: verification.Store, now: datetime) -> verification.ClientVerifier:
    """Checks chains as TLS does those of clients, but asks for no extension that private authorities leave
    out, and allows any that are known."""
    policy, either = verification.ExtensionPolicy.permit_all(), verification.Criticality.AGNOSTIC
    policy = policy.may_be_present(x509.ExtendedKeyUsage, either, _is_of_clients)
    above = policy.require_present(x509.BasicConstraints, either, None)  # its CA flag is always checked
    return (
        verification.PolicyBuilder()
        .store(store)
        .time(now)
        .max_chain_depth(MOST_CERTIFICATES - 1)
        .extension_policies(
            ca_policy=above.may_be_present(x509.KeyUsage, either, _signs_certificates),
            ee_policy=policy.may_be_present(x509.KeyUsage, either, _signs),
        )
        .build_client_verifier()
    )


# The library calls each of these with a certificate's extension.


def _is_of_clients(_policy: object, _certificate: object, usage: x509.ExtendedKeyUsage | None) -> None:
    if usage is not None and not {_CLIENT, _ANY} & set(usage):
        raise ValueError("its extended key usage does not name clients")


def _signs_certificates(_policy: object, _certificate: object, usage: x509.KeyUsage | None) -> None:
    if usage is not None and not usage.key_cert_sign:
        raise ValueError("who signed it may not sign certificates, by its key usage")


def _signs(_policy: object, _certificate: object, usage: x509.KeyUsage | None) -> None:
    if usage is not None and not usage.digital_signature:
        raise ValueError("its key usage does not name signatures")


def _why(error: verification.VerificationError) -> str:
    """The library's reason, in which a peer may have chosen words."""
    reason = _NOISE.sub("", str(error))
    return "".join(letter if letter.isprintable() else "?" for letter in reason)[:200]
