"""A server's process from its configuration to its exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal

from afl._version import __version__
from afl.config import Config
from afl.config.address import Address
from afl.core.randomness import SharedRandomness
from afl.daemon import events
from afl.daemon.descriptors import raise_limit
from afl.errors import AddressError, ExitCode, RunCompleteError, StorageError
from afl.runs.tracking.following import Following, status_of
from afl.runs.tracking.registry import load_trackers
from afl.security.identity import WorkerIds
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl_server.coordinator import Coordinator
from afl_server.network.authentication import Gate
from afl_server.network.service import FederationService
from afl_server.pages.http import FinishedPages, HttpServer
from afl_server.pages.page_data import Sources
from afl_server.pages.recent_events import RecentEvents
from afl_server.pages.status import live_view, print_summary, run_status
from afl_server.snapshot_adapter import description_of, snapshot_of
from afl_server.storage.run_directory import OpenRun, open_run

LOG = logging.getLogger("afl.server")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

DIRECTORY_CHECK_S = 2.0
"""Between two looks at whether the run directory is still there: files that are open outlive their names."""


def run(config: Config, gate: Gate, *, live: bool, stays: bool) -> ExitCode:
    """Run the federation, or go on with it, until it is over; returns the exit code.

    Args:
        live: show progress on the terminal.
        stays: wait for a signal once the run is complete.

    Raises:
        RunCompleteError: if there is nothing left to do, and it is not to stay.
        AflError: if the run cannot begin.
    """
    raise_limit()
    try:
        return asyncio.run(_run(config, gate, live=live, stays=stays))
    except RunCompleteError as error:
        if not stays:
            raise
        LOG.info("%s", error, extra=events.RunComplete().extra)
        return asyncio.run(_stay_finished(config))


async def _run(config: Config, gate: Gate, *, live: bool, stays: bool) -> ExitCode:
    # From the beginning: what going on with a run has to say is said before anything is served.
    with RecentEvents() as recent:
        return await _run_watched(config, gate, recent, live=live, stays=stays)


async def _run_watched(
    config: Config, gate: Gate, recent: RecentEvents, *, live: bool, stays: bool
) -> ExitCode:
    trackers = load_trackers(config.run.trackers)
    run = open_run(config, int.from_bytes(SharedRandomness.fresh().seed, "little"))
    config = run.config
    try:
        assert config.run.seed is not None
        randomness = SharedRandomness.from_int(config.run.seed)
        task = load_task(config.task.name, config.task.options, allow_path=True)
        vector = build_vector(task, randomness)
        coordinator = Coordinator(run, vector, randomness, task.local_options, gate)
        if run.checkpoint is not None:
            coordinator.go_on(run.checkpoint, run.entries)
    except BaseException:
        run.discard()
        raise
    service = FederationService(coordinator)
    http: HttpServer | None = None
    asked_to_end = asyncio.Event()
    try:
        try:
            await service.start(config.server.listen)
            if config.server.http is not None:
                http = HttpServer(
                    config.server.http, _sources(coordinator, recent), asyncio.get_running_loop()
                )
            await coordinator.start()
            following = Following(trackers, coordinator.run_id, run.records.directory, config)
            following.start()
            _announce(coordinator, service.port, http)
            code, reason = await _until_over(coordinator, asked_to_end, live=live)
            await coordinator.farewell()
        except AddressError:
            run.discard()
            raise
        finally:
            await service.stop()
        if code is ExitCode.OK and not stays:
            _ignore_signals()
        code = _conclude(run, coordinator, code, reason, live=live)
        await asyncio.to_thread(following.end, status_of(code, can_go_on=coordinator.can_go_on))
        if stays and code is ExitCode.OK:
            _announce_staying()
            await asked_to_end.wait()
    finally:
        if http is not None:
            http.close()
    return code


def _ignore_signals() -> None:
    """What is left takes no time, and a run that is complete has one exit code."""
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _conclude(run: OpenRun, coordinator: Coordinator, code: ExitCode, reason: str, *, live: bool) -> ExitCode:
    """Write the summary and say how the run ended; returns the exit code."""
    records = run.records
    try:
        summary = records.summarize(
            code=code,
            reason=reason,
            seconds=coordinator.seconds,
            up=coordinator.counters.uplink,
            down=coordinator.counters.downlink,
            uncompressed=coordinator.counters.uncompressed_bytes,
        )
    except StorageError as error:
        if code is not ExitCode.STORAGE:
            reason = f"{reason}; {error}"
        code = ExitCode.STORAGE if code is ExitCode.OK else code
        LOG.error("%s", reason, extra=events.RunOver(code=int(code), summary=None).extra)  # noqa: TRY400
        return code
    finally:
        run.close()
    LOG.info("%s", reason, extra=events.RunOver(code=int(code), summary=summary).extra)
    if coordinator.can_go_on:
        LOG.info(
            "to go on with the run: afl-server --resume %s",
            records.directory,
            extra=events.CanGoOn(directory=str(records.directory)).extra,
        )
    if live:
        print_summary(summary, records.directory)
    return code


async def _stay_finished(config: Config) -> ExitCode:
    """Where the run had ended before this process began: pages for probes, until asked to end."""
    pages = None if config.server.http is None else FinishedPages(config.server.http)
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


def _sources(coordinator: Coordinator, events: RecentEvents) -> Sources:
    run, history = description_of(coordinator), coordinator.records.history
    assert history is not None
    return Sources(
        snapshot=lambda: snapshot_of(coordinator, run),
        certificate_expiry=lambda: coordinator.gate.expiry,
        history=history,
        dual_window=coordinator.dual_window,
        events=events,
    )


def _announce_staying() -> None:
    LOG.info("nothing is left to do; waiting to be stopped (--stay)", extra=events.Staying().extra)


def _announce(coordinator: Coordinator, port: int, http: HttpServer | None) -> None:
    config = coordinator.config
    listen = Address(config.server.listen.host, port)
    LOG.info(
        "run %s: %s on %s with %d workers, %d trainable parameters; listening on %s (%s)%s",
        coordinator.run_id,
        config.algorithm.name,
        config.task.name,
        config.workers,
        coordinator.vector.dim,
        listen,
        coordinator.gate.description,
        f", http on port {http.port}" if http else "",
        extra=events.Listening(
            run_id=coordinator.run_id,
            port=port,
            http_port=http.port if http else None,
            version=__version__,
            dim=coordinator.vector.dim,
            directory=str(coordinator.records.directory),
        ).extra,
    )


async def _until_over(
    coordinator: Coordinator, asked_to_end: asyncio.Event, *, live: bool
) -> tuple[ExitCode, str]:
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
            # A second signal ends the process at once.
            signal.signal(number, signal.SIG_DFL)
        asked_to_end.set()
        coordinator.stop(f"the server was stopped by {name}")

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number.name)
    # What is there by now stays: the collector need not look at it again in every round.
    gc.collect()
    gc.freeze()
    watches = [
        asyncio.create_task(watch(coordinator)) for watch in (_start_timeout, _give_up, _directory_watch)
    ]
    try:
        if live:
            run = description_of(coordinator)
            async with live_view(lambda: run_status(snapshot_of(coordinator, run), coordinator.dual_window)):
                return await asyncio.shield(coordinator.result)
        return await asyncio.shield(coordinator.result)
    finally:
        for watch in watches:
            watch.cancel()


async def _start_timeout(coordinator: Coordinator) -> None:
    limit = coordinator.config.server.start_timeout
    if limit is None:
        return
    await asyncio.sleep(limit)
    missing = coordinator.roster.missing()
    if missing and coordinator.records.round is None:
        coordinator.abort(
            ExitCode.ABORTED,
            f"{WorkerIds.of(missing).named} did not join within server.start_timeout ({limit}); "
            "start them first, or allow more time",
        )


async def _give_up(coordinator: Coordinator) -> None:
    limit = coordinator.config.server.give_up_after
    if limit is None:
        return
    while (left := limit - coordinator.roster.alone_for) > 0:  # noqa: ASYNC110  # how long is known
        await asyncio.sleep(left)
    coordinator.stop(f"no worker had a session for server.give_up_after ({limit})", ExitCode.LOST_WORKERS)


async def _directory_watch(coordinator: Coordinator) -> None:
    while not coordinator.is_over:
        reason = coordinator.records.lost()
        if reason:
            coordinator.abort(ExitCode.STORAGE, reason)
        await asyncio.sleep(DIRECTORY_CHECK_S)
