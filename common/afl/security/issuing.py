"""A certificate authority for development, and what it signs. The only module that needs ``cryptography``."""

from __future__ import annotations

import datetime as dt
import ipaddress
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

_CLOCKS: Final = dt.timedelta(minutes=5)
"""How far two machines' clocks may be apart without a new certificate being refused as not yet valid."""


class Authority:
    """Signs certificates for the server and its workers."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def make(cls, now: dt.datetime) -> Self:
        """A new authority, with a key of its own."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("afl development CA")
        certificate = (
            _builder(name, name, key, now, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def read(cls, certificate: bytes, key: bytes) -> Self:
        """One that was written before.

        Raises:
            ConfigError: if certificate and key cannot be used.
        """
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
        """A certificate for a server that is reached under these names or addresses.

        Raises:
            ConfigError: if the authority ends first.
        """
        return self._sign("afl server", [_host(host) for host in hosts], now, days, is_server=True)

    def for_worker(self, ids: str, now: dt.datetime, days: int) -> KeyPair:
        """A certificate that speaks for these worker ids, and no others.

        Raises:
            ConfigError: if the authority ends first.
        """
        names = [x509.UniformResourceIdentifier(URI_PREFIX + ids)]
        return self._sign(f"afl worker {ids}", names, now, days, is_server=False)

    def _sign(
        self,
        common_name: str,
        names: Sequence[x509.GeneralName],
        now: dt.datetime,
        days: int,
        *,
        is_server: bool,
    ) -> KeyPair:
        end = self._certificate.not_valid_after_utc
        if now + dt.timedelta(days=days) > end:
            raise ConfigError(
                f"--days {days} is longer than the authority lasts (until {end:%Y-%m-%d}); name fewer days,"
                " or begin with an authority in a new directory"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            _builder(_name(common_name), self._certificate.subject, key, now, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(signer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return _as_pem(certificate, key)


def hosts_of(certificate: bytes) -> list[str]:
    """The names and addresses in a server's certificate.

    Raises:
        ConfigError: if it is none.
    """
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


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: dt.datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _as_pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return KeyPair(certificate.public_bytes(pem), private)
