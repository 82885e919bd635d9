"""Certificates and tokens for tests: good ones, and each kind of wrong one."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

from afl.security.certificates import KeyPair
from afl.security.identity import new_token, token_hash
from afl.security.issuing import Authority

LONG_AGO = dt.timedelta(days=50)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    certificate: Path
    key: Path

    def write(self, issued: KeyPair) -> None:
        """Put another certificate and key into the files, each at once."""
        for path, content in ((self.key, issued.key), (self.certificate, issued.certificate)):
            new = path.with_suffix(".new")
            new.touch(mode=0o600)
            new.write_bytes(content)
            new.replace(path)

    @property
    def worker_options(self) -> tuple[str, ...]:
        """Of a worker's command line."""
        return "--certificate", str(self.certificate), "--key", str(self.key)


class Identities:
    """An authority, and what it has signed, in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = Authority.make(dt.datetime.now(dt.UTC) - LONG_AGO)
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self.authority.own().certificate)
        self.tokens = folder / "tokens"

    def issue_for_server(self, hosts: Sequence[str] = ("localhost", "127.0.0.1"), days: int = 30) -> KeyPair:
        """A certificate for a server; one of negative days has expired."""
        return self.authority.for_server(hosts, self._begin(days), abs(days))

    def issue_for_worker(self, ids: str, days: int = 30) -> KeyPair:
        """A certificate for workers; one of negative days has expired."""
        return self.authority.for_worker(ids, self._begin(days), abs(days))

    def server(self, name: str = "server", **options: Any) -> Pair:
        """A server's certificate, in files."""
        return self.written(name, self.issue_for_server(**options))

    def worker(self, ids: str, name: str = "", **options: Any) -> Pair:
        """Workers' certificate, in files."""
        return self.written(name or f"worker-{ids}", self.issue_for_worker(ids, **options))

    def brief(self, ids: str, seconds: float) -> Pair:
        """Workers' certificate that expires in so many seconds, in files."""
        begin = dt.datetime.now(dt.UTC) - dt.timedelta(days=1) + dt.timedelta(seconds=seconds)
        return self.written(f"brief-{ids}", self.authority.for_worker(ids, begin, 1))

    def early(self, ids: str) -> Pair:
        """Workers' certificate that is valid from tomorrow on, in files."""
        begin = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
        return self.written(f"early-{ids}", self.authority.for_worker(ids, begin, 30))

    def token(self, ids: str, *, is_known: bool = True) -> Path:
        """A file with a new token, whose hash is in the file of tokens unless it is not known."""
        token = new_token()
        path = self.folder / f"token-{ids}{'' if is_known else '-unknown'}"
        path.touch(mode=0o600)
        path.write_text(f"{token}\n", encoding="utf-8")
        if is_known:
            self.know(ids, token)
        return path

    def know(self, ids: str, token: str) -> None:
        """Add a token's hash to the file of tokens."""
        with self.tokens.open("a", encoding="utf-8") as file:
            file.write(f"{ids} {token_hash(token)}\n")

    def written(self, name: str, issued: KeyPair) -> Pair:
        """A certificate and its key in files of this name."""
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        pair.write(issued)
        return pair

    def called(self, name: str, *names: x509.GeneralName) -> Pair:
        """A certificate with these alternative names, in files."""
        return self.written(
            name, certified(name, x509.SubjectAlternativeName(names), by=_holder(self.authority)).pem
        )

    @staticmethod
    def _begin(days: int) -> dt.datetime:
        return dt.datetime.now(dt.UTC) - (LONG_AGO if days < 0 else dt.timedelta())


class BelowRoot(Identities):
    """What an intermediate authority has signed; ``ca`` is its root's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        root = _authority("Acme Root")
        self.authority = _authority("Acme Issuing 7", root)
        self.ca.write_bytes(root.own().certificate)

    def whole(self, pair: Pair) -> Pair:
        """The same, in files of its own, with the intermediate authority's certificate after it."""
        chain = pair.certificate.read_bytes() + self.authority.own().certificate
        return self.written(f"{pair.certificate.stem}-whole", KeyPair(chain, pair.key.read_bytes()))


Signer = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey
CA = x509.BasicConstraints(ca=True, path_length=None)


@dataclass(frozen=True)
class Holder:
    """Whoever has a certificate and its key."""

    certificate: x509.Certificate
    key: Signer

    @property
    def der(self) -> bytes:
        """The certificate."""
        return self.certificate.public_bytes(serialization.Encoding.DER)

    @property
    def pem(self) -> KeyPair:
        """Both."""
        pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
        key = self.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
        return KeyPair(self.certificate.public_bytes(pem), key)


def new_key(kind: str = "p256") -> Signer:
    """One of p256, p384, p521, rsa, ed25519."""
    if kind == "rsa":
        return rsa.generate_private_key(65537, 2048)
    if kind == "ed25519":
        return ed25519.Ed25519PrivateKey.generate()
    curves = {"p256": ec.SECP256R1(), "p384": ec.SECP384R1(), "p521": ec.SECP521R1()}
    return ec.generate_private_key(curves[kind])


def certified(
    name: str,
    *extensions: x509.ExtensionType,
    by: Holder | None = None,
    key: Signer | None = None,
    critical: Sequence[type[x509.ExtensionType]] = (x509.BasicConstraints,),
    begin: dt.datetime | None = None,
    end: dt.datetime | None = None,
) -> Holder:
    """Someone with a certificate of these extensions and no others; self-signed if it is by nobody."""
    key, now = key or new_key(), dt.datetime.now(dt.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, signer = (subject, key) if by is None else (by.certificate.subject, by.key)
    public, serial = key.public_key(), x509.random_serial_number()
    begin, end = begin or now - LONG_AGO, end or now + LONG_AGO
    builder = x509.CertificateBuilder(issuer, subject, public, serial, begin, end)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=isinstance(extension, tuple(critical)))
    digest = None if isinstance(signer, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return Holder(builder.sign(signer, digest), key)


def _holder(authority: Authority) -> Holder:
    own = authority.own()
    key = serialization.load_pem_private_key(own.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return Holder(x509.load_pem_x509_certificate(own.certificate), key)


def _authority(name: str, above: Authority | None = None) -> Authority:
    made = certified(name, CA, by=None if above is None else _holder(above))
    assert isinstance(made.key, ec.EllipticCurvePrivateKey)
    return Authority(made.certificate, made.key)


def tls(pair: Pair, client_ca: Path | None = None) -> dict[str, str]:
    """The section server.tls."""
    section = {"certificate": str(pair.certificate), "key": str(pair.key)}
    return section if client_ca is None else {**section, "client_ca": str(client_ca)}


def serial_line(pair: Pair) -> str:
    """The line of a list of revoked certificates, as ``openssl x509 -noout -serial`` prints it."""
    serial = x509.load_pem_x509_certificate(pair.certificate.read_bytes()).serial_number
    digits = f"{serial:X}"
    return f"serial={digits.zfill(len(digits) + len(digits) % 2)}\n"
