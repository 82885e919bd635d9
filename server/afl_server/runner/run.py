"""A server's process from its configuration to its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from afl._version import __version__
from afl.config import Config, dump_config
from afl.config.address import Address
from afl.core.randomness import SharedRandomness
from afl.daemon import events as log_events
from afl.daemon.descriptors import raise_limit
from afl.errors import AddressError, ConfigError, ExitCode, RunCompleteError, StorageError
from afl.runs.tracking.following import Following, status_of
from afl.runs.tracking.tracker import load_trackers
from afl_server.federation import events
from afl_server.federation.counters import Moment
from afl_server.federation.machine import Federation
from afl_server.network.authentication import Authentication
from afl_server.network.service import FederationService
from afl_server.pages.dual_window import DualWindow
from afl_server.pages.http import FinishedPages, HttpServer
from afl_server.pages.page_data import Sources
from afl_server.pages.recent_events import RecentEvents
from afl_server.pages.status import live_view, print_summary, run_status
from afl_server.runner.build import build
from afl_server.runner.recording import Beginning, Recorder
from afl_server.runner.shell import Shell
from afl_server.storage.checkpointing import Checkpointing
from afl_server.storage.records import RunRecords
from afl_server.storage.run_directory import OpenRun, open_run
from afl_server.storage.store import Checkpoint

LOG = logging.getLogger("afl.server")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

RECORDING = "AFL_RECORDING"
"""The environment variable that names a file in which to write down every event (CONTRIBUTING.md)."""

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
        return asyncio.run(_run(config, authentication, live=live, stays=stays))
    except RunCompleteError as error:
        if not stays:
            raise
        LOG.info("%s", error, extra=log_events.RunComplete().extra)
        return asyncio.run(_stay_finished(config))


async def _run(config: Config, authentication: Authentication, *, live: bool, stays: bool) -> ExitCode:
    # From the beginning: what going on with a run has to say is said before anything is served.
    with RecentEvents() as recent:
        return await _run_watched(config, authentication, recent, live=live, stays=stays)


async def _run_watched(
    config: Config, authentication: Authentication, recent: RecentEvents, *, live: bool, stays: bool
) -> ExitCode:
    trackers = load_trackers(config.run.trackers)
    run = open_run(config, int.from_bytes(SharedRandomness.fresh().seed, "little"))
    try:
        shown = _Shown(run, authentication, recent)
    except BaseException:
        run.discard()
        raise
    config, shell, federation = run.config, shown.shell, shown.federation
    service = FederationService(
        config.server, authentication, federation.run.run_id, federation.counters, shell.deliver
    )
    shell.streams = service.carry_out
    http: HttpServer | None = None
    asked_to_end = asyncio.Event()
    try:
        try:
            await service.start(config.server.listen)
            if config.server.http is not None:
                http = HttpServer(config.server.http, shown.sources(), asyncio.get_running_loop())
            await shell.begin()
            following = Following(trackers, federation.run.run_id, run.records.directory, config)
            following.start()
            _announce(shown, service.port, http)
            code, reason = await _until_over(shown, asked_to_end, live=live)
            await shell.released.wait()
            await shell.close()
        except AddressError:
            run.discard()
            raise
        finally:
            await service.stop()
        if code is ExitCode.OK and not stays:
            _ignore_signals()
        code = _conclude(run, federation, code, reason, live=live)
        ending = federation.ending
        can_go_on = ending is not None and ending.can_resume
        await asyncio.to_thread(following.end, status_of(code, can_go_on=can_go_on))
        if stays and code is ExitCode.OK:
            _announce_staying()
            await asked_to_end.wait()
    finally:
        if http is not None:
            http.close()
    return code


class _Shown:
    """A run's parts, made or put back."""

    def __init__(self, run: OpenRun, authentication: Authentication, recent: RecentEvents) -> None:
        self.run = run
        self.authentication = authentication
        self._recent = recent
        config, now = run.config, time.monotonic()
        is_durable = run.store is not None
        self.federation, vector = build(
            config,
            run.records.run_id,
            run.records.directory,
            run.records.ranking,
            is_durable=is_durable,
            now=now,
        )
        self._dual_window = DualWindow.of(config)
        checkpointing = None
        if run.store is not None:
            every = config.server.checkpoint_every
            checkpointing = Checkpointing(run.store, run.records, vector, every)
        self.shell = Shell(
            self.federation, run.records, checkpointing, self._dual_window, self._recorder(now)
        )
        if run.checkpoint is not None:
            assert checkpointing is not None
            self._resume(checkpointing, run.checkpoint)

    def _resume(self, checkpointing: Checkpointing, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint and the outcomes since, before any session."""
        federation, count = self.federation, 0
        federation.resume(checkpointing.restore(checkpoint, federation.engine))
        for entry in self.run.entries:
            moment = Moment.of_values(entry.values)
            checkpointing.replayed(entry)
            self.shell.carry_out_now(federation.replay(entry.outcome, moment, time.monotonic()))
            count += 1
        self.shell.carry_out_now(federation.resumed(count))

    def _recorder(self, now: float) -> Recorder | None:
        """Where the environment asks for it."""
        path = os.environ.get(RECORDING)
        if not path:
            return None
        run = self.run
        beginning = Beginning(
            run.records.run_id,
            dump_config(run.config),
            is_durable=run.store is not None,
            is_resumed=run.checkpoint is not None,
            began_at=now,
        )
        try:
            return Recorder(Path(path).open("w", encoding="utf-8", buffering=1), beginning)
        except OSError as error:
            raise ConfigError(f"{RECORDING}: {path} cannot be written: {error.strerror}") from error

    def status(self) -> dict[str, Any]:
        """The run now, for the live view."""
        return run_status(self.federation.snapshot(), self._dual_window)

    def sources(self) -> Sources:
        """What pages are made from."""
        history = self.run.records.history
        assert history is not None
        return Sources(
            snapshot=self.federation.snapshot,
            certificate_expiry=lambda: self.authentication.expiry,
            history=history,
            dual_window=self._dual_window,
            events=self._recent,
        )


def _ignore_signals() -> None:
    """What is left takes no time, and a run that is complete has one exit code."""
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _conclude(run: OpenRun, federation: Federation, code: ExitCode, reason: str, *, live: bool) -> ExitCode:
    """Write the summary and say how the run ended; returns the exit code."""
    records, counters = run.records, federation.counters
    try:
        summary = records.summarize(
            code=code,
            reason=reason,
            seconds=federation.seconds,
            up=counters.uplink,
            down=counters.downlink,
            uncompressed=counters.uncompressed_bytes,
        )
    except StorageError as error:
        if code is not ExitCode.STORAGE:
            reason = f"{reason}; {error}"
        code = ExitCode.STORAGE if code is ExitCode.OK else code
        LOG.error("%s", reason, extra=log_events.RunOver(code=int(code), summary=None).extra)  # noqa: TRY400
        return code
    finally:
        run.close()
    LOG.info("%s", reason, extra=log_events.RunOver(code=int(code), summary=summary).extra)
    if federation.ending is not None and federation.ending.can_resume:
        LOG.info(
            "to resume the run: afl-server --resume %s",
            records.directory,
            extra=log_events.CanGoOn(directory=str(records.directory)).extra,
        )
    if live:
        print_summary(summary, records.directory)
    return code


async def _stay_finished(config: Config) -> ExitCode:
    """Where the run had ended before this process began: pages for probes, until asked to end."""
    pages = None if config.server.http is None else FinishedPages(config.server.http, "server.http")
    asked_to_end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, asked_to_end.set)
    try:
        _announce_staying()
        await asked_to_end.wait()
    finally:
        if pages is not None:
            pages.close()
    return ExitCode.OK


def _announce_staying() -> None:
    LOG.info("nothing is left to do; waiting to be stopped (--stay)", extra=log_events.Staying().extra)


def _announce(shown: _Shown, port: int, http: HttpServer | None) -> None:
    config, run = shown.run.config, shown.federation.run
    listen = Address(config.server.listen.host, port)
    LOG.info(
        "run %s: %s on %s with %d workers, %d trainable parameters; listening on %s (%s)%s",
        run.run_id,
        run.algorithm,
        run.task,
        run.workers,
        run.dim,
        listen,
        shown.authentication.description,
        f", http on port {http.port}" if http else "",
        extra=log_events.Listening(
            run_id=run.run_id,
            port=port,
            http_port=http.port if http else None,
            version=__version__,
            dim=run.dim,
            directory=str(run.directory),
        ).extra,
    )


async def _until_over(shown: _Shown, asked_to_end: asyncio.Event, *, live: bool) -> tuple[ExitCode, str]:
    loop, shell = asyncio.get_running_loop(), shown.shell

    def stop(name: str) -> None:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
            # A second signal ends the process at once.
            signal.signal(number, signal.SIG_DFL)
        asked_to_end.set()
        shell.deliver(events.StopAsked(f"the server was stopped by {name}"))

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number.name)
    # What is there by now stays: the collector need not look at it again in every round.
    gc.collect()
    gc.freeze()
    watch = asyncio.create_task(_watch_directory(shown.run.records, shell))
    try:
        if live:
            async with live_view(shown.status):
                return await asyncio.shield(shell.result)
        return await asyncio.shield(shell.result)
    finally:
        watch.cancel()


async def _watch_directory(records: RunRecords, shell: Shell) -> None:
    while not shell.result.done():
        reason = records.lost()
        if reason:
            shell.deliver(events.AbortAsked(reason, ExitCode.STORAGE))
        await asyncio.sleep(DIRECTORY_CHECK_S)
