"""A server that strangers, who have no credential, leave as few file descriptors as they can."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults_cases import Lowered

from afl.daemon.descriptors import KEPT, most_connections, most_pages
from support import Process, Proxy, Reference
from support.longer import but_long

LIMIT = 256
CONFIG: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 20, "examples": 16}},
    "algorithm": {"name": "afl-br", "rounds": 200, "eta_w": 0.1, "eta_q": 0.1},
    "evaluation": {"every": 20},
    # A checkpoint, which opens files, every few rounds.
    "server": {"checkpoint_every": 5},
}
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
"""What a client of HTTP/2 begins with."""


@contextlib.contextmanager
def strangers(port: int, beginning: bytes) -> Iterator[list[socket.socket]]:
    """More connections than the server may have descriptors; each says ``beginning`` and nothing else."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(LIMIT + 50):
            link = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            # Who is hung up on at once cannot say even that.
            with contextlib.suppress(OSError):
                link.sendall(beginning)
            made.append(link)
        yield made


def open_descriptors(process: Process) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


@pytest.mark.parametrize("where", but_long(["grpc", "grpc that speaks", "http"], "grpc that speaks", "http"))
def test_silent_strangers_do_not_end_a_run(where: str, tmp_path: Path) -> None:
    with Proxy() as door, Lowered(CONFIG, tmp_path / "f", LIMIT) as federation:
        door.aim(federation.port)
        door.delay = 0.02
        pages = federation.server.wait_for("listening")["http_port"]
        federation.start("0-1", server=door.address)
        begun = federation.wait_until(lambda status: status["round"] >= 5)["round"]
        port = pages if where == "http" else federation.port
        with strangers(port, HTTP2 if where == "grpc that speaks" else b""):
            # Beside them, two checkpoints and more are written.
            federation.server.wait_for("evaluation", round=(begun // 20 + 2) * 20)
            assert open_descriptors(federation.server) <= LIMIT - KEPT // 4
        door.delay = 0.0
        federation.finish()
        assert not federation.server.logged("disk_failed")
        assert not federation.server.logged("descriptors_short"), "what is kept for files was enough"
    assert federation.model("final")["w"].numpy().tobytes() == Reference.of(CONFIG).weights[-1].tobytes()


def test_what_is_kept_for_files() -> None:
    for limit in (256, 1024, 20_000, 1 << 20):
        assert most_pages(limit) + most_connections(limit) + KEPT <= limit
    assert (most_pages(1024), most_connections(1024)) == (128, 800)
    assert most_connections(40) == 10, "of few, some"
    assert most_pages(4) == most_connections(4) == 1
