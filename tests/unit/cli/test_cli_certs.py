"""``afl certs``: what it makes, what it leaves alone, and what it says."""

from __future__ import annotations

import shlex
import stat
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509

from afl.config import load_config
from afl.errors import ExitCode
from afl.security.certificates import expires_at, read_pair
from afl.security.identity import (
    ids_of_hash,
    ids_of_names,
    parse_peer_keys,
    parse_tokens,
    token_hash,
)
from afl.security.keys import fingerprint_of_pem
from afl_cli.main import main

DAY = 24 * 3600


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names_of(path: Path) -> x509.SubjectAlternativeName:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_what_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "certs"
    arguments = ["--server", "silo.example.org, 10.8.0.1,::1", "--workers", "3", "--days", "7", "--tokens"]
    assert main(["certs", str(folder), *arguments]) == ExitCode.OK
    pairs = ["ca", "server", "worker-0", "worker-1", "worker-2"]
    tokens = ["token-0", "token-1", "token-2"]
    assert set(contents(folder)) == {
        *(f"{name}.{suffix}" for name in pairs for suffix in ("pem", "key")),
        *tokens,
        "tokens",
    }
    for path in folder.iterdir():
        mode = 0o600 if path.suffix == ".key" or path.name in tokens else 0o644
        assert stat.S_IMODE(path.stat().st_mode) == mode, path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in pairs:
        read_pair(folder / f"{name}.pem", folder / f"{name}.key", names=("certificate", "key"))
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    for name in pairs[1:]:
        x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes()).verify_directly_issued_by(
            authority
        )
    expires = expires_at((folder / "server.pem").read_bytes(), "")
    assert expires - time.time() == pytest.approx(7 * DAY, abs=600)

    server = names_of(folder / "server.pem")
    assert server.get_values_for_type(x509.DNSName) == ["silo.example.org"]
    assert [str(address) for address in server.get_values_for_type(x509.IPAddress)] == ["10.8.0.1", "::1"]
    worker = names_of(folder / "worker-2.pem").get_values_for_type(x509.UniformResourceIdentifier)
    assert str(ids_of_names(worker)) == "2"
    entries = parse_tokens((folder / "tokens").read_text(), "tokens")
    assert str(ids_of_hash(token_hash((folder / "token-1").read_text().strip()), entries)) == "1"

    said = capsys.readouterr().out
    for path in folder.glob("token-*"):
        assert path.read_text().strip() not in said
    assert f"--set server.tls.key={folder / 'server.key'}" in said


def test_what_the_server_is_given_can_be_pasted_whatever_the_folder_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "Acme: keys #2"
    assert main(["certs", str(folder), "--workers", "1"]) == ExitCode.OK
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("for the server: ")]
    words = shlex.split(said.removeprefix("for the server: "))
    config = tmp_path / "server.yaml"
    config.write_text(
        "{workers: 1, task: {name: digits}, algorithm: {name: afl-br, rounds: 1, eta_w: 1, eta_q: 1}}"
    )
    assert words[::2] == ["--set"] * 3
    tls = load_config(config, words[1::2]).server.tls
    assert tls is not None
    assert (tls.certificate, tls.key) == (folder / "server.pem", folder / "server.key")


def test_what_is_there_stays_and_what_is_missing_is_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certs", str(tmp_path), "--workers", "1", "--tokens"]) == ExitCode.OK
    expires = expires_at((tmp_path / "worker-0.pem").read_bytes(), "")
    assert expires - time.time() == pytest.approx(90 * DAY, abs=600)
    before = contents(tmp_path)
    assert main(["certs", str(tmp_path), "--workers", "2", "--tokens"]) == ExitCode.OK
    after = contents(tmp_path)
    assert after.keys() - before.keys() == {"worker-1.pem", "worker-1.key", "token-1"}
    assert {name for name in before if before[name] != after[name]} == {"tokens"}
    assert after["tokens"].startswith(before["tokens"])
    capsys.readouterr()
    assert main(["certs", str(tmp_path), "--workers", "2", "--tokens"]) == ExitCode.OK
    assert contents(tmp_path) == after
    assert "nothing; 6 that existed are kept" in capsys.readouterr().out


def test_a_token_that_was_taken_to_its_worker_is_not_made_again(tmp_path: Path) -> None:
    main(["certs", str(tmp_path), "--workers", "1", "--tokens"])
    (tmp_path / "token-0").unlink()
    before = contents(tmp_path)
    main(["certs", str(tmp_path), "--workers", "1", "--tokens"])
    assert contents(tmp_path) == before


