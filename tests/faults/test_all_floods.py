"""Every flood of hostile peers at once, on a server with ten honest workers: they notice little of it."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from faults_cases import Lowered

from support import Proxy, result_of
from support.floods import (
    Enemy,
    Flood,
    Target,
    askers,
    insiders,
    joins,
    rebinders,
    returners,
    streams,
    watchers,
)
from support.identities import Identities, Pair, tls
from support.process import Process

GROUPS = ("0-3", "4-6", "7-9")
"""Workers of each process; the last comes when the floods have begun."""

CLAIMED, BEYOND = 0, 10
DESCRIPTORS = 1024
BRIEF_S = 12.0
"""How long the certificate of a peer that comes back without one is valid."""

TASK, PAUSE_S = "tests_tasks:Hurried", 0.02
"""Before each gradient: a round of four in one process takes some 90 ms, unless it is hurried."""

CUTS = 3
"""Of the connections of two processes, whose workers then come back through the floods."""

MOST_MEMORY = 1.3
MOST_LOG_BYTES = 1_000_000
MOST_SECONDS_OUT = 5.0
NICENESS = 10
"""Floods come from other machines: here they should not take the honest workers' share of the processor."""


def config(rounds: int, server: dict[str, Any]) -> dict[str, Any]:
    task = {"name": TASK, "batch_size": 8, "options": {"pause": PAUSE_S}}
    com = {"name": "afl-com", "rounds": rounds, "eta_w": 0.5, "eta_q": 0.3}
    return {
        "workers": 10,
        "task": task,
        "algorithm": {**com, "uplink": {"name": "top-k", "ratio": 0.2}},
        "evaluation": {"every": 20},
        "server": {"handshake_timeout": "5s", **server},
    }


