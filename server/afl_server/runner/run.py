"""A server's process from its configuration to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from afl._version import __version__
from afl.advice import advice_on
from afl.config import Config, dump_config
from afl.config.address import Address
from afl.core.randomness import SharedRandomness
from afl.core.rounds.results import Outcome
from afl.daemon import events as log_events
from afl.daemon.descriptors import raise_limit
from afl.daemon.logs import Naming
from afl.daemon.tracing import tracing
from afl.errors import AddressError, ConfigError, ExitCode, RunCompleteError, StorageError
from afl.paths import as_argument, plain_file
from afl.runs.durable import OWNER_ONLY
from afl.runs.files import EVENTS_FILE, STATE_FOLDER
from afl.runs.tracking.following import Following, status_of
from afl.runs.tracking.tracker import load_trackers
from afl_server.federation import events
from afl_server.federation.counters import Moment
from afl_server.federation.machine import Federation
from afl_server.federation.rounds import QUARANTINE_FILE
from afl_server.network.authentication import Authentication
from afl_server.network.door import Strangers
from afl_server.network.service import FederationService
from afl_server.pages.access import Access, PageCertificate
from afl_server.pages.dual_window import DualWindow
from afl_server.pages.http import FinishedPages, HttpServer
from afl_server.pages.page_data import Sources
from afl_server.pages.progress import Rate
from afl_server.pages.recent_events import RecentEvents
from afl_server.pages.status import live_view, print_summary, run_status
from afl_server.runner.build import build
from afl_server.runner.recording import Recorder
from afl_server.runner.shell import Shell
from afl_server.runner.tracing import RoundTraces
from afl_server.storage.checkpointing import Checkpointing
from afl_server.storage.run_directory import OpenRun, open_run
from afl_server.storage.store import content_named, unusable

LOG = logging.getLogger("afl.server")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

RECORDING = "AFL_RECORDING"
"""The environment variable that names a file in which to write down every event (CONTRIBUTING.md)."""

_MOST_QUARANTINE = 1 << 20
"""Bytes."""

DIRECTORY_CHECK_S = 2.0
"""Between two looks at whether the run directory is still there: files that are open outlive their names."""


def run(config: Config, authentication: Authentication, *, live: bool, stays: bool) -> ExitCode:
    """Run the federation, or resume it, until it is over; returns the exit code.

    Args:
        live: show progress on the terminal.
        stays: wait for a signal once the run is complete.

    Raises:
        RunCompleteError: if there is nothing left to do, and it is not to stay.
        AflError: if the run cannot begin.
    """
    raise_limit()
    try:
        # From the beginning: what resuming a run has to say is said before anything is served.
        with RecentEvents() as recent:
            return asyncio.run(_run(config, authentication, recent, live=live, stays=stays))
    except RunCompleteError as error:
        if not stays:
            raise
        LOG.info("%s", error, extra=log_events.RunComplete().extra)
        return asyncio.run(_stay_finished(config))


async def _run(
    config: Config, authentication: Authentication, recent: RecentEvents, *, live: bool, stays: bool
) -> ExitCode:
    trackers = load_trackers(config.run.trackers)
    run = open_run(config, int.from_bytes(SharedRandomness.fresh().seed, "little"))
    try:
        parts = _Parts(run, authentication, recent)
        access, certificate = Access(run.config.server), PageCertificate.of(run.config.server)
    except BaseException:
        run.discard()
        raise
    config, shell, federation = run.config, parts.shell, parts.federation
    recent.restore(run.records.directory / EVENTS_FILE)
    run_id = federation.description.run_id
    service = FederationService(config.server, authentication, run_id, federation.counters, shell.deliver)
    shell.streams = service.carry_out
    asked_to_end = asyncio.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_named(run, federation))
        try:
            await service.start(config.server.listen)
            http: HttpServer | None = None
            if config.server.http is not None:
                http = HttpServer(
                    config.server.http,
                    parts.sources(service.strangers),
                    asyncio.get_running_loop(),
                    access,
                    certificate,
                )
                stack.callback(http.close)
            await shell.begin()
            following = Following(trackers, run_id, run.records.directory, config)
            following.start()
            parts.announce(service.port, http)
            code, reason = await _until_over(parts, asked_to_end, live=live)
            await shell.released.wait()
            await shell.close()
        except AddressError:
            run.discard()
            raise
        finally:
            await service.stop()
        if code is ExitCode.OK and not stays:
            # What is left takes no time, and a run that is complete has one exit code.
            _leave_signals(signal.SIG_IGN)
        can_resume = federation.ending is not None and federation.ending.can_resume
        code = _conclude(run, federation, code, reason, recent=recent, live=live, can_resume=can_resume)
        status = status_of(code, can_go_on=can_resume)
        if code is ExitCode.SHORTAGE:
            # No thread may be had.
            following.end(status)
        else:
            await asyncio.to_thread(following.end, status)
        if stays and code is ExitCode.OK:
            await _stay(asked_to_end)
    return code


@contextlib.contextmanager
def _named(run: OpenRun, federation: Federation) -> Iterator[None]:
    """While it is entered, the log and the records name the sites."""
    naming = Naming(federation.names)
    run.records.names = federation.names
    LOG.addFilter(naming)
    try:
        yield
    finally:
        LOG.removeFilter(naming)


class _Parts:
    """A run's parts, made or put back."""

    def __init__(self, run: OpenRun, authentication: Authentication, recent: RecentEvents) -> None:
        self.run = run
        self._authentication = authentication
        self._recent = recent
        config, records, now = run.config, run.records, time.monotonic()
        self.federation, vector = build(
            config,
            records.run_id,
            records.directory,
            records.ranking,
            now,
            is_resumed=run.checkpoint is not None,
        )
        records.arithmetic = self.federation.realization_digest.hex()
        if run.checkpoint is None:
            records.note_version()
        self._dual_window = DualWindow.of(config)
        self._rate = Rate()
        checkpointing = None
        if run.store is not None:
            checkpointing = Checkpointing(run.store, records, vector, config.server.checkpoint_every)
        recorder = _recorder(run, now)
        traced = tracing("afl-server")
        traces = None if traced is None else RoundTraces(traced, self.federation)
        self.shell = Shell(
            self.federation, records, checkpointing, self._dual_window, recorder, traces=traces
        )
        if run.checkpoint is not None:
            assert checkpointing is not None
            with content_named(StorageError, unusable(records.directory / STATE_FOLDER)):
                moment = checkpointing.restore(run.checkpoint, self.federation.engine)
                for wanted in self.federation.resume(moment, self._since(checkpointing)):
                    self.shell.carry_out_now(wanted)

    def _since(self, checkpointing: Checkpointing) -> Iterator[tuple[float, Outcome, Moment]]:
        """The outcomes since the checkpoint."""
        for entry in self.run.entries:
            checkpointing.replayed(entry)
            yield time.monotonic(), entry.outcome, Moment.of_values(entry.values)

    def status(self) -> dict[str, Any]:
        """The run now, for the live view."""
        return run_status(self.federation.snapshot(), self._dual_window, self.run.records.history, self._rate)

    def sources(self, strangers: Callable[[], Strangers]) -> Sources:
        """What pages are made from."""
        history = self.run.records.history
        assert history is not None
        return Sources(
            snapshot=self.federation.snapshot,
            certificate_expiry=lambda: self._authentication.expiry,
            history=history,
            dual_window=self._dual_window,
            events=self._recent,
            sites=self.run.records.sites,
            strangers=strangers,
            rate=self._rate,
        )

    def announce(self, port: int, http: HttpServer | None) -> None:
        """Say what runs, and where it listens."""
        run = self.federation.description
        LOG.info(
            "run %s: %s on %s with %d workers, %d trainable parameters; listening on %s (%s)%s",
            run.run_id,
            run.algorithm,
            run.task,
            run.workers,
            run.dim,
            Address(self.run.config.server.listen.host, port),
            self._authentication.description,
            f", {self.run.config.server.page_scheme} on port {http.port}" if http else "",
            extra=log_events.Listening(
                run_id=run.run_id,
                port=port,
                http_port=http.port if http else None,
                version=__version__,
                dim=run.dim,
                directory=run.directory,
            ).extra,
        )
        for advice in advice_on(self.run.config):
            LOG.warning("%s", advice, extra=log_events.ConfigurationAdvice(key=advice.key).extra)


