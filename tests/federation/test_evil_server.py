"""A server that does not follow the protocol: a worker refuses with its own error; nothing more leaves it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from afl.core.codecs.modular import signed
from afl.core.messages import EVALUATION_PHASE, Kind, Position
from afl.core.secrecy.keyring import Keyring
from afl.core.secrecy.keys import KeyOffer, OwnKey, statement
from afl.core.secrecy.masks import Masks
from afl.errors import ExitCode
from afl.security.certificates import read_pair
from afl.security.peers import PeerSigner
from afl.v1 import federation_pb2 as pb
from afl.wire.keys import key_offer_of
from support.evil_server import FIRST, RUN_ID, EvilServer, Peer, Session
from support.identities import Identities, Pair
from support.process import Process

CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 100}},
    "algorithm": {
        "name": "afl-com",
        "rounds": 60,
        "block": 7,
        "eta_w": 0.9,
        "eta_q": 0.3,
        "uplink": {"name": "rand-k", "ratio": 0.2, "bits": 16},
    },
    "privacy": {"secure_aggregation": True},
}
HIDDEN = {**CONFIG, "privacy": {"secure_aggregation": True, "losses": "hidden"}}


@dataclass
class Victim:
    """An honest worker, number 0 of three, whose peers' secrets the server knows; and how it is started."""

    folder: Path
    options: tuple[str, ...]
    peers: list[Peer]

    @property
    def journal(self) -> Path:
        return self.folder / "afl-journal" / RUN_ID / "worker-0.journal"

    @property
    def keys(self) -> Path:
        return self.journal.with_suffix(".keys")

    def start(self, server: EvilServer, *options: str) -> Process:
        own = ["--id", "0", "--server", server.address, "--min-batch", "1", *self.options, *options]
        process = Process("victim", ["-m", "afl_worker", *own], folder=self.folder)
        self.processes.append(process)
        return process

    def __post_init__(self) -> None:
        self.processes: list[Process] = []

    def offers(self, epoch: int = 1) -> list[KeyOffer]:
        return [peer.offer(epoch) for peer in self.peers]


def signer_of(pair: Pair) -> PeerSigner:
    names = ("--certificate", "--key")
    return PeerSigner.of_certificate(read_pair(pair.certificate, pair.key, names=names), "a test")


@dataclass(frozen=True)
class Pki:
    """An authority, the server's certificate, and each worker's."""

    ca: Path
    server: Pair
    workers: list[Pair]


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    identities = Identities(tmp_path_factory.mktemp("pki"))
    return Pki(identities.ca, identities.server(), [identities.worker(str(worker)) for worker in range(4)])


@pytest.fixture
def server(pki: Pki) -> Iterator[EvilServer]:
    with EvilServer(CONFIG, pki.server) as server:
        yield server


@pytest.fixture
def victim(tmp_path: Path, pki: Pki) -> Iterator[Victim]:
    known = ("--ca", str(pki.ca), "--peer-ca", str(pki.ca))
    one = Victim(
        tmp_path,
        (*pki.workers[0].worker_options, *known),
        [Peer(worker, signer_of(pki.workers[worker])) for worker in (1, 2)],
    )
    yield one
    for process in one.processes:
        process.close()


def refused(process: Process, session: Session, *saying: str) -> None:
    """The worker ends with its own error, and no report has left it."""
    process.expect(ExitCode.REFUSED)
    session.end()
    assert session.left() <= {"join", "ready", "failure", "goodbye"}
    for each in saying:
        assert each in process.text


# A roster.

Roster = Callable[[list[Peer]], list[KeyOffer]]


def swapped(peers: list[Peer]) -> list[KeyOffer]:
    """The server's own key in place of worker 1's, under what worker 1 has signed."""
    one, two = (peer.offer() for peer in peers)
    return [replace(one, public_keys=Peer(1).offer().public_keys), two]


def signed_by_the_server(peers: list[Peer]) -> list[KeyOffer]:
    return [Peer(1).offer(), peers[1].offer()]


def of_the_epoch_before(peers: list[Peer]) -> list[KeyOffer]:
    """Worker 1's key of epoch 7, said to be of this one."""
    return [replace(peers[0].offer(7), epoch=1), peers[1].offer()]


