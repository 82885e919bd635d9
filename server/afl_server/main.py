"""``afl-server``: run one federation."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from afl import events
from afl._version import __version__
from afl.cli.display import can_redraw
from afl.cli.parser import common_options, make_parser, stay_option
from afl.config import Config, load_config
from afl.config.address import Address, check_plaintext
from afl.config.document import help_text
from afl.errors import AddressError, AflError, ExitCode, RunCompleteError, StorageError
from afl.initialization import build_vector
from afl.logs import set_up_logs
from afl.randomness import SharedRandomness
from afl.tasks.registry import load_task
from afl.tracking.following import Following, status_of
from afl.tracking.registry import load_trackers
from afl_server.coordinator import Coordinator
from afl_server.gate import Gate
from afl_server.http import FinishedPages, HttpServer
from afl_server.opening import OpenRun, open_run, stored_config
from afl_server.progress import LiveView, print_summary
from afl_server.recent_events import RecentEvents
from afl_server.service import FederationService

LOG = logging.getLogger("afl.server")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

DIRECTORY_CHECK_S = 2.0
"""Between two looks at whether the run directory is still there: files that are open outlive their names."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = make_server_parser()
    options = parser.parse_args(arguments)
    if options.help_config:
        print(help_text())  # noqa: T201
        return ExitCode.OK
    if (options.config is None) == (options.resume is None):
        parser.error(
            "--config FILE is needed (deploy/server.yaml is an example; --help-config has every key), or "
            "--resume DIR to go on with a run"
        )
    set_up_logs(level=options.log_level, as_json=options.json_logs)
    try:
        if options.resume is not None:
            config = stored_config(options.resume, options.set)
        else:
            config = load_config(options.config, options.set)
        try:
            return asyncio.run(_run(config, live=options.live, stays=options.stay))
        except RunCompleteError as error:
            if not options.stay:
                raise
            LOG.info("%s", error, extra=events.RunComplete().extra)
            return asyncio.run(_stay_finished(config))
    except AflError as error:
        print(f"afl-server: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code


def make_server_parser() -> argparse.ArgumentParser:
    """The parser of its command line."""
    parser = make_parser(
        "afl-server",
        "Run one federation: wait for the workers, train the model for its worst worker, write the results.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the run's configuration (YAML)")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go on with the run in this directory, with its own configuration",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, for example --set algorithm.rounds=500; may be repeated",
    )
    parser.add_argument("--help-config", action="store_true", help="describe every key and exit")
    parser.add_argument(
        "--live",
        action=argparse.BooleanOptionalAction,
        default=can_redraw(),
        help="show live progress (default: where standard output is a terminal)",
    )
    stay_option(parser)
    common_options(parser)
    return parser


async def _run(config: Config, *, live: bool, stays: bool) -> ExitCode:
    # From the beginning: what going on with a run has to say is said before anything is served.
    with RecentEvents() as recent:
        return await _run_watched(config, recent, live=live, stays=stays)


async def _run_watched(config: Config, recent: RecentEvents, *, live: bool, stays: bool) -> ExitCode:
    if config.server.tls is None:
        check_plaintext(config.server.listen, insecure=config.server.insecure)
    gate = Gate(config.server)
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
                loop = asyncio.get_running_loop()
                http = HttpServer(coordinator, config.server.http, recent, loop)
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
        code = _conclude(run, coordinator, code, reason, live=live)
        await asyncio.to_thread(following.end, status_of(code, can_go_on=coordinator.can_go_on))
        if stays and code is ExitCode.OK:
            _announce_staying()
            await asked_to_end.wait()
    finally:
        if http is not None:
            http.close()
    return code


def _conclude(run: OpenRun, coordinator: Coordinator, code: ExitCode, reason: str, *, live: bool) -> ExitCode:
    """Write the summary and say how the run ended; returns the exit code."""
    records = run.records
    try:
        summary = records.summarize(
            code=code,
            reason=reason,
            seconds=coordinator.seconds,
            up=coordinator.tallies.uplink,
            down=coordinator.tallies.downlink,
            uncompressed=coordinator.tallies.uncompressed_bytes,
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
            async with LiveView(coordinator):
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
            f"workers {', '.join(map(str, missing))} did not join within server.start_timeout ({limit})",
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
