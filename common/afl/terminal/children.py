"""Processes that this one starts, such as a DataLoader's: their signals, and their ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
_AGAIN_S = 0.05

CHILD_GRACE_S = 1.0
"""How long a child may take to end after SIGTERM before its parent's end goes on."""

_forking = threading.Event()
"""Set while the main thread forks."""


def comes_again(number: int) -> bool:
    """Whether a signal has come while the main thread forks; it then comes again, since Python drops what a
    handler raises there."""
    if _forking.is_set():
        _send_again(number)
        return True
    return False


def _send_again(number: int) -> None:
    threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()


def let_come_again(kind: type[BaseException], handler: Callable[[int, FrameType | None], None]) -> None:
    """Let what ``handler`` raises, which is of this kind and has the signal's name, come again where Python
    drops it: a finalizer, or what a weak reference calls at its end, may be what runs just then."""
    usual = sys.unraisablehook

    def look(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        name = str(error) if isinstance(error, kind) else ""
        if name not in signal.Signals.__members__:
            usual(unraisable)
            return
        number = signal.Signals[name]
        signal.signal(number, handler)
        _send_again(number)

    sys.unraisablehook = look


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


def end_with(parent: int) -> None:
    """In a new process: end by SIGTERM when the thread of ``parent`` that has made it ends, however it does.

    As a ``preexec_fn`` it holds for the program that is run then. Does nothing where the system is not Linux.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        # It may have ended before that.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


def prepare_forks() -> None:
    """See to it that processes that are forked from this one, such as a DataLoader's, take signals as any
    other process does, and do not outlive this one."""
    program, forking = os.getpid(), threading.local()

    def before() -> None:
        # A signal that comes in between waits, in the child until the handlers are not ours.
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
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
        for number in STOP_SIGNALS:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        # Only of the main thread: the system takes the end of the thread that has forked for the parent's.
        # Not of a child's child: whoever forks twice means to stay.
        if forking.is_own:
            end_with(program)
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
