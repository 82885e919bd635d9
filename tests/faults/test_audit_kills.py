"""The audit log of workers that are killed is what left them: nothing missing, and nothing counted twice."""

from __future__ import annotations

import hashlib
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from afl.daemon.fault_points import VARIABLE
from afl.site.audit import read_log
from afl.wire.frames import parse_worker_frame
from support import Federation, Http2Observer
from support.http2 import SESSION
from support.longer import but_long
from support.proxy import Way

ROUNDS = 12

POINTS = (
    "worker.before-journal:3:kill",
    "worker.after-journal:2:kill",
    "worker.after-journal:5:kill",
    "worker.mid-chunk:4:kill",
    "worker.mid-chunk:6:kill",
)

PREFIX_BYTES = 5
"""Of a gRPC message: whether it is compressed, and its length."""


class Wiretap(Http2Observer):
    """Puts the reports together that pass to the server: their digests, by first worker, round and phase."""

    def __init__(self) -> None:
        self.reports: dict[tuple[int, int, int], list[int]] = {}
        self.digests: Counter[tuple[int, int, int, str]] = Counter()
        self._streams: defaultdict[tuple[int, int], bytearray] = defaultdict(bytearray)
        self._payloads: defaultdict[tuple[int, int, int], dict[int, bytearray]] = defaultdict(dict)
        self._open: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        super().__init__()

    def _frame(self, connection: Any, way: Way, kind: int, flags: int, stream: int, payload: bytes) -> None:
        super()._frame(connection, way, kind, flags, stream, payload)
        if kind != 0 or way is not Way.UP or connection.paths.get(stream) != SESSION:
            return
        buffer = self._streams[id(connection), stream]
        buffer += payload
        while len(buffer) >= PREFIX_BYTES:
            end = PREFIX_BYTES + int.from_bytes(buffer[1:PREFIX_BYTES], "big")
            if len(buffer) < end:
                return
            self._message((id(connection), stream), bytes(buffer[PREFIX_BYTES:end]))
            del buffer[:end]

    def _message(self, session: tuple[int, int], data: bytes) -> None:
        frame = parse_worker_frame(data)
        for report in frame.reports:
            key = report.worker, report.position.round, report.position.phase
            self._open[(*session, report.worker)] = key
            self.reports[key] = [payload.index_bytes + payload.value_bytes for payload in report.payloads]
        for chunk in frame.chunks:
            key = self._open[(*session, chunk.worker)]
            payload = self._payloads[key].setdefault(chunk.payload, bytearray())
            # What was cut goes on where the server has it.
            assert chunk.offset <= len(payload)
            payload[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
            if [len(self._payloads[key].get(i, b"")) for i in range(len(self.reports[key]))] == self.reports[
                key
            ]:
                whole = b"".join(bytes(self._payloads[key][i]) for i in range(len(self.reports[key])))
                self.digests[(*key, hashlib.sha256(whole).hexdigest())] += 1


@pytest.mark.parametrize("bits", but_long([None, 8], None), ids=["single", "joint"])
def test_the_log_is_what_was_sent(tmp_path: Path, bits: int | None) -> None:
    config: dict[str, Any] = {
        "workers": 3,
        "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 200_000}},
        "algorithm": {
            "name": "afl-com",
            "rounds": ROUNDS,
            "eta_w": 0.1,
            "eta_q": 0.1,
            "uplink": {"name": "rand-k", "ratio": 0.5, **({"bits": bits} if bits else {})},
        },
        "evaluation": {"every": 6},
        "server": {"chunk_bytes": "64KiB"},
    }
    (tmp_path / "site.yaml").write_text("audit: audit.jsonl\nmax_rounds: 12\n", encoding="utf-8")
    with Wiretap() as tap, Federation(config, tmp_path / "federation") as federation:
        tap.aim(federation.port)
        federation.start("2")
        for point in (*POINTS, ""):
            worker = federation.start(
                "0-1",
                "--policy",
                str(tmp_path / "site.yaml"),
                server=tap.address,
                environment={VARIABLE: point},
            )
            worker.expect(-signal.SIGKILL if point else 0)
            federation.workers.remove(worker)
            worker.close()
        federation.finish()
    entries = [link.entry for link in read_log(federation.folder / "audit.jsonl")]
    first = Counter()
    for number, entry in enumerate(entries):
        if entry["kind"] == "joined":
            continue
        if entry["again"]:
            same = {key: entry[key] for key in entry.keys() - {"previous", "time", "again"}}
            assert any(same.items() <= earlier.items() for earlier in entries[:number])
        else:
            first.update((entry["kind"], worker, entry["round"]) for worker in entry["workers"])
    kinds = {"train": range(1, ROUNDS + 1), "evaluate": (6, 12)}
    expected = {(kind, worker, at) for kind, rounds in kinds.items() for worker in (0, 1) for at in rounds}
    assert first == dict.fromkeys(expected, 1), "each report once, and otherwise marked"
    assert any(entry["again"] for entry in entries)
    logged = Counter(
        (entry["workers"][0], entry["round"], entry["phase"], entry["digest"])
        for entry in entries
        if entry["digest"] is not None
    )
    assert logged.keys() == tap.digests.keys()
    assert all(count <= logged[what] for what, count in tap.digests.items()), (
        "nothing is sent that is not logged"
    )