def of_another_run(peers: list[Peer]) -> list[KeyOffer]:
    return [peers[0].offer(run_id="another"), peers[1].offer()]


def without_a_neighbour(peers: list[Peer]) -> list[KeyOffer]:
    return [peers[0].offer()]


def signed_by_another(peers: list[Peer]) -> list[KeyOffer]:
    """Worker 2 speaks for worker 1 too, with its own certificate."""
    return [peers[1].offer(workers=(1, 2))]


def too_many(peers: list[Peer]) -> list[KeyOffer]:
    return [peers[0].offer()] * 15_000


def huge_certificates(peers: list[Peer]) -> list[KeyOffer]:
    return [replace(peers[0].offer(), certificates=(os.urandom(15 << 20),)), peers[1].offer()]


def garbage(peers: list[Peer]) -> list[KeyOffer]:
    one, two = (peer.offer() for peer in peers)
    return [replace(one, certificates=(os.urandom(500),), signature=os.urandom(64)), two]


def no_curve_point(peers: list[Peer]) -> list[KeyOffer]:
    """Worker 1, which is in league with the server, offers a key with which all secrets are zero."""

    class Zero(Peer):
        def offer(self, epoch: int = 1, run_id: str = RUN_ID, workers: Sequence[int] = ()) -> KeyOffer:
            signed = self.signer.sign(statement(run_id, epoch, {1: bytes(32)}))
            return KeyOffer(epoch, (1,), (bytes(32),), signed.signature, signed.certificates)

    return [Zero(1, peers[0].signer).offer(), peers[1].offer()]


@pytest.mark.parametrize(
    ("roster", "said"),
    [
        (swapped, "worker 1: the signature does not fit"),
        (signed_by_the_server, "worker 1: it shows no certificate"),
        (of_the_epoch_before, "worker 1: the signature does not fit"),
        (of_another_run, "worker 1: the signature does not fit"),
        (without_a_neighbour, "lacks worker 2"),
        (signed_by_another, "its certificate speaks for worker 2, not for worker 1"),
        (too_many, "more than the keys of 3 workers"),
        (garbage, "worker 1: its certificate is damaged"),
        (no_curve_point, "the public key of worker 1 is none"),
    ],
)
def test_a_roster_that_is_not_the_workers_own_ends_the_worker(
    roster: Roster, said: str, victim: Victim, server: EvilServer
) -> None:
    process = victim.start(server)
    session, ready = server.session()
    began = time.monotonic()
    server.send_roster(session, ready, *roster(victim.peers))
    server.send_model(session, FIRST)
    server.send_step(session, FIRST)
    refused(process, session, said)
    assert time.monotonic() - began < 30


def test_certificates_beyond_all_measure_end_the_session_and_nothing_leaves(
    victim: Victim, server: EvilServer
) -> None:
    victim.start(server)
    session, ready = server.session()
    server.send_roster(session, ready, *huge_certificates(victim.peers))
    server.send_model(session, FIRST)
    server.send_step(session, FIRST)
    session.end()
    assert session.left() == {"join", "ready"}
    server.session()


# What it says of itself.


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": 2}, "the run has 2 workers, and this worker takes part with 3 or more (--min-workers)"),
        ({"epoch": 2**63}, f"the server waits for keys of epoch {2**63}; the last is {2**32}"),
        ({"skips_non_finite": True}, "the server lets workers be missing"),
    ],
)
def test_a_run_that_cannot_be_meant_ends_the_worker(
    changes: dict[str, Any], said: str, victim: Victim, server: EvilServer
) -> None:
    process = victim.start(server)
    refused(process, server.accepted(**changes), said)


def test_too_few_of_many_are_refused_too(victim: Victim, server: EvilServer) -> None:
    process = victim.start(server, "--min-workers", "4")
    refused(process, server.accepted(), "3 workers, and this worker takes part with 4 or more")


def test_epoch_0_is_the_first(victim: Victim, server: EvilServer) -> None:
    victim.start(server)
    _, ready = server.session(epoch=0)
    assert ready.keys.epoch == 1


