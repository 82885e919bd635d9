"""Certificates and keys in files: what is said of those that cannot be used, and when they expire."""

from __future__ import annotations

import datetime as dt
import logging
import os
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from afl import paths
from afl.errors import ConfigError
from afl.security.certificates import (
    expires_at,
    missing_issuer,
    pem_certificates,
    read_authorities,
    read_pair,
    shown_time,
    validity,
    warn_if_open,
)
from support.identities import BelowRoot, Identities

NAMES = ("--certificate", "--key")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return Identities(tmp_path_factory.mktemp("pki"))


def test_a_pair(ours: Identities) -> None:
    pair = ours.server()
    read = read_pair(pair.certificate, pair.key, names=NAMES)
    assert (read.certificate, read.key) == (pair.certificate.read_bytes(), pair.key.read_bytes())
    assert "PRIVATE" not in repr(read)


@pytest.mark.timeout(20)
def test_a_fifo_that_nobody_writes_to_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "ca.pem")
    monkeypatch.setattr(paths, "FIFO_WAIT_S", 0.1)
    with pytest.raises(ConfigError, match=r"^--ca .*ca\.pem cannot be read: it is a FIFO, and nobody"):
        read_authorities(tmp_path / "ca.pem", "--ca")


def test_pairs_that_cannot_be_used(ours: Identities, tmp_path: Path) -> None:
    pair, other = ours.server(), ours.worker("3")
    with pytest.raises(ConfigError, match="do not belong together: the key is another certificate's"):
        read_pair(pair.certificate, other.key, names=NAMES)
    with pytest.raises(ConfigError, match=r"^--key .*nowhere cannot be read: No such file or directory$"):
        read_pair(pair.certificate, tmp_path / "nowhere", names=NAMES)
    with pytest.raises(ConfigError, match=r"^--certificate .* holds no certificate in PEM"):
        read_pair(pair.key, pair.key, names=NAMES)
    with pytest.raises(ConfigError, match="cannot be used: is the second a private key in PEM"):
        read_pair(pair.certificate, pair.certificate, names=NAMES)


def test_a_key_with_a_passphrase_is_refused_without_asking(ours: Identities, tmp_path: Path) -> None:
    pair, encrypted = ours.server(), tmp_path / "encrypted.key"
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"passphrase")
    encrypted.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    )
    with pytest.raises(ConfigError, match="the key is encrypted, and nobody can type its passphrase"):
        read_pair(pair.certificate, encrypted, names=NAMES)


def test_authorities(ours: Identities, tmp_path: Path) -> None:
    assert read_authorities(ours.ca, "--ca") == ours.ca.read_bytes()
    named = tmp_path / "named"
    named.write_bytes("# Főtanúsítvány\n".encode() + ours.ca.read_bytes())
    assert read_authorities(named, "--ca") == named.read_bytes()
    assert pem_certificates(named.read_bytes()) == pem_certificates(ours.ca.read_bytes())
    in_der = pem_certificates(ours.ca.read_bytes())[0]
    for content in (b"", b"no certificate", ours.server().key.read_bytes(), in_der):
        (tmp_path / "ca").write_bytes(content)
        with pytest.raises(ConfigError, match=r"^--ca .* holds no certificate in PEM"):
            read_authorities(tmp_path / "ca", "--ca")
    with pytest.raises(ConfigError, match=r"^--ca /dev/zero has more than 16,777,216 bytes"):
        read_authorities(Path("/dev/zero"), "--ca")


@pytest.mark.parametrize("year", [1999, 2026, 2049, 2050, 2300])
def test_the_dates_of_a_certificate(year: int) -> None:
    """Until 2049 a date has two digits of its year, later four."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    begin, end = dt.datetime(1990, 1, 2, 3, 4, 5, tzinfo=dt.UTC), dt.datetime(year, 6, 7, 8, 9, tzinfo=dt.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 2**150)
        .not_valid_before(begin)
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    found = expires_at(b"text before\n" + pem, "x")
    assert found == end.timestamp()
    assert validity(pem, "x") == (begin.timestamp(), end.timestamp())
    assert shown_time(found) == f"{year}-06-07 08:09 UTC"


def test_the_library_s_dates_are_ours(ours: Identities) -> None:
    pem = ours.ca.read_bytes()
    read = x509.load_pem_x509_certificate(pem)
    assert expires_at(pem, "ca") == read.not_valid_after_utc.timestamp()


@pytest.mark.parametrize("body", ["", "MAA=", "MIIB", "AAAA", "/////w=="])
def test_a_damaged_certificate(body: str) -> None:
    pem = f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n".encode()
    with pytest.raises(ConfigError, match=r"^x holds a damaged certificate|^x holds no certificate"):
        expires_at(pem, "x")


def test_who_can_read_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "key"
    path.touch()
    for mode, said in ((0o600, ""), (0o640, ""), (0o644, "0644"), (0o604, "0604")):
        path.chmod(mode)
        caplog.clear()
        warn_if_open(logging.getLogger("afl.test"), "--key", path)
        wanted = f"--key {path} can be read by every user of this machine (mode {said}); chmod 600 it"
        assert caplog.messages == ([wanted] if said else [])
    warn_if_open(logging.getLogger("afl.test"), "--key", tmp_path / "nowhere")
    assert len(caplog.messages) == 1


def test_whose_certificate_is_missing(ours: Identities, tmp_path: Path) -> None:
    below = BelowRoot(tmp_path)
    pair = below.worker("3")
    chain = pem_certificates(below.whole(pair).certificate.read_bytes())
    leaf, intermediate = chain
    (root,) = pem_certificates(below.ca.read_bytes())
    (other,) = pem_certificates(ours.ca.read_bytes())
    assert missing_issuer([leaf], [root]) == "Acme Issuing 7"
    assert missing_issuer(chain, [root]) == ""
    assert missing_issuer([leaf], [root, intermediate]) == ""
    assert missing_issuer([leaf], [intermediate]) == "Acme Root", "no end, as somebody else has signed it"
    assert missing_issuer([*chain, root], [other]) == "Acme Root"
    assert missing_issuer([leaf[:-9]], [root]) == missing_issuer([b""], []) == missing_issuer([], []) == ""


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (
            [(NameOID.ORGANIZATION_NAME, "Ünï & Co"), (NameOID.COMMON_NAME, "Issuing 7")],
            "Issuing 7, Ünï & Co",
        ),
        ([(NameOID.COMMON_NAME, "a\x1b[2Jb\nc")], "a?[2Jb?c"),
        ([(NameOID.ORGANIZATION_NAME, "x" * 60)] * 4, ", ".join(["x" * 60] * 4)[:200]),
    ],
)
def test_an_authority_s_name_fits_a_line(names: list[tuple[x509.ObjectIdentifier, str]], shown: str) -> None:
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(*each) for each in names])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + dt.timedelta(1))
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    assert missing_issuer(pem_certificates(pem), []) == shown
