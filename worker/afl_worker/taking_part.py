"""A worker's process from its first connection to its exit code."""

from __future__ import annotations

import logging
import signal
from types import FrameType

from afl.config.address import Address
from afl.daemon import events
from afl.errors import AflError, ExitCode
from afl.user_code import worth_tracing
from afl_worker.http import WorkerPages
from afl_worker.options import STOP_SIGNALS, WorkerOptions
from afl_worker.runtime import WorkerProcess

LOG = logging.getLogger("afl.worker")


class _InterruptedError(BaseException):
    """A signal asked the process to end.

    No ``Exception``: it is not the task's, and passes what catches those.
    """


def take_part(options: WorkerOptions, http: Address | None, *, stays: bool) -> ExitCode:
    """Take part in a run until it is over; returns the exit code.

    Args:
        http: where to serve pages for probes.
        stays: wait for a signal once the run is complete.

    Raises:
        ConfigError: if there is no such device.
    """
    process = WorkerProcess(options)
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    pages: WorkerPages | None = None
    try:
        if http is not None:
            pages = WorkerPages(process, http)
        reason = process.run()
        LOG.info("%s", reason, extra=events.Ended(code=0).extra)
        if stays:
            _wait_for_a_signal()
    except AflError as error:
        LOG.error(  # noqa: TRY400  # the traceback is shown where it says more than the message
            "%s", error, extra=events.Ended(code=int(error.exit_code)).extra, exc_info=worth_tracing(error)
        )
        return error.exit_code
    except _InterruptedError as error:
        if process.is_over:
            return ExitCode.OK
        LOG.warning("stopped by %s", error, extra=events.Ended(code=int(ExitCode.INTERRUPTED)).extra)
        process.leave(f"stopped by {error}")
        return ExitCode.INTERRUPTED
    finally:
        if pages is not None:
            pages.close()
    return ExitCode.OK


def _wait_for_a_signal() -> None:
    LOG.info("nothing is left to do; waiting to be stopped (--stay)", extra=events.Staying().extra)
    while True:
        signal.pause()


def _interrupt(number: int, _frame: FrameType | None) -> None:
    # A second signal, of either kind, ends the process at once.
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    raise _InterruptedError(signal.Signals(number).name)
