"""A whole federation on this machine: a server and worker processes over loopback, watched from one place."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from afl.cli.children import Child, Children
from afl.cli.display import REFRESH_S, RunDisplay
from afl.cli.status import fetch_status
from afl.config.address import Address, is_wildcard
from afl.errors import AflError, ExitCode, LostServerError, RunCompleteError

FEWEST_PROCESSES: Final = 4
"""Each process imports PyTorch, seconds of one core: on two cores ten would take half a minute to start."""

MOST_RESTARTS: Final = 3
"""How often in a row a worker process is started again while no round is closed."""

FINAL_CODES: Final = frozenset({ExitCode.CONFIG, ExitCode.REFUSED, ExitCode.DIVERGED, ExitCode.DATA})
"""What a worker process would end with again."""

LEAVE_GRACE_S: Final = 15.0
"""How long workers may take to end once the server has ended well: each has been told."""


@dataclass(frozen=True)
class FederationPlan:
    """What is started.

    Attributes:
        server: arguments of ``afl-server``.
        groups: the worker ids of each worker process.
        worker: arguments of each ``afl-worker``, but for its ids and the server.
        logs: the folder for their logs.
        http_host: where the server's status is asked for.
        restarts: how often in a row a worker process that dies is started again; 0: its death ends the run.
        stops_softly: whether the first Ctrl-C lets the open round end; otherwise it ends everything.
    """

    server: Sequence[str]
    groups: Sequence[range]
    worker: Sequence[str]
    logs: Path
    http_host: str = "127.0.0.1"
    restarts: int = 0
    stops_softly: bool = False


@dataclass
class _Worker:
    """A worker process, and those in its place before it."""

    ids: range
    child: Child
    restarts: int = 0
    round: int = field(default=-1)
    """How far the run was when it was last started again."""


class LocalFederation:
    """One run, from its first process to its last.

    Args:
        children: whose processes they are.
    """

    def __init__(self, plan: FederationPlan, children: Children) -> None:
        self._plan = plan
        self._children = children
        self._server: Child | None = None
        self._workers: list[_Worker] = []
        self._address = ""
        self._http = ""
        self._round = 0
        self._failure: ExitCode | None = None
        """Of a worker for which the run was stopped."""
        self._is_stopping = False

    def start(self) -> dict[str, Any]:
        """Start the server, and the workers once it listens; the fields of its event ``listening``.

        Raises:
            RunCompleteError: if there is nothing left to do.
            AflError: if the server cannot start.
        """
        self._plan.logs.mkdir(parents=True, exist_ok=True)
        self._server = self._children.start(
            "server", "afl_server", [*self._plan.server, "--no-live"], self._plan.logs / "server.log"
        )
        while (event := self._children.next_event()) is None or event.name != "listening":
            if event is not None and not event.fields:
                raise failure_of(self._server)
        self._address = f"127.0.0.1:{event.fields['port']}"
        self._http = str(Address(self._plan.http_host, event.fields["http_port"]))
        self._workers = [_Worker(ids, self._start_worker(ids)) for ids in self._plan.groups]
        return event.fields

    def follow(self, display: RunDisplay) -> ExitCode:
        """Show the run until every process has ended; the server's exit code, or that of a worker that could
        not go on.

        Raises:
            AflError: if a process dies, and is not started again.
            KeyboardInterrupt: after Ctrl-C; where it stops softly, after the second.
        """
        assert self._server is not None
        due = time.monotonic()
        while True:
            try:
                event = self._children.next_event(timeout=max(0.0, due - time.monotonic()))
            except KeyboardInterrupt:
                self._interrupted(display)
                continue
            if event is not None and not event.fields:
                if event.child is self._server:
                    break
                self._worker_ended(event.child, display)
            if time.monotonic() >= due:
                # The server is gone as soon as the run is over; its workers follow.
                with contextlib.suppress(LostServerError):
                    state = fetch_status(self._http)
                    self._round = state["round"]
                    display.show(state)
                due = time.monotonic() + REFRESH_S
        code = self._server.wait()
        if code == ExitCode.OK:
            self._let_workers_leave()
            return ExitCode.OK
        self._children.end()
        if self._failure is not None:
            return self._failure
        if code not in set(ExitCode) or (code != ExitCode.INTERRUPTED and not self._plan.restarts):
            raise failure_of(self._server)
        return ExitCode(code)

    def _start_worker(self, ids: range) -> Child:
        text = f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else f"{ids[0]}"
        return self._children.start(
            f"workers {text}" if len(ids) > 1 else f"worker {text}",
            "afl_worker",
            ["--id", text, "--server", self._address, *self._plan.worker],
            self._plan.logs / f"workers-{text}.log",
        )

    def _worker_ended(self, child: Child, display: RunDisplay) -> None:
        code = child.wait()
        if code == 0 or self._is_stopping:
            return
        if not self._plan.restarts:
            raise failure_of(child)
        (worker,) = [worker for worker in self._workers if worker.child is child]
        if self._round > worker.round:
            worker.restarts = 0
        said = str(failure_of(child))
        if code not in FINAL_CODES and worker.restarts < self._plan.restarts:
            worker.restarts += 1
            worker.round = self._round
            display.say(f"{said}\nIt is started again ({worker.restarts} of {self._plan.restarts}).")
            worker.child = self._start_worker(worker.ids)
            return
        why = "that would come again" if code in FINAL_CODES else "it was started again often enough"
        then = "" if code == ExitCode.DIVERGED else " Once it is mended, the same command goes on."
        display.say(f"{said}\nThe run stops: {why}.{then}")
        self._failure = ExitCode(code) if code in set(ExitCode) else ExitCode.INTERNAL
        self._stop()

    def _interrupted(self, display: RunDisplay) -> None:
        if not self._plan.stops_softly:
            raise KeyboardInterrupt
        if self._is_stopping:
            self._children.kill()
            raise KeyboardInterrupt
        display.say("Stopping when the open round is closed; Ctrl-C again ends everything at once.")
        self._stop()

    def _stop(self) -> None:
        self._is_stopping = True
        assert self._server is not None
        self._server.process.terminate()

    def _let_workers_leave(self) -> None:
        deadline = time.monotonic() + LEAVE_GRACE_S
        running = [worker.child for worker in self._workers]
        while running and time.monotonic() < deadline:
            self._children.next_event(timeout=0.1)
            running = [child for child in running if child.process.poll() is None]


def failure_of(child: Child) -> AflError:
    """What to say of a child that ended before its time, with the last that it said."""
    code = child.wait()
    if code == 0:
        return RunCompleteError(child.tail.removeprefix("afl-server: "))
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    failure = AflError(f"the {child.name} process {how}; its log ({child.log}) ends:\n{child.tail}")
    if code in set(ExitCode):
        failure.exit_code = ExitCode(code)
    return failure


def default_processes(workers: int) -> int:
    """One a worker, but no more than :data:`FEWEST_PROCESSES` or the number of cores."""
    return min(workers, max(FEWEST_PROCESSES, _cores()))


def divided(workers: int, processes: int) -> tuple[range, ...]:
    """The ids 0 to ``workers - 1`` in runs whose lengths differ by at most one."""
    edges = [workers * index // processes for index in range(processes + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(edges))


def setting(key: str, value: object) -> list[str]:
    """``--set KEY=VALUE``, with what would be filled in from the environment escaped."""
    return ["--set", f"{key}={json.dumps(value).replace('${', '$${')}"]


def reachable(host: str) -> str:
    """How this machine reaches itself at what it listens on."""
    if not is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
