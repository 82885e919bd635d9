"""A worker's process: signals, pages, and how the run's end becomes an exit code."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from afl.config.address import Address
from afl.daemon import events
from afl.daemon.logs import Naming
from afl.daemon.tracing import tracing
from afl.errors import ExitCode, SignalError
from afl.paths import naming_paths
from afl.tasks.registry import check_task
from afl.terminal.children import comes_again, end_children, let_come_again
from afl.user_code import as_failure, worth_tracing
from afl_worker.journal import check_folder
from afl_worker.options import DEFAULT_JOURNAL, STOP_SIGNALS, WorkerOptions
from afl_worker.pages import WorkerPages
from afl_worker.runtime import Runtime

LOG = logging.getLogger("afl.worker")


def take_part(options: WorkerOptions, http: Address | None, *, stays: bool) -> ExitCode:
    """Take part in a run until it is over; returns the exit code.

    Args:
        http: where to serve pages for probes and Prometheus.
        stays: wait for a signal once the run is complete.

    Raises:
        ConfigError: if there is no such device or task.
        StorageError: if the folder for journals, which somebody has named, cannot be used.
    """
    if options.journal != DEFAULT_JOURNAL:
        check_folder(options.journal)
    if options.task is not None:
        check_task(options.task)
    traced = tracing("afl-worker")
    runtime = Runtime(options, traced)
    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)
    let_come_again(SignalError, interrupt)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_watching_exits())
        naming = Naming(dict(zip(options.workers, options.sites, strict=False)))
        LOG.addFilter(naming)
        stack.callback(LOG.removeFilter, naming)
        if traced is not None:
            stack.callback(traced.close)
        stack.callback(runtime.close)
        try:
            if http is not None:
                stack.callback(WorkerPages(runtime, options, http).close)
            with naming_paths():
                reason = runtime.run_all()
            LOG.info("%s", reason, extra=events.Ended(code=0).extra)
            if stays:
                staying = events.Staying()
                LOG.info("nothing is left to do; waiting to be stopped (--stay)", extra=staying.extra)
                while True:
                    signal.pause()
        except Exception as raised:  # a helper's end, for one, is raised wherever we are
            error = as_failure(raised)
            event = events.Ended(code=int(error.exit_code))
            # The traceback is shown where it says more than the message.
            LOG.error("%s", error, extra=event.extra, exc_info=worth_tracing(error))  # noqa: TRY400
            return error.exit_code
        except SignalError as error:
            if not runtime.is_over:
                LOG.warning("stopped by %s", error, extra=events.Ended(code=int(ExitCode.INTERRUPTED)).extra)
                runtime.leave(f"stopped by {error}")
                return ExitCode.INTERRUPTED
    return ExitCode.OK


def interrupt(number: int, _frame: FrameType | None) -> None:
    """Raise :class:`SignalError`, once."""
    if comes_again(number):
        return
    # A second signal, of either kind, ends the process at once.
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    end_children()
    raise SignalError(signal.Signals(number).name)


@contextlib.contextmanager
def _watching_exits() -> Iterator[None]:
    """Whatever calls ``os._exit(0)`` in this process meanwhile is a task's code, or what that uses: the run
    is not complete then. Processes forked from this one end as they please."""
    own = os.getpid()

    def leave(status: int) -> NoReturn:
        if status == 0 and os.getpid() == own:
            status = ExitCode.CONFIG
            frame = inspect.stack()[1]
            LOG.error(
                "%s:%d ended this process with os._exit(0) before the run was over; a task must not",
                frame.filename,
                frame.lineno,
                extra=events.Ended(code=int(status)).extra,
            )
        end(status)

    end, os._exit = os._exit, leave
    try:
        yield
    finally:
        os._exit = end