def _recorder(run: OpenRun, now: float) -> Recorder | None:
    """Where the environment asks for it."""
    path = os.environ.get(RECORDING)
    if not path:
        return None
    try:
        Path(path).touch(mode=OWNER_ONLY)
        return Recorder(
            Path(path).open("w", encoding="utf-8", buffering=1),
            run_id=run.records.run_id,
            config=dump_config(run.config),
            began_at=now,
            is_resumed=run.checkpoint is not None,
        )
    except OSError as error:
        raise ConfigError(f"{RECORDING}: {path} cannot be written: {error.strerror}") from error


def _leave_signals(handler: signal.Handlers) -> None:
    """From now on the loop takes no signal that asks to stop."""
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, handler)


def _conclude(
    run: OpenRun,
    federation: Federation,
    code: ExitCode,
    reason: str,
    *,
    recent: RecentEvents,
    live: bool,
    can_resume: bool,
) -> ExitCode:
    """Write the summary and say how the run ended; returns the exit code."""
    records = run.records
    try:
        summary = records.summarize(code, reason, federation.seconds, federation.counters)
    except StorageError as error:
        if code is not ExitCode.STORAGE:
            reason = f"{reason}; {error}"
        code = ExitCode.STORAGE if code is ExitCode.OK else code
        LOG.error("%s", reason, extra=log_events.RunOver(code=int(code), summary=None).extra)  # noqa: TRY400
        return code
    finally:
        run.close()
    LOG.info("%s", reason, extra=log_events.RunOver(code=int(code), summary=summary).extra)
    if can_resume:
        LOG.info(
            "to resume the run: afl-server --resume %s",
            as_argument(records.directory),
            extra=log_events.CanGoOn(directory=str(records.directory)).extra,
        )
    recent.keep(records.directory / EVENTS_FILE)
    if live:
        print_summary(summary, records.directory, records.sites)
    return code