def test_before_the_roster_a_step_brings_nothing(victim: Victim, server: EvilServer) -> None:
    victim.start(server)
    session, _ = server.session()
    server.send_model(session, FIRST)
    server.send_step(session, FIRST)
    session.end()
    assert session.left() == {"join", "ready"}
    again, _ = server.session()
    assert "reports" not in again.left()


# One after another.


def taken(victim: Victim, server: EvilServer, position: Position = FIRST, **welcome: Any) -> Session:
    """A session in which the worker has all keys and the model of a position."""
    session, ready = server.session(open_=position, **welcome)
    server.send_roster(session, ready, *victim.offers(ready.keys.epoch))
    server.send_model(session, position)
    return session


def reported(victim: Victim, server: EvilServer, rounds: int = 1) -> tuple[Session, list[list[bytes]]]:
    session = taken(victim, server)
    sent = []
    for round_ in range(1, rounds + 1):
        server.send_step(session, Position(round_, 0))
        sent.append(session.report()[1])
        server.acknowledge(session, 0, Position(round_, 0))
    return session, sent


def reports_of(session: Session) -> int:
    return sum(len(frame.reports) for frame in session.frames)


TWICE = "the server asks worker 0 for another message for round"


def test_a_second_message_for_the_same_round_is_refused(victim: Victim, server: EvilServer) -> None:
    process = victim.start(server)
    session, _ = reported(victim, server, 3)
    server.send_model(session, Position(2, 0), 9.0)
    server.send_step(session, Position(2, 0))
    process.expect(ExitCode.REFUSED)
    session.end()
    assert f"{TWICE} 2" in process.text
    assert reports_of(session) == 3


def test_it_is_refused_by_the_next_process_too(victim: Victim, server: EvilServer) -> None:
    victim.start(server)
    session, sent = reported(victim, server, 3)
    victim.processes[-1].kill()
    process = victim.start(server)
    session = taken(victim, server, Position(3, 0))
    # What it has sent goes out as it was, to the bit.
    assert session.report()[1] == sent[-1]
    server.acknowledge(session, 0, Position(3, 0))
    server.send_model(session, Position(3, 0), 9.0)
    server.send_step(session, Position(3, 0))
    process.expect(ExitCode.REFUSED)
    session.end()
    assert f"{TWICE} 3" in process.text
    assert reports_of(session) == 1


