"""Certificates and keys that openssl makes, of its own defaults, show who a peer is."""

from __future__ import annotations

import datetime as dt
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from afl.errors import PeerError
from afl.security.certificates import read_pair
from afl.security.chains import Authorities
from afl.security.identity import parse_peer_keys
from afl.security.keys import fingerprint_of_pem
from afl.security.peers import PeerSigner, TrustInAuthorities, TrustInKeys

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


def openssl(folder: Path, *arguments: str) -> bytes:
    command = ["openssl", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60).stdout


@pytest.mark.parametrize("key", [["rsa:2048"], ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"]])
def test_an_authority_and_its_worker(tmp_path: Path, key: list[str]) -> None:
    new = ["req", "-nodes", "-newkey", *key]
    openssl(tmp_path, *new, "-x509", "-subj", "/O=Hospital/CN=Our CA", "-keyout", "ca.key", "-out", "ca.pem")
    openssl(tmp_path, *new, "-subj", "/CN=worker", "-keyout", "w.key", "-out", "w.csr")
    (tmp_path / "names").write_text("subjectAltName=URI:afl:worker:0-2,DNS:worker.example.org\n")
    signs = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "9", "-extfile", "names"]
    openssl(tmp_path, "x509", "-req", "-in", "w.csr", *signs, "-out", "w.pem")

    pair = read_pair(tmp_path / "w.pem", tmp_path / "w.key", names=("--certificate", "--key"))
    signed = PeerSigner.of_certificate(pair, "--key").sign(b"statement")
    trust = TrustInAuthorities(Authorities((tmp_path / "ca.pem").read_bytes(), "--peer-ca ca.pem"))
    now = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)
    trust.verify([0, 2], b"statement", signed, now)
    with pytest.raises(PeerError, match="speaks for workers 0-2, not for worker 3"):
        trust.verify([3], b"statement", signed, now)
    with pytest.raises(PeerError, match="workers 0-1: its certificate expired on "):
        trust.verify([0, 1], b"statement", signed, now + dt.timedelta(days=10))


def test_a_signing_key_and_its_fingerprint(tmp_path: Path) -> None:
    pem = openssl(tmp_path, "genpkey", "-algorithm", "ed25519")
    (tmp_path / "key").write_bytes(pem)
    der = openssl(tmp_path, "pkey", "-in", "key", "-pubout", "-outform", "DER")
    fingerprint = f"sha256:{hashlib.sha256(der).hexdigest()}"
    assert fingerprint_of_pem(pem, "key") == fingerprint
    assert fingerprint_of_pem(openssl(tmp_path, "pkey", "-in", "key", "-pubout"), "key") == fingerprint
    signed = PeerSigner.of_key(pem, "key").sign(b"statement")
    trust = TrustInKeys(parse_peer_keys(f"3 {fingerprint}", "peers.txt"), "peers.txt")
    trust.verify([3], b"statement", signed, dt.datetime.now(dt.UTC))