def test_certificates_are_renewed_by_the_same_authority_for_the_same_hosts(tmp_path: Path) -> None:
    main(["certs", str(tmp_path), "--server", "silo.example.org,10.8.0.1", "--workers", "2", "--tokens"])
    before = contents(tmp_path)
    assert main(["certs", str(tmp_path), "--workers", "1", "--days", "9", "--renew"]) == ExitCode.OK
    after = contents(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"server.pem", "server.key", "worker-0.pem", "worker-0.key"}
    server = names_of(tmp_path / "server.pem")
    assert server.get_values_for_type(x509.DNSName) == ["silo.example.org"]
    assert [str(address) for address in server.get_values_for_type(x509.IPAddress)] == ["10.8.0.1"]
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--server", "silo:50051"], "without ports"),
        (["--server", "0.0.0.0"], "--server 0.0.0.0: write the names and addresses"),
        (["--server", ""], "write the names and addresses"),
        (["--days", "0"], "--days 0: a whole number from 1 to 3650"),
        (["--workers", "-1"], "--workers -1: a whole number from 0 to 10000"),
        (["--tokens"], "--tokens makes tokens for workers; say how many with --workers"),
        (["--signing-keys"], "--signing-keys makes signing keys for workers; say how many with --workers"),
    ],
)
def test_options_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["certs", str(tmp_path / "certs"), *arguments]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err
    assert not (tmp_path / "certs").exists()


def test_an_authority_that_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["certs", str(tmp_path)])
    assert "for workers: name how many with --workers N" in capsys.readouterr().out
    key = (tmp_path / "ca.key").read_bytes()
    (tmp_path / "ca.key").unlink()
    assert main(["certs", str(tmp_path), "--workers", "1"]) == ExitCode.CONFIG
    assert "ca.pem exists and" in capsys.readouterr().err
    (tmp_path / "ca.key").write_bytes((tmp_path / "server.key").read_bytes())
    assert main(["certs", str(tmp_path), "--workers", "1"]) == ExitCode.CONFIG
    assert "certificate and its key do not belong together" in capsys.readouterr().err
    (tmp_path / "ca.key").write_bytes(b"nothing")
    assert main(["certs", str(tmp_path), "--workers", "1"]) == ExitCode.CONFIG
    assert capsys.readouterr().err == (
        f"afl certs: {tmp_path / 'ca.pem'} and {tmp_path / 'ca.key'}: the authority's certificate or key "
        "is not in PEM, or damaged; put them back, or name another directory for a new authority\n"
    )
    (tmp_path / "ca.key").write_bytes(key)
    assert main(["certs", str(tmp_path), "--days", "3650", "--renew"]) == ExitCode.CONFIG
    assert "--days 3650 is longer than the authority lasts" in capsys.readouterr().err


def test_signing_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", str(tmp_path), "--workers", "2", "--signing-keys"]) == ExitCode.OK
    assert "and with secure aggregation: --peer-keys peers.txt --signing-key signing-0.key" in (
        capsys.readouterr().out
    )
    before = contents(tmp_path)
    assert before.keys() >= {"signing-0.key", "signing-1.key", "peers.txt"}
    assert before["signing-0.key"] != before["signing-1.key"]
    assert stat.S_IMODE((tmp_path / "signing-1.key").stat().st_mode) == 0o600
    entries = parse_peer_keys(before["peers.txt"].decode(), "peers.txt")
    for worker in ("0", "1"):
        fingerprint = fingerprint_of_pem(before[f"signing-{worker}.key"], "key")
        assert str(ids_of_hash(fingerprint, entries)) == worker

    # One was taken to its worker, another is there and not listed, the third is new.
    (tmp_path / "signing-0.key").unlink()
    (tmp_path / "peers.txt").write_bytes(b"\n".join(before["peers.txt"].splitlines()[:2]))
    assert main(["certs", str(tmp_path), "--workers", "3", "--signing-keys"]) == ExitCode.OK
    after = contents(tmp_path)
    assert after["peers.txt"].startswith(before["peers.txt"])
    assert after["peers.txt"].count(b"\n") == before["peers.txt"].count(b"\n") + 1
    assert "signing-0.key" not in after
    assert after["signing-1.key"] == before["signing-1.key"]
    assert "signing-2.key" in after


def test_the_fingerprint_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["certs", str(tmp_path), "--workers", "1", "--signing-keys"])
    before = contents(tmp_path)
    capsys.readouterr()
    said = []
    for name in ("signing-0.key", "worker-0.key", "worker-0.pem"):
        assert main(["certs", "--fingerprint", str(tmp_path / name)]) == ExitCode.OK
        said.append(capsys.readouterr().out)
    assert before["peers.txt"].decode().endswith(f"\n0 {said[0]}")
    assert said[0] != said[1] == said[2]
    for path in (tmp_path / "peers.txt", tmp_path / "nowhere"):
        assert main(["certs", "--fingerprint", str(path)]) == ExitCode.CONFIG
    neither, nowhere = capsys.readouterr().err.splitlines()
    assert "peers.txt holds neither a key nor a certificate in PEM" in neither
    assert "nowhere cannot be read: No such file or directory" in nowhere
    assert contents(tmp_path) == before
    assert main(["certs"]) == ExitCode.CONFIG
    assert "name a directory for the files: afl certs DIR" in capsys.readouterr().err


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "afl.security.issuing", None)
    assert main(["certs", str(tmp_path)]) == ExitCode.CONFIG
    assert "pip install 'afl[certs]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "afl.security.keys", None)
    assert main(["certs", "--fingerprint", str(tmp_path / "key")]) == ExitCode.CONFIG
    assert "pip install 'afl[certs]'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["certs", str(tmp_path / "file" / "certs")]) == ExitCode.STORAGE
    assert "cannot be made: it is a file, and must be a folder; name" in capsys.readouterr().err
