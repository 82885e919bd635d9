"""Whose line an exception comes from: the user's, where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from afl.errors import AflError, ExitCode, TaskCodeError
from afl.user_code import users_line
from afl_lab.check.findings import Level, Report


class StoppedError(Exception):
    """A check cannot go on; why is in the report."""


@contextlib.contextmanager
def blaming(report: Report, where: str) -> Iterator[None]:
    """Turn what a task's code raises into an error of the report.

    Raises:
        StoppedError: if it raises anything.
    """
    try:
        yield
    except StoppedError:
        raise
    except (Exception, SystemExit) as caught:  # noqa: BLE001  # a task's own code may raise anything
        error = caught.__cause__ if isinstance(caught, TaskCodeError) else caught
        assert error is not None
        if isinstance(error, AflError):
            report.add(Level.ERROR, where, str(error), code=error.exit_code)
            raise StoppedError from error
        line = users_line(error)
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        advice = f"{line[1]!r} raised it" if line else ""
        report.add(Level.ERROR, f"{line[0]}, {where}" if line else where, what, advice, code=ExitCode.CONFIG)
        raise StoppedError from error
