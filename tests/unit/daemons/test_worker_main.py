"""`afl-worker`: the signals that end it, and what its command line says of certificates and tokens."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest

from afl.errors import ConfigError, PolicyError, SignalError
from afl.security.certificates import pem_certificates
from afl.site.policy import DEFAULT_MIN_BATCH
from afl_worker.departures import Departures
from afl_worker.main import make_worker_parser, worker_options
from afl_worker.network.credentials import Credentials
from afl_worker.options import WorkerOptions
from afl_worker.process import interrupt
from support.identities import Identities


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_the_first_signal_any_other_ends_the_process_at_once(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SignalError, match=number.name):
            interrupt(number, None)
        assert all(signal.getsignal(each) is signal.SIG_DFL for each in before)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def options_of(*arguments: str) -> WorkerOptions:
    return worker_options(
        make_worker_parser().parse_args(["--id", "0", "--server", "127.0.0.1:1", *arguments])
    )


def test_credentials_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Identities(tmp_path)
    pair, token = ours.worker("0"), ours.token("0")
    monkeypatch.setenv("AFL_TOKEN", "t" * 40)
    files = options_of("--ca", str(ours.ca), *pair.worker_options, "--server-name", "silo").credentials
    read = files.read()
    assert (read.authorities, read.token, read.server_name) == (ours.ca.read_bytes(), "t" * 40, "silo")
    assert "AFL_TOKEN" not in os.environ, "nothing that this process starts inherits it"
    assert "t" * 40 not in repr((files, read))
    assert "PRIVATE" not in repr(read)
    monkeypatch.setenv("AFL_TOKEN", "t" * 40)
    by_file = options_of("--token-file", str(token)).credentials
    assert by_file.read().token == token.read_text(encoding="utf-8").strip()
    token.write_text("u" * 40, encoding="utf-8")
    assert by_file.read().token == "u" * 40, "it may be replaced"
    assert options_of().credentials.read() == Credentials()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--certificate FILE", "--certificate and --key belong together; give both"),
        ("--ca CA --key FILE", "--certificate and --key belong together; give both"),
        ("--certificate FILE --key FILE", "--certificate is for TLS"),
        ("--server-name silo", "--server-name is for TLS"),
        ("--ca CA --insecure", "--insecure is plaintext, --ca is TLS; leave one out"),
        ("--ca FILE", "holds no certificate in PEM"),
        ("--ca nowhere", "--ca nowhere cannot be read: No such file or directory"),
        ("--token-file FILE", "FILE holds no token: one has at least 32 characters"),
        ("--token-file nowhere", "--token-file nowhere cannot be read"),
        ("--server silo:1", "use TLS with --ca FILE"),
        ("--server silo:1 --insecure --token-file TOKEN", "anyone in between could read the token"),
    ],
)
def test_credentials_that_cannot_be_used(tmp_path: Path, arguments: str, said: str) -> None:
    ours = Identities(tmp_path)
    (tmp_path / "FILE").write_text("nothing")
    known = {"CA": str(ours.ca), "FILE": str(tmp_path / "FILE"), "TOKEN": str(ours.token("0"))}
    with pytest.raises(ConfigError) as caught:
        options_of(*(known.get(word, word) for word in arguments.split()))
    assert said in str(caught.value)


def test_a_token_in_the_environment_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFL_TOKEN", "short")
    with pytest.raises(ConfigError, match=r"^the environment's AFL_TOKEN holds no token"):
        options_of()


def test_secrets_that_others_can_read_and_a_certificate_that_has_expired_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Identities(tmp_path)
    pair, token = ours.worker("0", days=-3), ours.token("0")
    pair.key.chmod(0o644)
    token.chmod(0o604)
    options_of("--ca", str(ours.ca), *pair.worker_options, "--token-file", str(token))
    first, second, third = [record.getMessage() for record in caplog.records]
    assert "worker-0.key can be read by every user of this machine (mode 0644); chmod 600 it" in first
    assert "token-0 can be read by every user of this machine (mode 0604)" in second
    assert "worker-0.pem expired on 2" in third


def test_the_policy_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    assert options_of().policy.min_batch == DEFAULT_MIN_BATCH
    assert options_of("--min-batch", "3").policy.min_batch == 3
    path.write_text("max_rounds: 5\n", encoding="utf-8")
    read = options_of("--policy", str(path), "--min-batch", "3").policy
    assert (read.limits.max_rounds, read.min_batch) == (5, 3)
    path.write_text("min_batch: 5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--min-batch 3: the policy says it \(.*:1\); leave one out"):
        options_of("--policy", str(path), "--min-batch", "3")
    with pytest.raises(ConfigError, match="--min-batch 0: a whole number of examples, at least 1"):
        options_of("--min-batch", "0")
    path.write_text("servers: [127.0.0.1:2]\n", encoding="utf-8")
    with pytest.raises(PolicyError, match=r"site.yaml:1: servers\n    found:     127.0.0.1:1"):
        options_of("--policy", str(path))


def test_an_authority_that_is_exchanged_is_noticed_at_the_next_connection(tmp_path: Path) -> None:
    ours, theirs = Identities(tmp_path / "ours"), Identities(tmp_path / "theirs")
    (der,) = pem_certificates(ours.ca.read_bytes())
    path = tmp_path / "site.yaml"
    path.write_text(f"authorities: [{hashlib.sha256(der).hexdigest()}]\n", encoding="utf-8")
    departures = Departures(options_of("--policy", str(path), "--ca", str(ours.ca)))
    departures.check_server()
    ours.ca.write_bytes(theirs.ca.read_bytes())
    with pytest.raises(PolicyError, match=r"site.yaml:1: authorities"):
        departures.check_server()
