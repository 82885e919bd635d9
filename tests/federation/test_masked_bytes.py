"""What secure aggregation adds to the wire, by the server's counters and by what was captured on the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from afl.core.secrecy.keyring import Keyring
from afl.security.peers import PeerSigner
from afl.v1 import federation_pb2 as pb
from afl.wire.keys import key_offer_message
from afl_cli.main import main as afl
from afl_worker.keys import KeysInMemory
from support import Federation, Http2Observer
from support.identities import Identities
from support.proxy import Way

WORKERS, ROUNDS, DIM, BITS = 4, 15, 20_000, 16
K = DIM // 5


@dataclass
class Captured:
    """Of one run.

    Attributes:
        parts: how many of each kind of part of a frame went each way.
        wire: by direction, bytes of training from the server's counters.
        values: by direction, those of them that are integers.
        setup: by direction, bytes of offers of keys and of rosters; the second for each worker.
    """

    parts: dict[Way, Counter[str]]
    wire: dict[str, int]
    values: dict[str, int]
    setup: dict[Way, list[int]]


def run(folder: Path, options: list[list[str]], **privacy: Any) -> Captured:
    config = {
        "workers": WORKERS,
        "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": DIM}},
        "algorithm": {
            "name": "afl-com",
            "rounds": ROUNDS,
            "eta_w": 0.9,
            "eta_q": 0.3,
            "uplink": {"name": "rand-k", "ratio": 0.2, "bits": BITS},
        },
        "evaluation": {"every": 5},
        "privacy": privacy,
        "server": {"heartbeat": "1h", "peer_timeout": "24h"},
    }
    with Http2Observer(keeps=True) as observer, Federation(config, folder) as federation:
        for worker, own in enumerate(options):
            federation.start(str(worker), *own, server=observer.address)
        observer.aim(federation.port)
        federation.finish()
        counted = federation.summary()["communication"]
    directions = ("uplink", "downlink")
    up = [pb.WorkerFrame.FromString(message) for message in observer.messages[Way.UP]]
    down = [pb.ServerFrame.FromString(message) for message in observer.messages[Way.DOWN]]
    return Captured(
        {Way.UP: _parts(up), Way.DOWN: _parts(down)},
        {name: counted[name]["wire_bytes_by_kind"]["gradient"] for name in directions},
        {name: counted[name]["payload_bytes_by_part"]["values"] for name in directions},
        {
            Way.UP: [frame.ready.keys.ByteSize() for frame in up if frame.HasField("ready")],
            Way.DOWN: [frame.roster.ByteSize() for frame in down if frame.HasField("roster")],
        },
    )


def _parts(frames: list[Any]) -> Counter[str]:
    """One frame may hold several parts, as it was sent; so parts are counted."""
    found: Counter[str] = Counter()
    for frame in frames:
        for field, value in frame.ListFields():
            found[field.name] += len(value) if field.name in {"reports", "chunks", "acks"} else 1
    return found


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    return run(tmp_path_factory.mktemp("clear"), [[]] * WORKERS)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    folder = tmp_path_factory.mktemp("masked")
    afl(["certs", str(folder / "keys"), "--workers", str(WORKERS), "--signing-keys"])
    peers = ["--peer-keys", str(folder / "keys" / "peers.txt")]
    keys = [["--signing-key", str(folder / "keys" / f"signing-{worker}.key")] for worker in range(WORKERS)]
    return run(folder, [[*peers, *key] for key in keys], secure_aggregation=True)


def test_no_further_message_in_any_step(clear: Captured, masked: Captured) -> None:
    rosters = {"roster": WORKERS}
    assert clear.parts[Way.UP] == masked.parts[Way.UP]
    assert clear.parts[Way.DOWN] + Counter(rosters) == masked.parts[Way.DOWN]
    assert clear.parts[Way.UP]["reports"] == WORKERS * (ROUNDS + 3)


def test_masked_messages_take_no_more_bytes_than_others_of_a_fixed_width(
    clear: Captured, masked: Captured
) -> None:
    for direction, width in (("uplink", BITS), ("downlink", BITS + 2)):
        # Integers that are not coded by what they are, with the tensor's own, and a byte that says so.
        fixed = WORKERS * ROUNDS * (1 + (K + 1) * width // 8)
        envelopes = clear.wire[direction] - clear.values[direction]
        assert masked.wire[direction] <= 1.01 * (fixed + envelopes)
    assert masked.values["uplink"] == WORKERS * ROUNDS * (K + 1) * BITS // 8


def test_keys_are_exchanged_once_and_are_small(masked: Captured) -> None:
    offers, rosters = masked.setup[Way.UP], masked.setup[Way.DOWN]
    assert len(offers) == len(rosters) == WORKERS
    assert max(offers) <= 200
    # A worker gets one offer for each neighbour, and its own.
    assert max(rosters) <= 200 * WORKERS


def test_an_offer_signed_by_a_certificate_has_the_certificate_with_it(tmp_path: Path) -> None:
    issued = Identities(tmp_path).issue_for_worker("0")
    signer = PeerSigner.of_certificate(issued, "its certificate")

    def sign(statement: bytes) -> tuple[bytes, tuple[bytes, ...], bytes]:
        signed = signer.sign(statement)
        return signed.signature, signed.certificates, signed.public_key

    keyring = Keyring(
        "run",
        [0],
        WORKERS,
        least=3,
        sign=sign,
        verify=lambda _: None,
        random=bytes,
        store=KeysInMemory(),
    )
    offer = keyring.offer(1)
    (certificate,) = offer.certificates
    assert key_offer_message(offer).ByteSize() - len(certificate) <= 130
    assert len(certificate) <= 380
