"""A whole federation on this machine: a server and worker processes over loopback, watched from one place."""

from __future__ import annotations

import contextlib
import signal
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import afl_server
import afl_worker
from afl.config.address import Address
from afl.errors import AflError, ExitCode, LostServerError, RunCompleteError
from afl.paths import from_start
from afl.terminal.display import REFRESH_S, RunDisplay
from afl_cli.federation.children import Child, Children
from afl_cli.federation.plan import FederationPlan
from afl_cli.status import fetch_status

TOLD_CODES: Final = frozenset({ExitCode.DIVERGED, ExitCode.ABORTED})
"""What a worker process ends with where the server ends the run, and says why."""

FINAL_CODES: Final = frozenset(
    {ExitCode.CONFIG, ExitCode.REFUSED, ExitCode.DATA, ExitCode.POLICY, *TOLD_CODES}
)
"""What a worker process would end with again."""

LEAVE_GRACE_S: Final = 15.0
"""How long workers may take to end once the server has ended well, since each has been told; and the server,
once a worker says that the run is over."""


@dataclass(frozen=True)
class Ending:
    """How a run ended, or this part of it.

    Attributes:
        code: the server's exit code, or that of a worker for which the run was stopped.
        reason: one sentence.
        summary: what the server wrote last; nothing if it could not.
        can_go_on: whether the run can be resumed.
    """

    code: ExitCode
    reason: str
    summary: Mapping[str, Any] | None = None
    can_go_on: bool = False


@dataclass
class _Worker:
    """A worker process, and those in its place before it."""

    ids: range
    child: Child
    restarts: int = 0
    round: int = -1
    """How far the run was when it was last started again."""


def federate(plan: FederationPlan, display: RunDisplay) -> Ending:
    """One run, from its first process to its last, shown on ``display`` once the server listens.

    Raises:
        RunCompleteError: if there is nothing left to do.
        AflError: if the server cannot start, or a process dies and is not started again.
        KeyboardInterrupt: after Ctrl-C; where it stops softly, after the second.
    """
    with Children() as children:
        federation = _Federation(plan, children, display)
        federation.start()
        with display:
            return federation.follow()


