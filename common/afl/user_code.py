"""A user's own code: how it is named on a command line, and what it raised, on which of its lines."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import NoReturn

from afl.errors import (
    STOPS,
    AflError,
    ConfigError,
    HelperKilledError,
    InternalError,
    OutOfMemoryError,
    TaskCodeError,
)

_OURS = ("afl", "afl_cli", "afl_server", "afl_worker", "afl_lab")
_CALLERS = ("dtypes.py", "initialization.py", "registry.py")
"""Beside the tasks that are ours: they call tasks, and are none."""
_ORACLES = ("oracle.py", "batched.py")
"""What a library raises below their lines is about the task's loss, model or data."""

_NO_MEMORY = re.compile(
    r"out of memory|can(?:no|')t allocate (?!memory in static)|not enough memory|bad_alloc|ALLOC_FAILED"
    r"|insufficient shared memory|unable to (?:allocate shared memory|mmap)|failed to map segment"
    r"|can't start new thread",
    re.IGNORECASE,
)
"""How Python, torch, CUDA, the C library and its loader word it where they raise no MemoryError."""
_KILLED = re.compile(r"DataLoader worker \(pid.*\) (?:is killed by signal|exited unexpectedly$)")
"""torch's words for a DataLoader's process that is gone without an error of its own."""

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
        OutOfMemoryError: if memory runs out.
        HelperKilledError: if a process that it has started is killed.
    """
    try:
        with ending_forks():
            yield
    except STOPS:
        raise
    except BaseException as error:
        failure = as_failure(error, what)
        if failure is error:
            raise
        raise failure from error


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """Around a call of a task's own code: a process that it forks ends where it comes back from the call. It
    would go on as this one, with its connection and its journals."""
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            _end_fork(sys.exc_info()[1])


def _end_fork(error: BaseException | None) -> NoReturn:
    code: object = 1
    try:
        if isinstance(error, SystemExit):
            code = error.code or 0
        else:
            how = "returned" if error is None else f"raised {described(error)}"
            print(  # noqa: T201
                f"a process that the task's code forked has {how}, and is ended, since it would go on as its "
                "parent; let it end by os._exit, or make it with multiprocessing",
                file=sys.stderr,
            )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        # Also where it has closed what it would write to.
        os._exit(code if isinstance(code, int) else 1)


def as_failure(error: BaseException, what: str = "") -> AflError:
    """An error that a user can read.

    Args:
        what: the call of a task's own code that raised it, which is then to blame; by default whatever a
            step does, where whose line raised it decides.
    """
    if isinstance(error, AflError):
        return error
    called = what or "the task's code"
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        # Raised in a generator, where Python puts this in its place.
        error = error.__cause__
    failure: AflError | None
    if isinstance(error, SystemExit):
        advice = 'put what only a script does below if __name__ == "__main__":'
        failure = TaskCodeError(f"{called} ends the program{_place(error)}; {advice}")
    else:
        failure = shortage(error)
    if failure is None and (what or _is_of_task(error)):
        failure = TaskCodeError(f"{called} raised {described(error)}")
    if failure is None:
        failure = InternalError(f"afl itself failed: {described(error)}; a bug in afl: please report it")
    failure.__cause__ = error
    return failure


def shortage(error: BaseException) -> AflError | None:
    """What is to be said if memory ran out or a helper process was killed; ``None`` if it is neither."""
    what = described(error)
    seen: set[int] = set()  # of a circle of causes, too
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if _is_out_of_memory(cause):
            threads = " or of threads" * ("thread" in str(cause))
            return OutOfMemoryError(f"out of memory{threads}: {what}")
        if _is_of_killed(cause):
            return HelperKilledError(
                f"a helper process of the task's code was killed: {what}; the machine often does so for lack "
                "of memory: try fewer or smaller helpers (num_workers of a DataLoader)"
            )
        cause = cause.__cause__
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    # torch's own OutOfMemoryError, of a GPU, is a RuntimeError too.
    is_worded = isinstance(error, RuntimeError | OSError | ImportError)
    return isinstance(error, MemoryError) or (is_worded and _NO_MEMORY.search(text_of(error)) is not None)


def _is_of_killed(error: BaseException) -> bool:
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode < 0
    first = next(iter(text_of(error).splitlines()), "")
    is_pool = type(error).__name__ in {"BrokenProcessPool", "TerminatedWorkerError"}
    return is_pool or (isinstance(error, RuntimeError) and bool(_KILLED.search(first)))


def _is_of_task(error: BaseException) -> bool:
    """Whether a task's line raised it, or a library below the lines of ours that call tasks."""
    ours = _our_folders()
    innermost = None
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if any(path.is_relative_to(folder) for folder in ours):
            innermost = path
            if not _is_ours(path, ours):
                return True
        elif _is_users(path):
            return True
    return innermost is not None and innermost.name in {*_CALLERS, *_ORACLES}


def described(error: BaseException) -> str:
    """What was raised, and on which of the user's lines: ``KeyError: 'age' (task.py:12, in data)``."""
    text = next(iter(text_of(error).splitlines()), "")
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    return f"{type(error).__name__}{': ' * bool(text)}{text}{_place(error)}"


def text_of(error: BaseException) -> str:
    """What an error says; also of one whose ``__str__`` is the user's, and raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # a user's code may raise anything
        return "(its __str__ raises)"


def users_line(error: BaseException) -> tuple[str, str] | None:
    """``file.py:12, in data`` and the text of the innermost line that is neither ours nor of a library."""
    while error.__cause__ is not None and isinstance(error, AflError):
        error = error.__cause__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(Path(error.filename))}:{error.lineno}", (error.text or "").strip()
    ours = _our_folders()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if _is_users(path) and not any(path.is_relative_to(folder) for folder in ours):
            return f"{_shown(path)}:{frame.lineno}, in {frame.name}", (frame.line or "").strip()
    return None


def worth_tracing(error: BaseException) -> BaseException | None:
    """What a task's code raised, with its traceback from the first line that is not ours on.

    ``None`` for an error whose message says all.
    """
    while not isinstance(error, TaskCodeError | InternalError):
        if not isinstance(error.__cause__, AflError):
            return None
        error = error.__cause__
    raised = error.__cause__
    if raised is None or isinstance(raised, SystemExit):
        return None
    if isinstance(error, InternalError):
        return raised
    trace, ours = raised.__traceback__, _our_folders()
    while trace is not None and _is_ours(Path(trace.tb_frame.f_code.co_filename), ours):
        trace = trace.tb_next
    # Of a fault that is all ours, everything is worth showing.
    return raised if trace is None else raised.with_traceback(trace)


def is_all_ours(error: BaseException) -> bool:
    """Whether an error came to be without a line of a task's code, or of a library below one."""
    ours = _our_folders()
    return all(_is_ours(Path(frame.filename), ours) for frame in traceback.extract_tb(error.__traceback__))


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


def _is_users(path: Path) -> bool:
    """Whether it is a file of no library; also of those that another environment than this process's has."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    is_library = {"site-packages", "dist-packages"} & set(path.parts) or any(
        path.is_relative_to(folder) for folder in folders
    )
    return not is_library and os.path.isfile(path)  # noqa: PTH113


def _place(error: BaseException) -> str:
    line = users_line(error)
    return f" ({line[0]})" if line else ""


def _shown(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
