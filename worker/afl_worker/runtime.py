"""A worker's life: connect, converse until the connection ends, come back after a cut, leave."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from afl.config.quantities import shown_seconds
from afl.core.messages import Ack, CommittedStep, GoodbyeStatus, Kind
from afl.daemon import events
from afl.daemon.tracing import Span, Tracing, timed
from afl.errors import (
    AflError,
    ConfigError,
    LostServerError,
    NonFiniteError,
    PeerError,
    PolicyError,
    ProtocolError,
    RefusedError,
    RunAbortedError,
    VersionError,
)
from afl.outside import MOST_OF_REASON, words
from afl.security.identity import WorkerIds
from afl.v1 import federation_pb2 as pb
from afl.wire.capture import Capture
from afl.wire.frames import number
from afl.wire.settings import RunSettings
from afl_worker.conversation import CannotGoOnError, Conversation
from afl_worker.network.connection import Broken, Connection, Ended
from afl_worker.options import WorkerOptions
from afl_worker.reconnection import TOLD_AFTER, Carried, Reconnection
from afl_worker.training.setup import chosen_device
from afl_worker.training.timings import Timings

LOG = logging.getLogger("afl.worker")

SEND_FIRST_S = 0.02
"""How long the next round's randomness waits for a report to be on its way: the report is on the round's
critical path, the randomness is not."""

FAILURE_DRAIN_S = 10.0
"""How long a failing worker waits for its traceback to reach the server."""

LEAVE_DRAIN_S = 1.0

VERSION_PAUSE_S = 30.0
"""Before the next try where server and worker cannot work together: somebody must upgrade one first."""


@dataclass(frozen=True)
class Progress:
    """How a worker process does.

    Attributes:
        run_id: empty before the first session.
        round: the synchronization round of the last step; 0 before the first.
        rounds: the run's, in synchronizations; ``None`` before the first session.
        seconds: of wall-clock time, by phase.
        sessions: that the server has welcomed.
        failed_tries: to reach it, since this process last got further.
        residual_norms: by worker, at the last evaluation.
        policy_rounds_left: synchronization rounds that the site's policy still lets these workers answer.
        epsilons: by worker, what has been spent on each of its records, where that is accounted for.
    """

    run_id: str
    round: int
    rounds: int | None
    steps: int
    seconds: Mapping[str, float]
    sent_bytes: int
    received_bytes: int
    sessions: int
    failed_tries: int
    residual_norms: Mapping[int, float]
    policy_rounds_left: int | None
    epsilons: Mapping[int, float]


class Runtime:
    """Runs the hosted workers until the run is over. Raises ConfigError if there is no such device."""

    def __init__(self, options: WorkerOptions, tracing: Tracing | None = None) -> None:
        self._options = options
        self._tracing = tracing
        self._timings = Timings()
        self._conversation = Conversation(options, chosen_device(options.device), self._timings.compute)
        self._capture = None if options.capture is None else Capture(options.capture)
        self._reconnection = Reconnection(options.give_up_after, time.monotonic())
        self._connection: Connection | None = None
        self._traffic: tuple[Carried, Connection | None] = Carried(0, 0, 0.0), None
        """What earlier connections have carried, and the last one: replaced together, for other threads."""
        self._is_welcome = False
        self._sessions = 0
        self._last_welcome = pb.Welcome()
        self._has_been_cut = False
        self._reason = ""
        """Why the last connection ended."""
        self._is_other_version = False
        """Whether that was since server and worker are of versions that cannot work together."""
        self.is_over = False

    def run_all(self) -> str:
        """As :meth:`run`; where the options say so, take part in what runs follow, until there is no server.

        A run that was stopped, or whose numbers were not finite, is over too. So is one that the server has
        never heard of, since it has begun another.
        """
        reason = ""
        while True:
            try:
                reason = self.run()
            except LostServerError:
                if not reason:
                    raise
                return reason
            except (RunAbortedError, NonFiniteError, RefusedError) as error:
                is_new = isinstance(error, RefusedError) and not self._conversation.run_id
                if is_new or not self._options.again:
                    raise
                reason = str(error)
            if not self._options.again:
                return reason
            event = events.AwaitingNextRun(run_id=self._conversation.run_id)
            text = "run %s is over (%s); waiting for the next one (--again)"
            LOG.info(text, event.run_id, reason, extra=event.extra)
            self.close()
            self._conversation.forget(is_complete=self.is_over)
            self._reconnection = Reconnection(self._options.give_up_after, time.monotonic())
            self._has_been_cut = self.is_over = False

    def run(self) -> str:
        """Until the run is complete; returns the server's last word.

        Raises:
            RefusedError: if the server refuses this worker.
            LostServerError: if no server could be reached for ``give_up_after``.
            VersionError: if it then was one of another version.
            RunAbortedError: if the run was stopped.
            PolicyError: if the site's policy does not allow what the server asks for.
            AflError: if the task cannot be built here, or its loss or gradient is not finite.
        """
        while True:
            ending = self._session()
            was_welcome, connection = self._is_welcome, self._connection
            self.close()
            if ending.status is GoodbyeStatus.FINISHED:
                event = events.Timings(steps=self._timings.steps, **self._timings.seconds())
                LOG.info("where the time went: %s", self._timings, extra=event.extra)
                self._conversation.finished(ending.run_id)
                self.is_over = True
                return ending.reason
            self._is_other_version = ending.status is GoodbyeStatus.OTHER_VERSION
            if was_welcome and connection is not None and not self._is_other_version:
                down, is_receiving = self._conversation.received()
                self._reconnection.session_ended(
                    time.monotonic(), down, connection.carried, is_receiving=is_receiving
                )
            self._reason = ending.reason
            self._pause(ending.reason)

    @property
    def has_session(self) -> bool:
        """Whether the server has welcomed this process, and the connection is open still."""
        connection = self._connection
        return self._is_welcome and connection is not None and connection.is_open

    def progress(self) -> Progress:
        """How this process does now; called from other threads."""
        carried, conversation = self._carried(), self._conversation
        return Progress(
            run_id=conversation.run_id,
            round=conversation.round,
            rounds=conversation.rounds,
            steps=self._timings.steps,
            seconds=self._timings.shown,
            sent_bytes=carried.sent,
            received_bytes=carried.received,
            sessions=self._sessions,
            failed_tries=self._reconnection.tries,
            residual_norms=conversation.residual_norms,
            policy_rounds_left=conversation.policy_rounds_left,
            epsilons=conversation.epsilons,
        )

    def _carried(self) -> Carried:
        past, last = self._traffic
        return past if last is None else past + last.carried

    def leave(self, reason: str) -> None:
        """Tell the server, if there is one, that this process goes: after an interrupt, which leaves the
        connection open for it."""
        if self._connection is not None:
            goodbye = pb.Goodbye(status=number(GoodbyeStatus.LEAVING), reason=reason)
            self._connection.send_control(goodbye=goodbye)
            self.close(drain_s=LEAVE_DRAIN_S)

    def close(self, *, drain_s: float = 0.0) -> None:
        """End the connection, if there is one, after up to ``drain_s`` seconds for what is queued."""
        self._is_welcome = False
        if self._connection is not None:
            self._connection.close(drain_s=drain_s)
            self._connection = None

    def _pause(self, reason: str) -> None:
        self._give_up_if_due(reason)
        pause, now = self._reconnection.pause, time.monotonic()
        if self._is_other_version:
            pause = VERSION_PAUSE_S
        if self._reconnection.failed(now, reason):
            tries = self._reconnection.tries
            since = f", for {shown_seconds(self._reconnection.silence(now))}, try {tries}" * (tries > 1)
            event = events.Reconnecting(seconds=pause, reason=reason, tries=tries)
            who = WorkerIds.of(self._options.workers).named
            text = "%s: no session with %s (%s)%s; trying again in %.1f s"
            LOG.warning(text, who, self._options.server, reason, since, pause, extra=event.extra)
        cuts = len(self._reconnection.cut_short)
        if self._reconnection.is_stuck and cuts.bit_count() == 1:
            LOG.warning("%s", self._cut_short(), extra=events.CutShort(connections=cuts).extra)
        pause *= random.uniform(0.5, 1.0)  # noqa: S311  # spreads reconnections; no secret
        left = self._reconnection.left(time.monotonic())
        time.sleep(pause if left is None else min(pause, left))
        self._give_up_if_due(reason)
        self._reconnection.has_paused(time.monotonic())

    def _give_up_if_due(self, reason: str) -> None:
        now, limit = time.monotonic(), self._options.give_up_after
        if limit is not None and self._reconnection.left(now) == 0.0:
            what = "no progress with" if self._reconnection.is_stuck else "no session with"
            why = f"; {self._cut_short()}" if self._reconnection.is_stuck else ""
            raise (VersionError if self._is_other_version else LostServerError)(
                f"{what} the server at {self._options.server} for "
                f"{shown_seconds(self._reconnection.silence(now))} (--give-up-after {shown_seconds(limit)}); "
                f"the last try: {reason}{why}"
            )

    def _cut_short(self) -> str:
        last = self._reconnection.cut_short[-TOLD_AFTER:]
        return (
            f"the last {len(self._reconnection.cut_short)} connections were cut in the middle of a message: "
            f"{'; '.join(map(str, last))}. Something between this worker and the server, such as a reverse "
            "proxy or a firewall, limits the size or the time of a connection; have it pass streams of any "
            "size and length (nginx: client_max_body_size 0; more in docs/proxies.md)"
        )

    def _session(self) -> Ended:
        """One connection, from its beginning to its end; how it ended."""
        try:
            self._conversation.check_server()
            self._connection = connection = Connection(
                self._options.server,
                self._options.credentials,
                use_proxy=self._options.use_proxy,
                is_careful=self._has_been_cut,
                capture=self._capture,
            )
            self._traffic = self._carried(), connection
        except ConfigError as error:
            # They could be used when this process began; who replaces them is not done, or will see this.
            return Ended(str(error))
        connection.send_control(join=self._conversation.join())
        while True:
            try:
                ended = self._next(connection)
            except ProtocolError as error:
                # A fresh stream starts from where both ends really are.
                is_newer = isinstance(error, VersionError)
                what = "the server is of another version" if is_newer else "the server broke the protocol"
                status = GoodbyeStatus.OTHER_VERSION if is_newer else None
                return Ended(words(f"{what}: {error}", MOST_OF_REASON), status)
            except CannotGoOnError as failed:
                self._fail(connection, failed)
            except PolicyError as error:
                # What the policy says is the site's; the operator of the server hears which keys it is about.
                self.leave(f"the site's policy forbids it: {', '.join(error.keys)}")
                raise
            except PeerError:
                self.leave("what the server says cannot be used")
                raise
            except AflError:
                raise
            except Exception as error:  # a helper's end, for one, is raised wherever the main thread is
                if not self._is_welcome:
                    raise
                self._fail(connection, self._conversation.broken(error))
            if ended is not None:
                return ended

    def _next(self, connection: Connection) -> Ended | None:
        """Wait for the next event and act on it; the connection's end, if that is what it is."""
        left = None if self._is_welcome else self._reconnection.left(time.monotonic())
        with self._timings.wait:
            event = connection.next_event(left)
        match event:
            case None:
                # Too little time was left for one: why the last connection ended is why there is none.
                status = GoodbyeStatus.OTHER_VERSION if self._is_other_version else None
                return Ended(self._reason or "no answer", status)
            case Ended(reason, GoodbyeStatus.REFUSED):
                raise RefusedError(f"the server refused this worker: {reason}")
            case Ended(reason, GoodbyeStatus.ABORTED):
                raise RunAbortedError(f"the run was stopped: {reason}")
            case Ended():
                return event
            case Broken():
                raise event.error
            case pb.Welcome():
                self._welcome(connection, event)
            case pb.Roster():
                self._conversation.roster(event)
                self._send_again(connection)
            case Ack():
                self._conversation.answered(event)
            case CommittedStep():
                self._step(connection, event)
        return None

    def _fail(self, connection: Connection, failed: CannotGoOnError) -> NoReturn:
        connection.send_control(failure=failed.told)
        connection.close(drain_s=FAILURE_DRAIN_S)
        raise failed.error from failed.error.__cause__

    def _welcome(self, connection: Connection, welcome: pb.Welcome) -> None:
        settings = RunSettings.of_message(welcome.settings)
        settings.check()
        # Before the task is built, which may take longer than the silence that the server allows.
        connection.agree(settings)
        ready = self._conversation.welcome(welcome, settings)
        connection.assembler = self._conversation.assembler
        connection.send_control(ready=ready)
        self._last_welcome = welcome
        if not self._conversation.awaits_roster:
            self._send_again(connection)
        self._is_welcome = self._has_been_cut = True
        self._sessions += 1

    def _send_again(self, connection: Connection) -> None:
        """Nothing keeps this process from sending any more: what it owes goes out."""
        welcome = self._last_welcome
        again = list(self._conversation.sent_again(welcome))
        for frames in again:
            connection.send(frames)
        self._reconnection.welcomed(time.monotonic(), str(welcome.workers), owes=bool(again))

    def _step(self, connection: Connection, committed: CommittedStep) -> None:
        began, traced = time.monotonic(), self._traced(committed)
        with self._timings.codec:
            for frames in self._conversation.step(committed):
                connection.send(frames if traced is None else timed(frames, partial(traced, "send")))
        if traced is not None:
            traced("compute", (began, time.monotonic()))
        connection.assembler.recycle(committed)
        if committed.step.kind is Kind.TRAIN:
            connection.wait_taken(SEND_FIRST_S)
            with self._timings.prepare:
                self._conversation.prepare(committed.step.position.round + 1)
        self._timings.step_ended()

    def _traced(self, committed: CommittedStep) -> Callable[[str, Span], None] | None:
        """What adds a span to the trace of a step's round, by its name; ``None`` without traces."""
        if self._tracing is None:
            return None
        return partial(
            self._tracing.add,
            run_id=self._conversation.run_id,
            round_=committed.step.position.round,
            kind=committed.step.kind.name.lower(),
            ids=str(WorkerIds.of(self._options.workers)),
        )
