"""A certificate authority for development, and what it signs. Needs ``cryptography``."""

from __future__ import annotations

import datetime as dt
import ipaddress
import secrets
from collections.abc import Sequence
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from afl.errors import ConfigError
from afl.security.certificates import KeyPair
from afl.security.identity import URI_PREFIX

AUTHORITY_DAYS: Final = 3650
# How far two machines' clocks may be apart without a new certificate being refused as not yet valid.
_CLOCKS: Final = dt.timedelta(minutes=5)
_SERIAL_BITS: Final = 64  # random ones, as CA/Browser Forum's baseline requirements (7.1) ask for
_OTHER_USAGES: Final = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "encipher_only",
    "decipher_only",
)
_SIGNS_CERTIFICATES: Final = x509.KeyUsage(
    key_cert_sign=True, crl_sign=True, **dict.fromkeys(_OTHER_USAGES, False)
)


class Authority:
    """Signs certificates for the server and its workers; :class:`ConfigError` if it ends before one would."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def make(cls, now: dt.datetime) -> Self:
        """A new authority, with a key of its own."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("afl CA")
        own = (
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_SIGNS_CERTIFICATES, True),
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        )
        return cls(_signed(name, key, name, key, now, days=AUTHORITY_DAYS, extensions=own), key)

    @classmethod
    def read(cls, certificate: bytes, key: bytes) -> Self:
        """One that was written before; :class:`ConfigError` if certificate and key cannot be used."""
        try:
            authority = x509.load_pem_x509_certificate(certificate)
            loaded = serialization.load_pem_private_key(key, None)
        except (ValueError, TypeError) as error:
            raise ConfigError("the authority's certificate or key is not in PEM, or damaged") from error
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ConfigError("the authority's key is of another kind than `afl certs` makes")
        if loaded.public_key() != authority.public_key():
            raise ConfigError("the authority's certificate and its key do not belong together")
        return cls(authority, loaded)

    def own(self) -> KeyPair:
        """Its own certificate and key."""
        return _as_pem(self._certificate, self._key)

    def for_server(self, hosts: Sequence[str], now: dt.datetime, days: int) -> KeyPair:
        """A certificate for a server that is reached under these names or addresses."""
        names = [_host(host) for host in hosts]
        return self._issue("afl server", names, ExtendedKeyUsageOID.SERVER_AUTH, now, days)

    def for_worker(self, ids: str, now: dt.datetime, days: int) -> KeyPair:
        """A certificate that speaks for these worker ids, and no others."""
        names = [x509.UniformResourceIdentifier(URI_PREFIX + ids)]
        return self._issue(f"afl worker {ids}", names, ExtendedKeyUsageOID.CLIENT_AUTH, now, days)

    def _issue(
        self,
        common_name: str,
        names: Sequence[x509.GeneralName],
        purpose: x509.ObjectIdentifier,
        now: dt.datetime,
        days: int,
    ) -> KeyPair:
        end = self._certificate.not_valid_after_utc
        if now + dt.timedelta(days=days) > end:
            raise ConfigError(
                f"--days {days} is longer than the authority lasts (until {end:%Y-%m-%d}); name fewer days,"
                " or begin with an authority in a new directory"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        # No more: with secure aggregation every worker is sent those of all its peers.
        extensions = (
            (x509.ExtendedKeyUsage([purpose]), False),
            (x509.SubjectAlternativeName(names), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False),
        )
        subject, issuer = _name(common_name), self._certificate.subject
        return _as_pem(_signed(subject, key, issuer, self._key, now, days=days, extensions=extensions), key)


def hosts_of(certificate: bytes) -> list[str]:
    """The names and addresses in a server's certificate; :class:`ConfigError` if it is none."""
    try:
        read = x509.load_pem_x509_certificate(certificate)
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"the existing server certificate names no host: {error}") from error
    addresses = names.get_values_for_type(x509.IPAddress)
    return [*names.get_values_for_type(x509.DNSName), *map(str, addresses)]


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    begin: dt.datetime,
    *,
    days: int,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
) -> x509.Certificate:
    """A certificate of the subject's key; each extension is critical or not."""
    serial = 2**_SERIAL_BITS + secrets.randbits(_SERIAL_BITS)
    builder = x509.CertificateBuilder(
        issuer,
        subject,
        key.public_key(),
        serial,
        begin - _CLOCKS,
        begin + dt.timedelta(days),
    )
    for extension, is_critical in extensions:
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(issuer_key, hashes.SHA256())


def _as_pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return KeyPair(certificate.public_bytes(pem), private)
