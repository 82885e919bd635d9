"""A user's own code: how it is named on a command line, and what it raised, on which of its lines."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path, PurePath

from afl.errors import AflError, ConfigError, TaskCodeError

_OURS = ("afl", "afl_cli", "afl_server", "afl_worker", "afl_lab")
_CALLERS = ("dtypes.py", "initialization.py", "registry.py")
"""Beside the tasks that are ours: they call tasks, and are none."""

_LONGEST = 300
"""Characters of what was raised: libraries put whole lists into a message."""

SUFFIX = ".py"


def as_module_path(name: str) -> str:
    """``folder/file.py:Class`` as ``folder.file:Class``; any other name as it is.

    Raises:
        afl.ConfigError: if the file is not in or below the working directory, or no module can have its name.
    """
    file, _, attribute = name.rpartition(":")
    if not file.endswith(SUFFIX):
        return name
    here = Path.cwd()
    path = PurePath(here, file)
    if not path.is_relative_to(here) or ".." in path.parts:
        raise ConfigError(
            f"task {name}: {file} is not in or below the folder {here}, from which tasks are loaded; go to "
            f"its folder, and name it {path.name}:{attribute}"
        )
    parts = path.relative_to(here).with_suffix("").parts
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"task {name}: a module is named by letters, digits and underscores; rename {file} or its folder"
        )
    return f"{'.'.join(parts)}:{attribute}"


@contextlib.contextmanager
def calling(what: str) -> Iterator[None]:
    """Around a call of a task's own code.

    Args:
        what: what is called, for the message.

    Raises:
        TaskCodeError: from whatever it raises but an AflError, which says all itself.
    """
    try:
        yield
    except AflError:
        raise
    except SystemExit as error:
        raise TaskCodeError(
            f"{what} ends the program{_place(error)}; put what only a script does below "
            'if __name__ == "__main__":'
        ) from error
    except Exception as error:
        raise TaskCodeError(f"{what} raised {described(error)}") from error


def as_failure(error: Exception) -> AflError:
    """An error that a user can read, whatever was raised while a task's code ran."""
    try:
        with calling("the task's code"):
            raise error
    except AflError as failure:
        return failure


def described(error: BaseException) -> str:
    """What was raised, and on which of the user's lines: ``KeyError: 'age' (task.py:12, in data)``."""
    text = next(iter(str(error).splitlines()), "")
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return f"{type(error).__name__}{': ' * bool(text)}{text}{_place(error)}"


def users_line(error: BaseException) -> tuple[str, str] | None:
    """``file.py:12, in data`` and the text of the innermost line that is neither ours nor of a library."""
    while error.__cause__ is not None and isinstance(error, AflError):
        error = error.__cause__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(Path(error.filename))}:{error.lineno}", (error.text or "").strip()
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    others = [*_our_folders(), *libraries]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if os.path.isfile(path) and not any(path.is_relative_to(folder) for folder in others):  # noqa: PTH113
            return f"{_shown(path)}:{frame.lineno}, in {frame.name}", (frame.line or "").strip()
    return None


def worth_tracing(error: BaseException) -> BaseException | None:
    """What a task's code raised, with its traceback from the first line that is not ours on.

    ``None`` for an error whose message says all.
    """
    while not isinstance(error, TaskCodeError):
        if not isinstance(error.__cause__, AflError):
            return None
        error = error.__cause__
    raised = error.__cause__
    if raised is None or isinstance(raised, SystemExit):
        return None
    trace, ours = raised.__traceback__, _our_folders()
    while trace is not None and _is_ours(Path(trace.tb_frame.f_code.co_filename), ours):
        trace = trace.tb_next
    # Of a fault that is all ours, everything is worth showing.
    return raised if trace is None else raised.with_traceback(trace)


def _is_ours(path: Path, ours: list[Path]) -> bool:
    """Whether a line is of what calls tasks: not of a task that is ours, nor of a library."""
    if not os.path.isfile(path):  # noqa: PTH113  # Path.is_file may raise
        return True
    if path.is_relative_to(Path(__file__).parent / "tasks"):
        return path.name in _CALLERS
    return any(path.is_relative_to(folder) for folder in ours)


def _our_folders() -> list[Path]:
    loaded = [sys.modules[name].__file__ for name in _OURS if name in sys.modules]
    return [Path(file).parent for file in loaded if file is not None]


def _place(error: BaseException) -> str:
    line = users_line(error)
    return f" ({line[0]})" if line else ""


def _shown(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
