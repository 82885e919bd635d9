"""How every command begins, before anything large is imported, and how one ends that cannot go on."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import signal
import sys
import threading
import time
import traceback
from os import _exit  # a worker puts another in its place for tasks
from types import FrameType
from typing import NoReturn

from afl.errors import AflError, ExitCode
from afl.outside import lines
from afl.paths import begin_here, naming_paths
from afl.terminal.children import comes_again, end_children, let_come_again, prepare_forks
from afl.user_code import shortage, worth_tracing

_M_ARENA_MAX = -8
"""glibc's number for the most arenas (malloc.h)."""

_IMPORTING = "<frozen importlib._bootstrap>"

END_GRACE_S = 5.0
"""How long what a task's code has started may go on once the command is over, before it is left behind."""


def enter(program: str, module: str, *, needs_linux: bool = False) -> int:
    """Import the command and run its ``main``; returns the exit code.

    A Ctrl-C and a reader that has gone away (``| head``) end it in a line at most, whenever they come.
    Arguments that are not UTF-8 are refused: nothing that is written or sent could hold them.
    """
    # A descriptor that the shell closed (`>&-`) leaves None, which nothing can be written to.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    # The name of a folder may be no UTF-8, and a terminal's encoding may lack what we write: shown escaped.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    refusal = _refusal(needs_linux=needs_linux)
    if refusal:
        print(f"{program}: {refusal}", file=sys.stderr)
        return ExitCode.CONFIG
    # First of all: a container's first process has no default for a signal, and would not end.
    _take_signals(with_sigterm=needs_linux)
    prepare_forks()
    _set_up_memory(is_daemon=needs_linux)
    code = 1  # Python's, for an exception
    try:
        code = _run(program, module)
    finally:
        _end_soon(program, code)
    return code


def _run(program: str, module: str) -> int:
    # gRPC's core would write there past the log, and a line for each bad call of a stranger.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        with naming_paths():
            code: int = importlib.import_module(module).main()
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (`head`) has seen enough.
        code = ExitCode.OK
    except Exception as error:
        failure = error if isinstance(error, AflError) else shortage(error)
        if failure is None:
            raise
        code = failed(program, failure)
    else:
        return code
    # What is still buffered would fail again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _end_soon(program: str, code: int) -> None:
    """Python waits for threads and processes that are no daemons, for ever if they do not end."""

    def end() -> None:
        time.sleep(END_GRACE_S)
        if left := _left():
            try:
                print(
                    f"{program}: still running {END_GRACE_S:g} s after the end, and left behind: "
                    f"{', '.join(left)}; end what your code starts, or start it with daemon=True",
                    file=sys.stderr,
                )
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                # Also where nobody reads what it says.
                _exit(code)

    if _left():
        threading.Thread(target=end, name="afl-end", daemon=True).start()


def _left() -> list[str]:
    """What Python would wait for."""
    threads = [each for each in threading.enumerate() if each is not threading.main_thread()]
    multiprocessing = sys.modules.get("multiprocessing")
    processes = multiprocessing.active_children() if multiprocessing else []
    found = [("thread", each) for each in threads] + [("process", each) for each in processes]
    return [f"the {kind} {each.name}" for kind, each in found if not each.daemon]


def _set_up_memory(*, is_daemon: bool) -> None:
    # PyTorch's tensors of 2 MB or more in large pages: a gradient is made anew in every round, and the first
    # touch of 40 MB in small pages takes 17 ms of 20 (measured).
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if is_daemon and mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        # What one thread frees, another may have. With an arena for each thread, as glibc has it, frames that
        # pass from gRPC's threads to ours leave gaps in all: a server's memory grew for 150 rounds.
        mallopt(_M_ARENA_MAX, 1)


def _refusal(*, needs_linux: bool) -> str:
    """Why nothing can be begun here; empty if it can."""
    # Durable files need fdatasync and posix_fallocate.
    if needs_linux and sys.platform != "linux":
        return f"this is {sys.platform}, and it runs on Linux only"
    try:
        begin_here()
    except FileNotFoundError:
        # PyTorch would end the process for it.
        return "the folder that it was started in is gone; start it in another"
    for argument in sys.argv[1:]:
        if any("\udc80" <= character <= "\udcff" for character in argument):
            return f"the argument {argument!a} is not UTF-8; rename what it names"
    return ""


def failed(program: str, error: AflError) -> ExitCode:
    """Say on standard error why the command ends; returns its exit code."""
    raised = worth_tracing(error)
    if raised is not None:
        print(lines("".join(traceback.format_exception(raised))), end="", file=sys.stderr)
    print(f"{program}: {lines(str(error))}", file=sys.stderr)
    return error.exit_code


def _take_signals(*, with_sigterm: bool) -> None:
    # Ignored signals stay ignored: of a job in the background, or under nohup.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if with_sigterm and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
    let_come_again(KeyboardInterrupt, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if comes_again(number):
        return
    if any(outer.f_code.co_filename == _IMPORTING for outer, _ in traceback.walk_stack(frame)):
        # In the middle of an import an exception may be lost, or end the process from C++.
        leave_at_once("interrupted")
    end_children()
    raise KeyboardInterrupt(signal.Signals(number).name)


def leave_at_once(words: str) -> NoReturn:
    """End the process from a signal's handler, with a line on standard error if somebody still reads it."""
    with contextlib.suppress(OSError):
        os.write(2, f"{words}\n".encode())
    _exit(ExitCode.INTERRUPTED)
