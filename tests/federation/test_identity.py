"""TLS, certificates and tokens between real processes: who gets in, and what everyone else is told."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from afl.errors import ExitCode
from afl.security.certificates import KeyPair
from support import Federation, Process, Proxy, run_together
from support.commands import FROM_NOTHING
from support.identities import BelowRoot, Identities, Pair, tls
from support.proxy import Way

CONFIG: dict[str, Any] = {
    "workers": 4,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": 60,
        "eta_w": 0.9,
        "eta_q": 0.3,
        "uplink": {"name": "top-k", "ratio": 0.1},
    },
    "evaluation": {"every": 20},
}


def config_of(**server: Any) -> dict[str, Any]:
    return {**CONFIG, "server": server}


@dataclass(frozen=True)
class Place:
    """Servers of every kind, and all that their workers may show."""

    servers: Mapping[str, Federation]
    ours: Identities
    others: Identities
    below: BelowRoot

    def path(self, name: str) -> str:
        return str(self.ours.folder / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Servers that wait for their workers, which never all come."""
    folder = tmp_path_factory.mktemp("identity")
    ours, others = Identities(folder / "ours"), Identities(folder / "others", "other-ca")
    good = ours.server()
    for ids in ("0", "0-1", "3"):
        ours.worker(ids)
        ours.token(ids)
    ours.worker("3", "expired", days=-30)
    ours.early("3")
    ours.worker("x", "nameless")
    mail = x509.RFC822Name._init_without_validation("afl:worker:3")  # noqa: SLF001  # as others sign it
    ours.called("misnamed", x509.DNSName("afl:worker:0-3"), mail)
    ours.called("named-twice", x509.DNSName("afl:worker:0-3"), x509.UniformResourceIdentifier("afl:worker:1"))
    ours.token("3", is_known=False)
    others.worker("3")
    below = BelowRoot(folder / "below")
    leaf = below.server()
    below.whole(below.worker("3"))
    kinds: dict[str, dict[str, Any]] = {
        "plaintext": {},
        "plaintext and tokens": {"tokens": str(ours.tokens)},
        "expired": {"tls": tls(ours.server("server-expired", days=-30))},
        "elsewhere": {"tls": tls(ours.server("server-elsewhere", hosts=["silo.example.org"]))},
        "mutual": {"tls": tls(good, ours.ca)},
        "tokens": {"tls": tls(good), "tokens": str(ours.tokens)},
        "both": {"tls": tls(good, ours.ca), "tokens": str(ours.tokens)},
        "leaf": {"tls": tls(leaf, below.ca)},
        "whole": {"tls": tls(below.whole(leaf), below.ca)},
    }
    with contextlib.ExitStack() as stack:
        servers = {
            kind: stack.enter_context(Federation(config_of(**server), folder / kind))
            for kind, server in kinds.items()
        }
        yield Place(servers, ours, others, below)


@dataclass(frozen=True)
class Case:
    """A worker and what it is told.

    Attributes:
        options: of its command line; CA, OTHER and their like and the names of files stand for their paths.
    """

    server: str
    options: str
    said: str
    ids: str = "3"

    def start(self, place: Place) -> Process:
        words = []
        for word in self.options.split():
            known = {"CA": place.ours.ca, "OTHER-CA": place.others.ca}
            known["OTHER"] = place.others.folder / "worker-3"
            known |= {"ROOT": place.below.ca, "BELOW": place.below.folder / "worker-3"}
            known["WHOLE"] = place.below.folder / "worker-3-whole"
            name, dot, suffix = word.partition(".")
            path = known.get(name, place.ours.folder / name)
            words.append(
                word if word.startswith("--") or word.endswith("example.org") else f"{path}{dot}{suffix}"
            )
        return place.servers[self.server].start(self.ids, *words)


OWN = "--certificate worker-3.pem --key worker-3.key"

