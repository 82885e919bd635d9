"""`afl-worker`: the signals that end it, and what its command line says of certificates and tokens."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import signal
import sys
from pathlib import Path

import pytest

from afl.errors import AflError, ConfigError, PeerError, PolicyError, SignalError, StorageError
from afl.paths import begin_here
from afl.security.certificates import pem_certificates
from afl.security.keys import fingerprint_of_pem, new_signing_key
from afl.site.policy import DEFAULT_MIN_BATCH
from afl.tasks.registry import check_task
from afl_worker.departures import Departures
from afl_worker.journal import check_folder
from afl_worker.main import make_worker_parser, worker_options
from afl_worker.network.credentials import Credentials
from afl_worker.options import WorkerOptions
from afl_worker.process import interrupt, take_part
from support.identities import Identities, certified, new_key


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


@pytest.mark.parametrize(
    ("option", "value", "kind", "said"),
    [
        ("--journal", "a-file", StorageError, "a-file cannot be used (Not a directory): the journal must"),
        ("--journal", "a-file/below/it", StorageError, "it cannot be used (Not a directory): the journal"),
        ("--journal", "x" * 300, StorageError, "x cannot be used (File name too long): the journal must be"),
        ("--journal", "closed/new", StorageError, "closed/new cannot be used (Permission denied): the"),
        ("--task", "digitts", ConfigError, "task digitts: no such task; did you mean digits?"),
        ("--task", "no_such.module:Mine", ConfigError, "task no_such.module:Mine: cannot import no_such"),
        ("--task", "no_such.py:Mine", ConfigError, "task no_such.py:Mine: cannot import no_such: No module"),
        ("--task", "afl.no_such:Mine", ConfigError, "task afl.no_such:Mine: cannot import afl.no_such: No"),
    ],
)
def test_what_is_not_there_is_told_before_a_worker_connects(
    option: str, value: str, kind: type[AflError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("a-file").touch()
    Path("closed").mkdir()
    may = os.access  # a superuser may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed" and may(path, mode))
    begin_here()
    try:
        with pytest.raises(kind) as caught:
            take_part(options_of(option, value), None, stays=False)
    finally:
        monkeypatch.undo()
        begin_here()
    assert said in str(caught.value)


def test_what_may_be_wrong_with_a_task_or_a_journal_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the run's own settings, and to the server too."""
    check_folder(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()
    check_task("digits")
    check_task("afl.tasks.digits:NoSuchClass")
    (tmp_path / "leaving").mkdir()
    (tmp_path / "leaving" / "__init__.py").write_text("raise SystemExit(0)\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    check_task("leaving.task:Own")


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
    caplog.clear()
    options_of("--ca", str(ours.ca), *ours.early("0").worker_options)
    assert "early-0.pem is not valid before 2" in caplog.text


@pytest.fixture
def peers(tmp_path: Path) -> dict[str, str]:
    """Files by the names that command lines below give them."""
    ours = Identities(tmp_path)
    pair = ours.worker("0")
    key, listed = tmp_path / "signing.key", tmp_path / "peers.txt"
    key.touch(mode=0o600)
    key.write_bytes(new_signing_key())
    listed.write_text(f"0 {fingerprint_of_pem(key.read_bytes(), 'key')}\n")
    (tmp_path / "odd.key").write_bytes(certified("odd", key=new_key("p521")).pem.key)
    (tmp_path / "nothing").write_text("nothing")
    return {
        "CA": str(ours.ca),
        "CERTIFICATE": str(pair.certificate),
        "KEY": str(pair.key),
        "SIGNING": str(key),
        "LIST": str(listed),
        "ODD": str(tmp_path / "odd.key"),
        "NOTHING": str(tmp_path / "nothing"),
    }


BY_CERTIFICATE = "--ca CA --certificate CERTIFICATE --key KEY"


@pytest.mark.parametrize(
    "arguments",
    [
        f"{BY_CERTIFICATE} --peer-ca CA",
        "--signing-key SIGNING --peer-keys LIST",
        f"{BY_CERTIFICATE} --signing-key SIGNING --peer-keys LIST",
        f"{BY_CERTIFICATE} --trust-server-keys",
        "--signing-key SIGNING --trust-server-keys",
        "--trust-server-keys",
    ],
)
def test_a_worker_believes_another_of_the_same_command_line(peers: dict[str, str], arguments: str) -> None:
    files = options_of(*(peers.get(word, word) for word in arguments.split())).peers
    signer, trust = files.read()
    signed = signer.sign(b"statement")
    assert bool(signed.certificates) == ("CERTIFICATE" in arguments and "SIGNING" not in arguments)
    trust.verify([0], b"statement", signed, dt.datetime.now(dt.UTC))
    if not files.trusts_server:
        with pytest.raises(PeerError, match="not for worker 1"):
            trust.verify([1], b"statement", signed, dt.datetime.now(dt.UTC))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--peer-ca CA", "this worker has nothing to show its peers who it is: give --certificate and --key"),
        ("--peer-keys LIST", "this worker has nothing to show its peers who it is"),
        (f"{BY_CERTIFICATE} --peer-ca NOTHING", "--peer-ca NOTHING holds no certificate in PEM"),
        (f"{BY_CERTIFICATE} --peer-ca nowhere", "--peer-ca nowhere cannot be read: No such file"),
        (f"{BY_CERTIFICATE} --peer-ca CERTIFICATE", "CN=afl worker 0 is no authority"),
        (f"{BY_CERTIFICATE} --peer-keys nowhere", "--peer-keys nowhere cannot be read: No such file"),
        (f"{BY_CERTIFICATE} --peer-keys NOTHING", "--peer-keys NOTHING:1: a line is IDS sha256:HASH"),
        ("--signing-key SIGNING", "--signing-key shows the other workers who this one is; say how"),
        ("--signing-key nowhere --peer-keys LIST", "--signing-key nowhere cannot be read: No such file"),
        ("--signing-key NOTHING --peer-keys LIST", "--signing-key NOTHING holds no private key in PEM"),
        ("--signing-key ODD --peer-keys LIST", "--signing-key ODD cannot sign for a worker: the key is none"),
        ("--min-workers 1", "--min-workers 1: the sum of one worker is its message; name at least 2"),
    ],
)
def test_what_cannot_be_used_for_peers(peers: dict[str, str], arguments: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(*(peers.get(word, word) for word in arguments.split()))
    for name, path in peers.items():
        said = said.replace(f" {name}", f" {path}")
    assert said in str(caught.value)


def test_ways_to_know_peers_exclude_each_other(
    peers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options_of("--peer-ca", peers["CA"], "--peer-keys", peers["LIST"])
    assert "--peer-keys: not allowed with argument --peer-ca" in capsys.readouterr().err


def test_peers_need_not_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without secure aggregation nobody needs the library; with it a worker says what is missing."""
    monkeypatch.setitem(sys.modules, "afl.security.peers", None)
    options = options_of()
    assert (options.min_workers, options_of("--min-workers", "2").min_workers) == (3, 2)
    with pytest.raises(
        ConfigError, match=r"needs the library cryptography, 45 or newer: pip install 'afl\[pri"
    ):
        options_of("--trust-server-keys")
    monkeypatch.undo()
    with pytest.raises(
        ConfigError, match=r"^with secure aggregation a worker must know its peers itself: name"
    ):
        options.peers.read()


def test_what_is_not_checked_and_what_others_can_read_is_logged(
    peers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    Path(peers["SIGNING"]).chmod(0o644)
    options_of("--trust-server-keys", "--signing-key", peers["SIGNING"])
    readable, unchecked = caplog.records
    assert "--signing-key" in readable.getMessage()
    assert "can be read by every user of this machine (mode 0644)" in readable.getMessage()
    assert unchecked.getMessage().startswith(
        "--trust-server-keys: whose keys its peers have, only the server"
    )
    assert unchecked.__dict__["event"] == "peers_unchecked"
    caplog.clear()
    Path(peers["SIGNING"]).chmod(0o600)
    options_of("--peer-keys", peers["LIST"], "--signing-key", peers["SIGNING"])
    assert caplog.records == []


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
