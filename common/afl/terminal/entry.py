"""How every command begins, before anything large is imported, and how one ends that cannot go on."""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from afl.errors import AflError, ExitCode
from afl.paths import naming_paths
from afl.user_code import shortage, worth_tracing

_IMPORTING = "<frozen importlib._bootstrap>"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_AGAIN_S = 0.05

CHILD_GRACE_S = 1.0
"""How long a child may take to end after SIGTERM before its parent's end goes on."""

_forking = threading.Event()
"""Set while the main thread forks."""


def enter(program: str, module: str, *, needs_linux: bool = False) -> int:
    """Import the command and run its ``main``; returns the exit code.

    A Ctrl-C and a reader that has gone away (``| head``) end it in a line at most, whenever they come.
    Arguments that are not UTF-8 are refused: nothing that is written or sent could hold them.
    """
    # A descriptor that the shell closed (`>&-`) leaves None, which nothing can be written to.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    # Durable files need fdatasync and posix_fallocate.
    if needs_linux and sys.platform != "linux":
        print(f"{program}: this is {sys.platform}, and it runs on Linux only", file=sys.stderr)
        return ExitCode.CONFIG
    prepare_forks()
    # The name of a folder may be no UTF-8, and a terminal's encoding may lack what we write: shown escaped.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        Path.cwd()
    except FileNotFoundError:
        # PyTorch would end the process for it.
        print(f"{program}: the folder that it was started in is gone; start it in another", file=sys.stderr)
        return ExitCode.CONFIG
    for argument in sys.argv[1:]:
        if any("\udc80" <= character <= "\udcff" for character in argument):
            print(f"{program}: the argument {argument!a} is not UTF-8; rename what it names", file=sys.stderr)
            return ExitCode.CONFIG
    # What gRPC's core would write there in its own form, past the log, the log says in words.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Ignored signals stay ignored: of a job in the background, or under nohup.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
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


def failed(program: str, error: AflError) -> ExitCode:
    """Say on standard error why the command ends; returns its exit code."""
    raised = worth_tracing(error)
    if raised is not None:
        traceback.print_exception(raised)
    print(f"{program}: {error}", file=sys.stderr)
    return error.exit_code


def comes_again(number: int) -> bool:
    """Whether a signal has come while the main thread forks; it then comes again, since Python drops what a
    handler raises there."""
    if _forking.is_set():
        threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()
        return True
    return False


def end_children() -> None:
    """End the daemonic processes of ``multiprocessing``, such as a DataLoader's, as the end of this process
    would: but before an exception takes it out of a call that they answer, of which they would complain."""
    if callable(signal.getsignal(signal.SIGCHLD)):
        # PyTorch's, which raises when a child of a DataLoader ends.
        signal.signal(signal.SIGCHLD, lambda *_: None)
    multiprocessing = sys.modules.get("multiprocessing")
    children = (
        [child for child in multiprocessing.active_children() if child.daemon] if multiprocessing else []
    )
    for child in children:
        child.terminate()
    for child in children:
        child.join(CHILD_GRACE_S)


def prepare_forks() -> None:
    """See to it that processes that are forked from this one, such as a DataLoader's, take signals as any
    other process does, and do not outlive this one."""
    program, forking = os.getpid(), threading.local()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def before() -> None:
        # A signal that comes in between waits, in the child until the handlers are not ours.
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        is_main = threading.current_thread() is threading.main_thread()
        forking.is_own = is_main and os.getpid() == program
        if is_main:
            _forking.set()

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)
        if threading.current_thread() is threading.main_thread():
            _forking.clear()

    def in_child() -> None:
        _forking.clear()
        # An event loop's descriptor: the parent would read there what comes here.
        signal.set_wakeup_fd(-1)
        for number in _STOP_SIGNALS:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        # Only of the main thread: the system takes the end of the thread that has forked for the parent's.
        # Not of a child's child: whoever forks twice means to stay.
        if prctl is not None and forking.is_own:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
            if os.getppid() != program:
                os.kill(os.getpid(), signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if comes_again(number):
        return
    if any(outer.f_code.co_filename == _IMPORTING for outer, _ in traceback.walk_stack(frame)):
        # In the middle of an import an exception may be lost, or end the process from C++.
        os.write(2, b"interrupted\n")
        os._exit(ExitCode.INTERRUPTED)
    end_children()
    raise KeyboardInterrupt