class _Federation:
    def __init__(self, plan: FederationPlan, children: Children, display: RunDisplay) -> None:
        self._plan = plan
        self._children = children
        self._display = display
        self._server: Child | None = None
        self._workers: list[_Worker] = []
        self._address = ""
        self._http = ""
        self._context: ssl.SSLContext | None = None
        self._round = 0
        self._told: tuple[float, Child] | None = None
        """Until when the server should have ended, by the word of this worker."""
        self._stopped: tuple[ExitCode, str] | None = None
        """Why the run was stopped from here."""
        self._last_word: dict[str, Any] | None = None
        """What the server has logged of the run's end."""
        self._can_go_on = False

    def start(self) -> None:
        """Start the server, and the workers once it listens."""
        self._plan.logs.mkdir(parents=True, exist_ok=True)
        self._server = self._children.start(
            "server", afl_server.__name__, [*self._plan.server, "--no-live"], self._plan.logs / "server.log"
        )
        while (event := self._children.next_event()) is None or event.name != "listening":
            if event is not None and not event.fields:
                raise failure_of(self._server)
        self._address = f"127.0.0.1:{event.fields['port']}"
        self._http = str(Address(self._plan.http_host, event.fields["http_port"]))
        if (certificate := self._plan.http_certificate) is not None:
            self._http = f"https://{self._http}"
            self._context = _only(certificate)
        self._workers = [_Worker(ids, self._start_worker(ids)) for ids in self._plan.groups]

    def follow(self) -> Ending:
        """Show the run until the server has ended, and, if it has ended well, the workers."""
        assert self._server is not None
        due = time.monotonic()
        while True:
            try:
                event = self._children.next_event(timeout=max(0.0, due - time.monotonic()))
            except KeyboardInterrupt as interrupt:
                self._interrupted(interrupt)
                continue
            if event is not None and event.child is self._server:
                if not event.fields:
                    break
                if event.name == "run_over":
                    self._last_word = event.fields
                self._can_go_on |= event.name == "can_go_on"
            elif event is not None and not event.fields:
                self._worker_ended(event.child)
            if time.monotonic() >= due:
                self._look()
                due = time.monotonic() + REFRESH_S
        ending = self._ending()
        deadline = time.monotonic() + (LEAVE_GRACE_S if ending.code is ExitCode.OK else 0)
        processes = [worker.child.process for worker in self._workers]
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            self._children.next_event(timeout=0.1)
        self._children.end()
        return ending

    def _look(self) -> None:
        """Show the state, and see whether the server is late to end."""
        # The server is gone as soon as the run is over; its workers follow.
        with contextlib.suppress(LostServerError):
            state = fetch_status(self._http, context=self._context)
            self._round = state["round"]
            self._display.show(state)
        if self._told is not None and time.monotonic() >= self._told[0] and self._stopped is None:
            self._give_up(self._told[1], "the server does not end it")

    def _ending(self) -> Ending:
        """How it ended, once the server has."""
        assert self._server is not None
        code = self._server.wait()
        said = self._last_word
        if said is None or code not in set(ExitCode):
            raise failure_of(self._server)
        ending = Ending(ExitCode(code), said["message"], said["summary"], self._can_go_on)
        if self._stopped is None or ending.code is not ExitCode.INTERRUPTED:
            return ending
        return replace(ending, code=self._stopped[0], reason=self._stopped[1])

    def _start_worker(self, ids: range) -> Child:
        text = f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else f"{ids[0]}"
        return self._children.start(
            f"worker{'s' * (len(ids) > 1)} {text}",
            afl_worker.__name__,
            ["--id", text, "--server", self._address, *self._plan.worker, *self._plan.own.get(ids, ())],
            self._plan.logs / f"workers-{text}.log",
        )

    def _worker_ended(self, child: Child) -> None:
        code = child.wait()
        if code == 0 or self._stopped is not None:
            return
        if code in TOLD_CODES:
            self._told = self._told or (time.monotonic() + LEAVE_GRACE_S, child)
            return
        if not self._plan.restarts:
            raise failure_of(child)
        (worker,) = [worker for worker in self._workers if worker.child is child]
        if self._round > worker.round:
            worker.restarts = 0
        if code in FINAL_CODES:
            self._give_up(child, "that would happen again")
        elif worker.restarts >= self._plan.restarts:
            self._give_up(child, "no restart is left (--restarts)")
        else:
            worker.restarts += 1
            worker.round = self._round
            again = f"It is started again ({worker.restarts} of {self._plan.restarts})."
            self._display.say(f"{failure_of(child)}\n{again}")
            worker.child = self._start_worker(worker.ids)

    def _give_up(self, child: Child, why: str) -> None:
        """Stop the run for a worker process that has ended."""
        failure = failure_of(child)
        self._display.say(f"{failure}\nThe run stops: {why}.")
        self._stop(failure.exit_code, child.ending)

    def _interrupted(self, interrupt: KeyboardInterrupt) -> None:
        if not self._plan.stops_softly:
            raise interrupt
        if self._stopped is not None:
            self._children.kill()
            raise interrupt
        (number,) = interrupt.args
        self._display.say("Stopping when the open round is closed; Ctrl-C again ends everything at once.")
        name = "Ctrl-C" if number is signal.SIGINT else number.name
        # The server takes no SIGHUP, which comes as a terminal is closed.
        to_server = signal.SIGTERM if number is signal.SIGHUP else number
        self._stop(ExitCode.INTERRUPTED, f"stopped by {name}", to_server)

    def _stop(self, code: ExitCode, reason: str, number: signal.Signals = signal.SIGTERM) -> None:
        self._stopped = code, reason
        assert self._server is not None
        self._server.process.send_signal(number)


def failure_of(child: Child) -> AflError:
    """What to say of a child that ended before its time, with the last that it said."""
    code = child.wait()
    if code == 0:
        return RunCompleteError(child.tail.removeprefix("afl-server: "))
    failure = AflError(f"{child.ending}; its log ({child.log}) ends:\n{child.tail}")
    if code in set(ExitCode):
        failure.exit_code = ExitCode(code)
    return failure


def _only(certificate: Path) -> ssl.SSLContext:
    """Believes this certificate, by whatever name, and whoever signed it: it is asked for by an address."""
    context = ssl.create_default_context(cafile=from_start(certificate))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
