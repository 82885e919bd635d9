"""Bytes that are no protocol's, at both ports of a server whose run goes on meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from faults_cases import GROUPS, config_of

from support import Federation, result_of, run_together
from support.fuzz import http2_conversations, http_requests, mutated, rss_kb

LARGEST_GROWTH_KB = 200 * 1024
MOST_LOG_BYTES = 1_000_000
MOST_READ = 200_000
END_S = 600.0
THREADS = 4
TASK, PAUSE_S = "tests_tasks:Hurried", 0.1
"""A round of two workers in one process takes at least 0.2 s while it is not hurried."""

SLOW = 0.01
"""The share that never ends what it says, until it is cut or the port has heard all others."""


@dataclass(frozen=True)
class Port:
    """One of the server's, and how it is spoken to.

    Attributes:
        name: in the event ``listening``.
        patience: seconds of silence after which nothing more is waited for.
        ends: whether what is said there ends, as a request does.
        kind: of an answer.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    patience: float
    ends: bool
    kind: Callable[[bytes], str]

    def talk(self, number: int, said: bytes) -> str:
        """What is answered; the connection is closed whether or not that is all."""
        heard = b""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", number), timeout=10) as link,
        ):
            link.settimeout(self.patience)
            link.sendall(said)
            if self.ends:
                link.shutdown(socket.SHUT_WR)
            while len(heard) < MOST_READ and (piece := link.recv(65536)):
                heard += piece
        return self.kind(heard)


def status_of(heard: bytes) -> str:
    """Of an answer over HTTP/1.0; one to a request of HTTP/0.9 has none."""
    return heard[9:12].decode("latin-1") if heard.startswith(b"HTTP/1.0 ") else "no status"


def frames_of(heard: bytes) -> str:
    """The kinds of frames of HTTP/2 in it (RFC 9113, section 6)."""
    kinds = set()
    while len(heard) >= 9:
        kinds.add(heard[3])
        heard = heard[9 + int.from_bytes(heard[:3], "big") :]
    return " ".join(map(str, sorted(kinds)))


GRPC = Port("port", http2_conversations, patience=0.03, ends=False, kind=frames_of)
PAGES = Port("http_port", http_requests, patience=0.5, ends=True, kind=status_of)


def say(port: Port, number: int, seed: int, count: int) -> Counter[str]:
    """So many conversations, one after the other; how often each kind of answer came."""
    chance, answers, seeds = random.Random(seed), Counter[str](), port.seeds()
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            said = chance.choice(seeds)
            if chance.random() < 0.8:
                said = mutated(chance, said)
            if chance.random() < SLOW:
                with contextlib.suppress(OSError):
                    link = stack.enter_context(socket.create_connection(("127.0.0.1", number), timeout=10))
                    link.sendall(said[: len(said) // 2])
                continue
            answers[port.talk(number, said)] += 1
    return answers


def fuzzed(federation: Federation, port: Port, count: int) -> Counter[str]:
    """From several threads; the server bears it."""
    memory, number = rss_kb(federation.server.pid), federation.server.wait_for("listening")[port.name]
    with ThreadPoolExecutor(THREADS) as threads:
        shares = [threads.submit(say, port, number, seed, count // THREADS) for seed in range(THREADS)]
        answers = sum((share.result() for share in shares), Counter[str]())
    assert federation.server.is_running, federation.server.text[-4000:]
    assert replace(port, patience=5.0).talk(number, port.seeds()[0]), "nobody is let in any more"
    assert rss_kb(federation.server.pid) - memory < LARGEST_GROWTH_KB
    assert len(federation.server.text) < MOST_LOG_BYTES
    return answers


def config(rounds: int) -> dict[str, Any]:
    base = config_of("top-k", handshake_timeout="2s")
    task = {"name": TASK, "batch_size": 8, "options": {"pause": PAUSE_S}}
    return {**base, "task": task, "algorithm": {**base["algorithm"], "rounds": rounds}}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("port", "count", "rounds", "answered"),
    [
        pytest.param(port, count, rounds, answered, id=f"{port.name}-{count}", marks=marks)
        for port, answered, cases in (
            (GRPC, {"0", "1", "3", "7"}, ((1_000, 200, []), (40_000, 4000, pytest.mark.slow))),
            (
                PAGES,
                {"200", "400", "403", "404", "405", "431"},
                ((3_000, 200, pytest.mark.long), (100_000, 4000, pytest.mark.slow)),
            ),
        )
        for count, rounds, marks in cases
    ],
)
def test_a_port_takes_whatever_comes(
    port: Port, count: int, rounds: int, answered: set[str], tmp_path: Path
) -> None:
    hurry, run = tmp_path / "hurry", config(rounds)
    there = {"HURRY": str(hurry)}
    with Federation(run, tmp_path / "fuzzed", environment=there) as federation:
        workers = [federation.start(ids, "--task", TASK) for ids in GROUPS]
        federation.server.wait_for("worker_ready", count=2)
        answers = fuzzed(federation, port, count)
        during = federation.status()["round"]
        hurry.touch()
        federation.finish(END_S)
    assert 1 < during < rounds
    assert not any(worker.logged("reconnecting") for worker in workers), federation.report()
    assert not federation.server.logged("page_failed")
    assert answered <= {part for answer in answers for part in answer.split()}, answers
    assert "500" not in answers, answers
    calm = run_together(run, tmp_path / "calm", GROUPS, environment=there, timeout=END_S)
    assert result_of(federation) == result_of(calm)
