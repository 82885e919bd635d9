"""Whose line an exception comes from: the user's, where there is one."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import afl
from afl.errors import AflError, ExitCode
from afl_lab.check.findings import Level, Report

_OURS = (Path(afl.__file__).parent, Path(__file__).parents[1])
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


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
    except AflError as error:
        report.add(Level.ERROR, where, str(error), code=error.exit_code)
        raise StoppedError from error
    except (Exception, SystemExit) as error:
        line = users_line(error)
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        advice = f"{line[1]!r} raised it" if line else ""
        report.add(Level.ERROR, f"{line[0]}, {where}" if line else where, what, advice, code=ExitCode.CONFIG)
        raise StoppedError from error


def users_line(error: BaseException) -> tuple[str, str] | None:
    """``file.py:12, in data`` and the text of the innermost line that is neither ours nor of a library."""
    while error.__cause__ is not None and isinstance(error, AflError):
        error = error.__cause__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(Path(error.filename))}:{error.lineno}", (error.text or "").strip()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(folder) for folder in (*_OURS, *_INSTALLED)):
            return f"{_shown(path)}:{frame.lineno}, in {frame.name}", (frame.line or "").strip()
    return None


def _shown(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