UNREACHED = {
    "the server's certificate has expired": Case(
        "expired", "--ca CA", "the certificate of {address} has expired, by this machine's clock"
    ),
    "the server's certificate is for another host": Case(
        "elsewhere", "--ca CA", "the certificate of {address} does not name 127.0.0.1"
    ),
    "the server's certificate is by another authority": Case(
        "mutual", f"--ca OTHER-CA {OWN}", "is not signed by an authority in --ca {other_ca}"
    ),
    "no certificate where one is asked for": Case(
        "mutual",
        "--ca CA",
        "{address} requires a certificate from this worker: give one with --certificate FILE",
    ),
    "a certificate that has expired": Case(
        "mutual", "--ca CA --certificate expired.pem --key expired.key", "expired.pem expired on 2"
    ),
    "a certificate that is not valid yet": Case(
        "mutual",
        "--ca CA --certificate early-3.pem --key early-3.key",
        "early-3.pem is not valid before 2",
    ),
    "a certificate by another authority": Case(
        "mutual",
        "--ca CA --certificate OTHER.pem --key OTHER.key",
        "worker-3.pem is not signed by an authority that",
    ),
    "a certificate that is not for clients": Case(
        "mutual", "--ca CA --certificate server.pem --key server.key", "or is not for clients"
    ),
    "the server's intermediate authority is not sent": Case(
        "leaf",
        "--ca ROOT --certificate WHOLE.pem --key WHOLE.key",
        "it leads to 'Acme Issuing 7'. If that is an intermediate authority, append its certificate to the"
        " server's (server.tls.certificate)",
    ),
    "the server's root is another": Case(
        "whole", "--ca CA --certificate WHOLE.pem --key WHOLE.key", "it leads to 'Acme Root'."
    ),
    "the worker's intermediate authority is not sent": Case(
        "whole",
        "--ca ROOT --certificate BELOW.pem --key BELOW.key",
        "It leads to 'Acme Issuing 7': if that is an intermediate authority, append its certificate to that",
    ),
    "plaintext against TLS": Case("tokens", "", "{address} speaks TLS, this worker plaintext; give"),
    "plaintext against mutual TLS": Case("mutual", "", "{address} speaks TLS, this worker plaintext; give"),
    "TLS against plaintext": Case("plaintext", "--ca CA", "{address} does not speak TLS; set its server.tls"),
}

REFUSED = {
    "a certificate for another worker": Case(
        "mutual", f"--ca CA {OWN}", "certificate speaks for worker 3, not for worker 2: start it", ids="2"
    ),
    "a certificate for some of the workers": Case(
        "mutual",
        "--ca CA --certificate worker-0-1.pem --key worker-0-1.key",
        "certificate speaks for workers 0-1, not for worker 2: start it with an --id among those",
        ids="0-3",
    ),
    "a certificate that names no worker": Case(
        "mutual",
        "--ca CA --certificate nameless.pem --key nameless.key",
        "certificate names no worker: it needs",
    ),
    "a certificate whose DNS name and e-mail address name the worker": Case(
        "mutual",
        "--ca CA --certificate misnamed.pem --key misnamed.key",
        "certificate names no worker: it needs",
    ),
    "a certificate whose DNS name names more workers than its URI": Case(
        "mutual",
        "--ca CA --certificate named-twice.pem --key named-twice.key",
        "certificate speaks for worker 1, not for worker 3",
    ),
    "no token where one is asked for": Case(
        "tokens", "--ca CA", "this server requires a token: start the worker"
    ),
    "no token in plaintext": Case(
        "plaintext and tokens", "", "this server requires a token: start the worker"
    ),
    "a token that nobody knows": Case(
        "tokens", "--ca CA --token-file token-3-unknown", "token is not one that the server knows"
    ),
    "a token for another worker": Case(
        "tokens", "--ca CA --token-file token-0-1", "token speaks for workers 0-1, not for worker 3"
    ),
    "a token for another worker in plaintext": Case(
        "plaintext and tokens", "--token-file token-0-1", "token speaks for workers 0-1, not for worker 3"
    ),
    "a token that the certificate does not bear out": Case(
        "both",
        "--ca CA --certificate worker-0.pem --key worker-0.key --token-file token-3",
        "certificate speaks for worker 0, not for worker 3",
    ),
    "a certificate that the token does not bear out": Case(
        "both", f"--ca CA {OWN} --token-file token-0", "token speaks for worker 0, not for worker 3"
    ),
    "a certificate without the token": Case("both", f"--ca CA {OWN}", "this server requires a token"),
}

WELCOME = {
    "plaintext": Case("plaintext", "", "3"),
    "a token in plaintext on this machine": Case("plaintext and tokens", "--token-file token-3", "3"),
    "a certificate": Case("mutual", f"--ca CA {OWN}", "3"),
    "a token": Case("tokens", "--ca CA --token-file token-3", "3"),
    "both": Case("both", f"--ca CA {OWN} --token-file token-3", "3"),
    "an intermediate authority": Case("whole", "--ca ROOT --certificate WHOLE.pem --key WHOLE.key", "3"),
    "another name": Case("elsewhere", "--ca CA --server-name silo.example.org", "3"),
}