class Enrolled:
    """A federation's certificates or tokens, of honest workers and of others."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.ours = ours = Identities(folder)
        self.is_by_certificate = kind == "certificates"
        hostile = f"{CLAIMED},{BEYOND}-{BEYOND + 2}"
        self._options = {ids: self._shown(ids) for ids in GROUPS}
        self.pair: Pair | None = None
        self.token = ""
        if self.is_by_certificate:
            self.pair = ours.worker(hostile)
            self.server: dict[str, Any] = {"tls": tls(ours.server(), ours.ca)}
        else:
            self.token = ours.token(hostile).read_text(encoding="utf-8").strip()
            self.server = {"tls": tls(ours.server()), "tokens": str(ours.tokens)}

    def _shown(self, ids: str) -> tuple[str, ...]:
        if self.is_by_certificate:
            return self.ours.worker(ids).worker_options
        return "--token-file", str(self.ours.token(ids))

    def start(self, federation: Lowered, ids: str, door: Proxy | None = None) -> Process:
        """Start the process of these workers; through the door if there is one."""
        options = ("--ca", str(self.ours.ca), *self._options[ids], "--task", TASK)
        return federation.start(ids, *options, server=None if door is None else door.address)

    def target(self, federation: Lowered, seconds: float) -> Target:
        """Begins the time of a certificate that is brief."""
        expires = time.time() + BRIEF_S
        expired = self.ours.brief(f"{BEYOND}", BRIEF_S) if self.is_by_certificate else None
        listening = federation.server.wait_for("listening")
        ports = listening["port"], listening["http_port"]
        return Target(
            *ports, self.ours.ca, self.pair, self.token, expired, expires + 1, CLAIMED, BEYOND, seconds
        )


class Peak:
    """Looks for the most memory that a process has had from now on, until it ends.

    Attributes:
        kb: all of it, in units of 1024 bytes.
        own_kb: what lies in no file, as seen in looks 50 ms apart.
    """

    def __init__(self, pid: int) -> None:
        self.kb = self.own_kb = 0
        self._folder = Path(f"/proc/{pid}")
        # Imports take more than what is left of them; see proc(5).
        (self._folder / "clear_refs").write_text("5", encoding="ascii")
        self._thread = threading.Thread(target=self._look, name="peak", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        with contextlib.suppress(OSError):
            while "VmHWM" in (text := (self._folder / "status").read_text("ascii")):
                fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
                self.kb = int(fields["VmHWM"])
                self.own_kb = max(self.own_kb, int(fields["RssAnon"]))
                time.sleep(0.05)

    def close(self) -> Self:
        """Wait until it has ended."""
        self._thread.join(60)
        return self


def at(line: dict[str, Any]) -> dt.datetime:
    return dt.datetime.fromisoformat(line["time"])


def seconds_out(worker: Process) -> float:
    """The longest time that a worker, by its own log, was without a session."""
    longest, since = 0.0, None
    for line in worker.events:
        match line.get("event"):
            case "reconnecting" if since is None:
                since = at(line)
            case "joined" | "joined_again" if since is not None:
                longest, since = max(longest, (at(line) - since).total_seconds()), None
    return longest


@dataclass(frozen=True)
class Outcome:
    """What is left of a run.

    Attributes:
        peak: the most memory that the server had while it served.
        rounds: how many were over when the floods were.
    """

    federation: Lowered
    peak: Peak
    rounds: int = 0
    counts: Mapping[str, Counter[str]] = field(default_factory=dict)

    def seconds_a_round(self, rounds: int) -> float:
        """Of the first so many, all but the first."""
        return statistics.mean(line["seconds"] for line in self.federation.records("round")[1:rounds])


def undisturbed(run: dict[str, Any], folder: Path, enrolled: Enrolled, hurry: Path) -> Outcome:
    with Lowered(run, folder, DESCRIPTORS, environment={"HURRY": str(hurry)}) as federation:
        federation.server.wait_for("listening")
        peak = Peak(federation.server.pid)
        for ids in GROUPS:
            enrolled.start(federation, ids)
        federation.finish()
        return Outcome(federation, peak.close())


def flooded(run: dict[str, Any], folder: Path, enrolled: Enrolled, seconds: float, hurry: Path) -> Outcome:
    """All floods at once for so long; meanwhile the last workers come, and connections are cut."""
    with (
        Lowered(run, folder, DESCRIPTORS, environment={"HURRY": str(hurry)}) as federation,
        Proxy(federation.port) as door,
        contextlib.ExitStack() as stack,
    ):
        peak, floods = Peak(federation.server.pid), dict[str, Flood]()
        target = enrolled.target(federation, seconds)

        def begin(*attacks: Callable[[Enemy], None]) -> None:
            for attack in attacks:
                floods[attack.__name__] = stack.enter_context(Flood(attack, target, NICENESS))

        if enrolled.is_by_certificate:
            # It has its session first, and floods once its certificate has expired.
            begin(returners)
        # Never cut: where an honest worker is gone, someone with its credentials may take its place.
        enrolled.start(federation, GROUPS[0])
        enrolled.start(federation, GROUPS[1], door)
        federation.server.wait_for("worker_ready", count=2)
        if enrolled.is_by_certificate:
            time.sleep(max(0.0, target.expires - time.time()))
        begin(watchers, streams, joins, insiders, askers, rebinders)
        time.sleep(1.0)
        enrolled.start(federation, GROUPS[2], door)
        federation.server.wait_for("worker_ready", count=3)
        for _ in range(CUTS):
            time.sleep(seconds / (2 * CUTS))
            door.cut()
        counts = {name: flood.wait(seconds + 60) for name, flood in floods.items()}
        rounds = federation.status()["round"]
        hurry.touch()
        federation.finish(300)
        return Outcome(federation, peak.close(), rounds, counts)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "seconds", "rounds", "is_timed"),
    [
        ("tokens", 6.0, 600, False),
        *(
            pytest.param(kind, 30.0, 500, True, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for kind in ("certificates", "tokens")
        ),
    ],
)
def test_all_floods_at_once_change_no_bit(
    kind: str, seconds: float, rounds: int, is_timed: bool, tmp_path: Path
) -> None:
    enrolled = Enrolled(tmp_path / "pki", kind)
    run = config(rounds, enrolled.server)
    hurry, now = tmp_path / "hurry", tmp_path / "now"
    now.touch()
    calm = undisturbed(run, tmp_path / "calm", enrolled, hurry if is_timed else now)
    rough = flooded(run, tmp_path / "flooded", enrolled, seconds, hurry)
    server, workers = rough.federation.server, rough.federation.workers
    out = {worker.name: seconds_out(worker) for worker in workers}
    figures = {
        "rounds in floods": rough.rounds,
        "seconds out": out,
        "memory": rough.peak.kb / calm.peak.kb,
        "own memory": rough.peak.own_kb / calm.peak.own_kb,
        "calm kb": calm.peak.kb,
        "log bytes": len(server.text),
        "seconds of a round": [run.seconds_a_round(rough.rounds) for run in (calm, rough)],
        "strangers cut": sum(line["connections"] for line in server.logged("strangers_cut")),
        "counts": {name: dict(count) for name, count in rough.counts.items()},
    }
    print(json.dumps(figures, indent=1))  # noqa: T201  # the figures are what the long form is for
    assert result_of(rough.federation) == result_of(calm.federation)
    assert all(worker.logged("joined_again") for worker in workers[1:]), figures
    assert max(out.values()) <= MOST_SECONDS_OUT, figures
    assert rough.peak.kb <= MOST_MEMORY * calm.peak.kb, figures
    assert len(server.text) <= MOST_LOG_BYTES, figures
    assert server.text.replace("\n", "").isprintable()
    assert not server.logged("forged")
    check_outcomes(rough.counts)
    if is_timed:
        # Of those that only watch, the first are cut after ten seconds, unless there is a crowd before; pages
        # hang up on those that ask slowly, also after some seconds.
        assert rough.counts["watchers"]["cut"], figures
        assert rough.counts["askers"]["hung up"], figures


def check_outcomes(counts: Mapping[str, Counter[str]]) -> None:
    """Nobody came in, and each was told why, or cut."""
    for name, count in counts.items():
        assert not count["welcome"], (name, count)
    assert counts["streams"]["cut"], counts
    assert counts["rebinders"]["answered 403"], counts
    assert not {"answered 200", "answered 500"} & counts["rebinders"].keys(), counts
    assert counts["insiders"][f"worker {CLAIMED} is taken:"], counts
    assert counts["insiders"][f"worker {BEYOND} is out"], counts
    assert counts["joins"]["goodbye"], counts
    if "returners" in counts:
        assert counts["returners"]["this worker's certificate expired"], counts
        assert set(counts["returners"]) <= {
            "attempts",
            "ended",
            "cut",
            "goodbye",
            "this worker's certificate expired",
        }, counts