async def _stay_finished(config: Config) -> ExitCode:
    """Where the run had ended before this process began: pages for probes, until asked to end."""
    with contextlib.ExitStack() as stack:
        if config.server.http is not None:
            certificate = PageCertificate.of(config.server)
            context = None if certificate is None else certificate.context
            stack.callback(FinishedPages(config.server.http, "server.http", context).close)
        asked_to_end = asyncio.Event()
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, asked_to_end.set)
        await _stay(asked_to_end)
    return ExitCode.OK


async def _stay(asked_to_end: asyncio.Event) -> None:
    LOG.info("nothing is left to do; waiting to be stopped (--stay)", extra=log_events.Staying().extra)
    await asked_to_end.wait()


async def _until_over(parts: _Parts, asked_to_end: asyncio.Event, *, live: bool) -> tuple[ExitCode, str]:
    shell = parts.shell

    def stop(name: str) -> None:
        # A second signal ends the process at once.
        _leave_signals(signal.SIG_DFL)
        asked_to_end.set()
        shell.deliver(events.StopAsked(f"the server was stopped by {name}"))

    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop, number.name)
    # What is there by now stays: the collector need not look at it again in every round.
    gc.collect()
    gc.freeze()
    watch = asyncio.create_task(_watch_directory(parts))
    try:
        async with live_view(parts.status) if live else contextlib.nullcontext():
            return await asyncio.shield(shell.result)
    finally:
        watch.cancel()


def quarantine_text(directory: Path) -> str | None:
    """What the operator has written into the file of workers to be left out; empty where there is none, and
    ``None`` where it cannot be read, is no plain file, or is far longer than ids are."""
    try:
        with plain_file(directory / QUARANTINE_FILE) as file:
            data = file.read(_MOST_QUARANTINE + 1)
    except FileNotFoundError:
        return ""
    except OSError:
        return None
    return data.decode("utf-8", "replace") if len(data) <= _MOST_QUARANTINE else None


async def _watch_directory(parts: _Parts) -> None:
    records, shell = parts.run.records, parts.shell
    quarantine: str | None = ""
    # Of a run that is resumed, the file may be gone.
    is_due = bool(parts.federation.engine.quarantined)
    while not shell.result.done():
        reason = records.lost()
        text = quarantine_text(records.directory)
        if is_due or text != quarantine:
            quarantine, is_due = text, False
            shell.deliver(events.QuarantineChanged(text))
        if reason:
            shell.deliver(events.StopAsked(reason, ExitCode.STORAGE, is_final=True))
        await asyncio.sleep(DIRECTORY_CHECK_S)