@pytest.mark.parametrize("name", UNREACHED)
def test_a_worker_without_a_connection_says_why_and_tries_again(place: Place, name: str) -> None:
    case = UNREACHED[name]
    said = case.said.format(address=place.servers[case.server].address, other_ca=place.others.ca)
    worker = case.start(place)
    line = worker.wait_for("reconnecting")
    assert said in line["message"]
    assert worker.is_running
    worker.close()


@pytest.mark.parametrize("name", REFUSED)
def test_a_worker_that_may_not_speak_is_refused_and_told_why(place: Place, name: str) -> None:
    case = REFUSED[name]
    worker = case.start(place)
    worker.expect(ExitCode.REFUSED)
    assert case.said in worker.logged("ended")[0]["message"]
    assert place.servers[case.server].server.wait_for("refused", saying=case.said)


@pytest.mark.parametrize("name", WELCOME)
def test_a_worker_that_shows_what_is_asked_for_is_welcome(place: Place, name: str) -> None:
    case = WELCOME[name]
    worker = case.start(place)
    line = worker.wait_for("joined")
    assert f"as worker {case.said} of 4" in line["message"]
    worker.kill()


class Between(Proxy):
    """Someone on the way, who keeps what passes and changes one byte after so many."""

    def __init__(self, target: int, at: int) -> None:
        self.seen = bytearray()
        self.at = at
        super().__init__(target)

    def altered(self, way: Way, data: bytes) -> bytes:
        self.seen += data
        if way is Way.DOWN and self.at and len(self.seen) > self.at:
            self.at = 0
            return data[:-1] + bytes([data[-1] ^ 1])
        return data


def test_who_is_in_between_can_neither_read_nor_change_what_is_sent(tmp_path: Path) -> None:
    ours, models = Identities(tmp_path / "pki"), []
    for name, server, options, at in (
        ("in the clear", {}, (), 0),
        ("under TLS", {"tls": tls(ours.server())}, ("--ca", str(ours.ca)), 20_000),
    ):
        with (
            Federation(config_of(**server), tmp_path / name) as federation,
            Between(federation.port, at) as between,
        ):
            worker = federation.start("0-3", *options, server=between.address)
            federation.finish()
            assert between.at == 0, "too little has passed"
        assert (b"synthetic" in between.seen) is (at == 0), "the name of the task, which is in the welcome"
        assert len(worker.logged("joined_again")) == (1 if at else 0), "the change ends the connection"
        models.append(federation.model_bytes())
    assert models[0] == models[1]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2])
def test_versions_before_tls_1_2_are_refused(place: Place, version: ssl.TLSVersion) -> None:
    client = ssl.create_default_context(cafile=place.ours.ca)
    # Of this system's OpenSSL too, to which they are not secure enough.
    client.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        client.minimum_version = client.maximum_version = version
    client.set_alpn_protocols(["h2"])
    address = ("127.0.0.1", place.servers["tokens"].port)
    refused = contextlib.nullcontext()
    if version is not ssl.TLSVersion.TLSv1_2:
        refused = pytest.raises(ssl.SSLError, match="EOF")  # gRPC sends no alert
    with (
        socket.create_connection(address, timeout=60) as link,
        refused,
        client.wrap_socket(link, server_hostname="localhost") as session,
    ):
        assert session.version() == "TLSv1.2"