def damaged_journal(victim: Victim) -> None:
    content = bytearray(victim.journal.read_bytes())
    content[:: len(content) // 64] = os.urandom(len(content[:: len(content) // 64]))
    victim.journal.write_bytes(content)


def deleted_journal(victim: Victim) -> None:
    victim.journal.unlink()


def damaged_keys(victim: Victim) -> None:
    victim.keys.write_text('{"epoch": 1e999}', encoding="utf-8")


def deleted_keys(victim: Victim) -> None:
    victim.keys.unlink()


def another_boot(victim: Victim) -> None:
    values = json.loads(victim.keys.read_text(encoding="utf-8"))
    victim.keys.write_text(json.dumps({**values, "boot": "before"}), encoding="utf-8")


@pytest.mark.parametrize("lose", [damaged_journal, deleted_journal, damaged_keys, deleted_keys, another_boot])
def test_who_does_not_know_what_it_has_sent_takes_another_key(
    lose: Callable[[Victim], None], victim: Victim, server: EvilServer
) -> None:
    victim.start(server)
    reported(victim, server, 3)
    before = json.loads(victim.keys.read_text(encoding="utf-8"))["private"]
    victim.processes[-1].kill()
    lose(victim)
    victim.start(server)
    _, ready = server.session(open_=Position(3, 0))
    now = json.loads(victim.keys.read_text(encoding="utf-8"))
    assert now["private"] != before
    # Where only the key is lost, the peers, who go by a roster with another, begin the next epoch.
    assert ready.keys.epoch == (1 if "keys" in lose.__name__ else 2)


@pytest.mark.parametrize(
    ("open_", "held"),
    [(Position(2, 0), False), (Position(9, 0), False), (Position(4, 0), True)],
    ids=["an older round", "a round that an older journal does not reach", "held, but not sent"],
)
def test_a_server_that_says_what_the_journal_does_not_begins_an_epoch(
    open_: Position, held: bool, victim: Victim, server: EvilServer
) -> None:
    victim.start(server)
    reported(victim, server, 3)
    victim.processes[-1].kill()
    victim.start(server)
    _, ready = server.session(open_=open_, held=held)
    assert ready.keys.epoch == 2


@pytest.mark.parametrize(
    ("before", "changes", "said"),
    [
        (CONFIG, {"secure_aggregation": False}, "the server asks for messages without masks"),
        (HIDDEN, {"hides_losses": False}, "the server asks for worker 0's losses"),
        (HIDDEN, {"secure_aggregation": False, "hides_losses": False}, "messages without masks"),
    ],
)
@pytest.mark.parametrize("is_same_process", [True, False])
def test_what_was_kept_from_it_is_not_told_later(
    before: dict[str, Any],
    changes: dict[str, Any],
    said: str,
    is_same_process: bool,
    victim: Victim,
    pki: Pki,
) -> None:
    with EvilServer(before, pki.server) as server:
        process = victim.start(server)
        session, _ = reported(victim, server)
        if is_same_process:
            session.close()
            said = f"{next(iter(changes))} is true here and false at the server"
        else:
            process.kill()
            process = victim.start(server)
        session = server.accepted(**changes)
        if is_same_process:
            process.expect(ExitCode.CONFIG)
            assert said in process.text
            session.end()
            assert session.left() == {"join", "failure"}
        else:
            refused(process, session, said)


@pytest.mark.parametrize("kind", [Kind.LOSS, Kind.BUFFERS])
@pytest.mark.parametrize("config", [CONFIG, HIDDEN], ids=["losses shown", "losses hidden"])
def test_what_no_masked_run_asks_for_is_not_answered(
    kind: Kind, config: dict[str, Any], victim: Victim, pki: Pki
) -> None:
    with EvilServer(config, pki.server) as server:
        process = victim.start(server)
        session = taken(victim, server)
        server.send_step(session, FIRST, kind)
        refused(process, session, f"asks worker 0 for {kind.name} without a mask")


def test_a_loss_too_large_to_hide_is_not_told_either(victim: Victim, pki: Pki) -> None:
    # So large a step size makes any loss too large.
    config = {**HIDDEN, "algorithm": {**CONFIG["algorithm"], "eta_q": 1e6}}
    with EvilServer(config, pki.server) as server:
        process = victim.start(server)
        session = taken(victim, server)
        server.send_step(session, FIRST)
        failure: pb.Failure = session.receive_part("failure")
        process.wait()
        assert "eta_q times the loss is" in process.text
        assert failure.message == (
            "a loss, a metric or a gradient is not finite or too large; the worker's own log has which"
        )
        assert not failure.traceback


def test_an_evaluation_tells_nothing_of_what_is_yet_to_be_sent(victim: Victim, server: EvilServer) -> None:
    victim.start(server)
    session, _ = reported(victim, server)
    server.send_step(session, Position(1, EVALUATION_PHASE), Kind.EVALUATE)
    report, payloads = session.report()
    assert report.metrics
    assert not payloads
    assert not report.residual_norm
    assert not report.tensor_residual_norms


# What it can compute from what it has got.

BITS = 16
MANY = {**CONFIG, "workers": 4, "task": {**CONFIG["task"], "options": {"dim": 20_000}}}
"""Each message has 4001 integers."""


def residues(payload: bytes) -> NDArray[np.int64]:
    """Little-endian integers of 16 bits."""
    return np.frombuffer(payload, "<u2").astype(np.int64)


def secrets_of(peer: Peer, offers: Sequence[KeyOffer], epoch: int = 1) -> Masks:
    """All of a colluder's masks, as its own code makes them."""
    store = KeyStoreOf({peer.worker: OwnKey(epoch, peer.private.private_bytes_raw())})
    ring = Keyring(
        RUN_ID,
        [peer.worker],
        len(offers),
        least=2,
        sign=lambda _: (b"", (), b""),
        verify=lambda _: None,
        random=os.urandom,
        store=store,
    )
    return ring.take(epoch, offers)


@dataclass
class KeyStoreOf:
    """Keys that are there already."""

    kept: dict[int, OwnKey]

    def read(self) -> dict[int, OwnKey]:
        return self.kept

    def write(self, keys: Mapping[int, OwnKey]) -> None:
        self.kept.update(keys)


def looks_random(words: NDArray[np.int64]) -> bool:
    """Bits, bytes and neighbours as of coins: each statistic within five standard deviations."""
    bits = (words[:, None] >> np.arange(BITS)) & 1
    deviations = [np.abs(bits.mean(axis=0) - 0.5).max() * 2 * np.sqrt(len(words))]
    for byte in (words & 0xFF, words >> 8):
        counts, expected = np.bincount(byte, minlength=256), len(words) / 256
        chi = ((counts - expected) ** 2 / expected).sum()
        deviations.append(abs(chi - 255) / np.sqrt(2 * 255))
    unit = words / 2.0**BITS - 0.5
    deviations.append(abs((unit[1:] * unit[:-1]).mean()) * 12 * np.sqrt(len(words)))
    return max(deviations) < 5


def same_distribution(one: NDArray[np.int64], other: NDArray[np.int64]) -> bool:
    """Two-sample Kolmogorov-Smirnov test at 1e-6."""
    points = np.sort(np.concatenate([one, other]))
    gap = np.abs(
        np.searchsorted(np.sort(one), points, "right") / len(one)
        - np.searchsorted(np.sort(other), points, "right") / len(other)
    ).max()
    return bool(gap < np.sqrt(np.log(2e6) / 2 * (1 / len(one) + 1 / len(other))))


@dataclass(frozen=True)
class Captured:
    """The message of round 1 as it has left the victim.

    Attributes:
        secrets: of each of its peers.
        shown: what masks are bound to, as all were told it.
    """

    sent: NDArray[np.int64]
    secrets: list[Masks]
    shown: bytes


def captured(victim: Victim, pki: Pki, peers: Sequence[Peer], factor: float) -> Captured:
    """At a model with these parameters."""
    with EvilServer(MANY, pki.server) as server:
        process = victim.start(server, "--journal", f"journal-{factor}")
        session, ready = server.session()
        offers = [peer.offer() for peer in peers]
        server.send_roster(session, ready, *offers)
        shown = server.history_of_first(server.send_model(session, FIRST, factor))
        server.send_step(session, FIRST)
        _, (payload,) = session.report()
        process.kill()
        roster = [key_offer_of(ready.keys), *offers]
        secrets = [secrets_of(peer, roster) for peer in peers]
        return Captured(residues(payload), secrets, shown)


def test_what_all_but_one_other_know_does_not_open_a_message_and_what_all_others_know_does(
    victim: Victim, pki: Pki
) -> None:
    peers = [Peer(worker, signer_of(pki.workers[worker])) for worker in (1, 2, 3)]
    opened = []
    for factor in (0.0, 50.0):
        one = captured(victim, pki, peers, factor)
        assert looks_random(one.sent)
        # Of the two who do not tell, nothing but their sum is known.
        assert looks_random(left_of(one, [1, 2]))
        # All others who were shown another model share other masks with the victim.
        assert looks_random(left_of(replace(one, shown=b"another model"), [1, 2, 3]))
        left = left_of(one, [1, 2, 3])
        opened.append(signed(left.astype(np.uint16), BITS))
    assert not any(looks_random(one % (1 << BITS)) for one in opened)
    # The integers of either data: small, and not alike.
    assert all(np.abs(one).max() < 1 << (BITS - 3) for one in opened)


def left_of(captured: Captured, colluders: Sequence[int]) -> NDArray[np.int64]:
    """The message without what these share with the victim."""
    left = captured.sent.copy()
    for worker in colluders:
        secrets = captured.secrets[worker - 1]._secrets[worker]  # noqa: SLF001  # what a colluder knows
        with_victim = Masks({worker: {0: secrets[0]}})
        left += with_victim.draw(FIRST, 0, len(left), BITS, [worker], shown=captured.shown).astype(np.int64)
    return left % (1 << BITS)


def test_what_is_sent_does_not_depend_on_the_data_as_far_as_can_be_seen(victim: Victim, pki: Pki) -> None:
    peers = [Peer(worker, signer_of(pki.workers[worker])) for worker in (1, 2, 3)]
    one, other = (captured(victim, pki, peers, factor).sent for factor in (0.0, 50.0))
    assert same_distribution(one, other)
    assert looks_random((one - other) % (1 << BITS))