def test_what_a_run_writes_is_its_owners_alone_and_what_is_there_keeps_its_modes(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        (tmp_path / "shared").mkdir(mode=0o755)
        with Federation(CONFIG, tmp_path / "shared" / "run") as federation:
            worker = federation.start("0-3")
            federation.wait_until(lambda status: status["round"] >= 3)
            journals = list(tmp_path.rglob("*.journal"))
            modes = {path: path.stat().st_mode & 0o777 for path in [*journals, journals[0].parent]}
            worker.wait()
            federation.finish()
    finally:
        os.umask(before)
    assert len(modes) == 5
    written = [federation.directory, *federation.directory.rglob("*")]
    assert {"config.yaml", "state", "metrics.jsonl", "model-final.safetensors"} <= {p.name for p in written}
    for path in written:
        modes[path] = path.stat().st_mode & 0o777
    right = {path: 0o700 if path.is_dir() else 0o600 for path in modes if path.exists()}
    assert {path: modes[path] for path in right} == right
    assert all(modes[path] == 0o600 for path in journals)
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755


def test_a_worker_that_is_not_believed_gives_up_in_time(place: Place) -> None:
    worker = place.servers["mutual"].start("3", "--ca", str(place.ours.ca), "--give-up-after", "2s")
    worker.expect(ExitCode.LOST_SERVER)
    assert "the last try: " in worker.logged("ended")[0]["message"]


def test_a_token_counts_as_soon_as_its_hash_is_there_and_until_it_is_not(
    place: Place, tmp_path: Path
) -> None:
    later = Identities(tmp_path / "later")
    known, unknown = later.token("0"), later.token("3", is_known=False)
    server = {"tokens": str(later.tokens), "heartbeat": "100ms"}
    with Federation(config_of(**server), tmp_path / "run") as federation:
        refused = federation.start("3", "--token-file", str(unknown))
        refused.expect(ExitCode.REFUSED)
        later.know("3", unknown.read_text(encoding="utf-8").strip())
        worker = federation.start("3", "--token-file", str(unknown))
        worker.wait_for("joined")
        federation.server.wait_for("reloaded")
        other = federation.start("0", "--token-file", str(known))
        federation.wait_until(lambda status: status["workers_missing"] == [1, 2])
        later.tokens.write_text(later.tokens.read_text(encoding="utf-8").splitlines()[0], encoding="utf-8")
        worker.expect(ExitCode.REFUSED)
        assert "token is not one that the server knows" in worker.text
        federation.wait_until(lambda status: status["workers_missing"] == [1, 2, 3])
        assert other.is_running


def test_certificates_are_replaced_while_a_run_goes_on_and_its_result_is_the_same(tmp_path: Path) -> None:
    """All are replaced, the authority's too; connections are cut, and what was shown before is refused."""
    plain = run_together(CONFIG, tmp_path / "plain", ["0-1", "2-3"])
    before, after = Identities(tmp_path / "pki"), Identities(tmp_path / "new")
    server, old_ca = before.server(days=20), tmp_path / "old-ca.pem"
    old_ca.write_bytes(before.ca.read_bytes())
    workers = {ids: before.worker(ids) for ids in ("0-1", "2-3")}
    old = before.worker("2-3", "old")
    ca = ("--ca", str(before.ca))
    with (
        Proxy() as link,
        Federation(config_of(tls=tls(server, before.ca)), tmp_path / "run") as federation,
    ):
        link.aim(federation.port)
        link.delay = 0.05
        processes = [
            federation.start(ids, *ca, *pair.worker_options, server=link.address)
            for ids, pair in workers.items()
        ]
        federation.wait_until(lambda status: status["round"] >= 3)
        expiry = federation.metrics()["afl_certificate_expiry_seconds"]

        renewed: dict[Pair, KeyPair] = {server: after.issue_for_server(days=40)}
        renewed |= {pair: after.issue_for_worker(ids) for ids, pair in workers.items()}
        for pair, issued in renewed.items():
            pair.write(issued)
        before.ca.write_bytes(after.ca.read_bytes())
        link.cut()
        for process in processes:
            process.wait_for("joined_again")
        federation.server.wait_for("reloaded")
        assert federation.metrics()["afl_certificate_expiry_seconds"] == pytest.approx(
            expiry + 20 * 24 * 3600, abs=60
        )
        stale = federation.start("2-3", *ca, *old.worker_options)
        assert "refuses this worker's certificate" in stale.wait_for("reconnecting")["message"]
        stale.close()
        distrustful = federation.start("2-3", "--ca", str(old_ca), *workers["2-3"].worker_options)
        assert "is not signed by an authority in --ca" in distrustful.wait_for("reconnecting")["message"]
        distrustful.close()
        link.delay = 0.0
        federation.workers[:] = processes
        federation.finish()
    for name in ("final", "best", "random"):
        assert federation.model_bytes(name) == plain.model_bytes(name)


def test_no_secret_is_in_logs_arguments_metrics_or_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor have the server and its first worker the library that makes certificates."""
    (tmp_path / "cryptography.py").write_text("raise ImportError\n", encoding="utf-8")
    ours = Identities(tmp_path / "pki")
    server = ours.server()
    pairs = {ids: ours.worker(ids) for ids in ("0-1", "2-3")}
    files = {ids: ours.token(ids) for ids in pairs}
    wrong = ours.token("0", is_known=False)
    tokens = {ids: path.read_text(encoding="utf-8").strip() for ids, path in files.items()}
    keys = [pair.key.read_text(encoding="utf-8").splitlines()[1] for pair in (server, *pairs.values())]
    secrets = [*tokens.values(), wrong.read_text(encoding="utf-8").strip(), *keys]
    config = config_of(tls=tls(server, ours.ca), tokens=str(ours.tokens))
    ca = ("--ca", str(ours.ca), "--log-level", "debug")
    # A forked process has another's arguments and modules.
    monkeypatch.setenv(FROM_NOTHING, "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Federation(config, tmp_path / "run") as federation:
        monkeypatch.delenv(FROM_NOTHING)
        refused = federation.start("0-1", *ca, *pairs["0-1"].worker_options, "--token-file", str(wrong))
        refused.expect(ExitCode.REFUSED)
        monkeypatch.setenv(FROM_NOTHING, "1")
        by_file = federation.start(
            "0-1", *ca, *pairs["0-1"].worker_options, "--token-file", str(files["0-1"])
        )
        monkeypatch.delenv(FROM_NOTHING)
        by_file.wait_for("joined")
        seen = [federation.get("/metrics"), federation.get("/status")]
        arguments = [
            Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8")
            for process in (by_file, federation.server)
        ]
        assert "--token-file" in arguments[0]
        seen += arguments
        federation.start("2-3", *ca, *pairs["2-3"].worker_options, environment={"AFL_TOKEN": tokens["2-3"]})
        federation.workers.remove(refused)
        federation.finish()
        seen += [process.text for process in (federation.server, refused, *federation.workers)]
        refused.close()
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) > 5
    for secret in secrets:
        assert not any(secret in text for text in seen)
        assert not any(secret.encode() in path.read_bytes() for path in written)


def test_a_server_on_other_addresses_needs_tls_or_its_written_word(tmp_path: Path) -> None:
    """192.0.2.1 is an address of no machine: one that may listen there finds that out."""
    ours = Identities(tmp_path / "pki")
    ours.token("0")
    listen = {"listen": "192.0.2.1:50051"}
    expected: dict[str, tuple[dict[str, Any], ExitCode, str]] = {
        "nothing": ({}, ExitCode.CONFIG, "set server.tls, or use a loopback address"),
        "insecure": ({"insecure": True}, ExitCode.PORT, "not an address of this machine"),
        "tls": ({"tls": tls(ours.server())}, ExitCode.PORT, "not an address of this machine"),
        "tokens": (
            {"insecure": True, "tokens": str(ours.tokens)},
            ExitCode.CONFIG,
            "without TLS, tokens could be read by anyone in between",
        ),
        "no file": (
            {"tls": {"certificate": "nowhere.pem", "key": "nowhere.key"}},
            ExitCode.CONFIG,
            "server.tls.certificate nowhere.pem cannot be read: No such file or directory",
        ),
    }
    for name, (server, status, said) in expected.items():
        with Federation(config_of(**listen, **server), tmp_path / name) as federation:
            federation.server.expect(status)
            assert said in federation.server.text
            assert not federation.directory.exists()


def test_a_server_says_how_peers_are_known_and_that_its_certificate_has_expired(place: Place) -> None:
    for kind, said in (
        ("plaintext", "(plaintext)"),
        ("elsewhere", "(TLS)"),
        ("both", "(TLS with client certificates and tokens)"),
    ):
        assert said in place.servers[kind].server.wait_for("listening")["message"]
    expired = place.servers["expired"].server.wait_for("certificate_expires")
    assert "put a new one in its place" in expired["message"]


def test_a_peer_that_does_not_begin_is_not_waited_for(tmp_path: Path) -> None:
    ours = Identities(tmp_path / "pki")
    server = {"tls": tls(ours.server()), "handshake_timeout": "500ms"}
    with (
        Federation(config_of(**server), tmp_path / "run") as federation,
        socket.create_connection(("127.0.0.1", federation.port), timeout=60) as mute,
    ):
        assert mute.recv(1) == b"", "the server hangs up"
