"""Errors a person can cause, and the exit codes of every command.

A mistake of a user is an :class:`AflError`: its message says what was wrong, where, and what would be
right. A mistake of a developer is an ``AssertionError`` or ``TypeError`` and is not caught.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self


class ExitCode(enum.IntEnum):
    """What a command's exit status means."""

    meaning: str
    """One sentence for ``--help`` and the docs."""

    def __new__(cls, code: int, meaning: str = "") -> Self:
        """A member of its number and its meaning, which a lookup by the number leaves out."""
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    OK = 0, "the run ended as configured"
    INTERNAL = 1, "a bug in afl; the log has the traceback"
    CONFIG = 2, "the command line, the configuration or the task's code is wrong"
    REFUSED = 3, "the server refused this worker, or this worker its peers; the log says why"
    LOST_SERVER = 4, "the server could not be reached for longer than give_up_after"
    DIVERGED = (
        5,
        (
            "a loss or gradient was not finite, or the loss stayed above faults.divergence; "
            "the log names worker and round"
        ),
    )
    PORT = 6, "an address cannot be listened on: it is taken, or not one of this machine"
    DATA = 7, "the task's data is missing, empty, too small for the batch or not what the model takes"
    ABORTED = 8, "the run was stopped before its last round; the log says by whom and why"
    STORAGE = 9, "the run directory is gone or cannot be written, so the run was stopped"
    LOST_WORKERS = 10, "no worker had a session for longer than server.give_up_after"
    IN_USE = 11, "another process has this run, or this worker's journal; the log names it"
    SHORTAGE = 12, "memory ran out, or a helper process of the task's code was killed; the log says where"
    POLICY = 13, "this site's policy forbids what the server asks for; the log names each line of it"
    VERSION = 14, "server and worker had versions that cannot work together for longer than give_up_after"
    PRIVACY = 15, "this site's records have no privacy left to spend on another step"
    INTERRUPTED = 130, "stopped by SIGINT or SIGTERM; the same command resumes the run"


DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Of an OSError: space, or what a user may have of it, has run out."""


def why_unwritable(error: OSError) -> str:
    """Why a folder cannot be made or written, for a message."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "it is a file, and must be a folder"
    return error.strerror or str(error)


def why_unwritten(error: OSError) -> str:
    """Why a file of a run could not be written, for a message; of what can be put right also how."""
    why = error.strerror or str(error)
    if error.errno in DISK_FULL:
        why += "; free some space, and start the server again to resume the run"
    elif error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        why += "; make it writable, and start the server again to resume the run"
    return why


def place(worker: int, rounds: str) -> str:
    """Where something happened, for a message: ``worker 3, round 5``."""
    return f"worker {worker}, {rounds}"


ADVICE_NON_FINITE = "lower algorithm.eta_w, or look for NaN in the data (`afl check` does)"
"""What most often helps where a number is not finite."""


class SignalError(BaseException):
    """A signal asked the process to end. No ``Exception``: it is nobody's fault, and passes what catches
    those."""


STOPS = (KeyboardInterrupt, GeneratorExit, SignalError)
"""What passes where all that a task's code may raise is caught: also a ``BaseException``, such as a panic of
Rust in a library, or a test's skip."""


class AflError(Exception):
    """Base of every error that a user, an operator or a peer can cause."""

    exit_code: ExitCode = ExitCode.INTERNAL


def placed(where: str, error: AflError) -> AflError:
    """The error with where it happened before its message, for ``raise ... from error``."""
    failure = AflError(f"{where}: {error}")
    failure.exit_code = error.exit_code
    return failure


class ConfigError(AflError):
    """A configuration value, option or command line that cannot be used."""

    exit_code = ExitCode.CONFIG


class TaskError(AflError):
    """A user's task that cannot be trained: no parameters, BatchNorm without a policy, and the like."""

    exit_code = ExitCode.CONFIG


class TaskCodeError(TaskError):
    """A task whose own code raised; the cause is what it raised."""


class InternalError(AflError):
    """A fault of afl's own; the cause is what was raised."""


class OutOfMemoryError(AflError):
    """Memory ran out, of the host or of the GPU, in whose code ever."""

    exit_code = ExitCode.SHORTAGE


class HelperKilledError(AflError):
    """A process that the task's code had started, such as a DataLoader's, was killed."""

    exit_code = ExitCode.SHORTAGE


class DataError(AflError):
    """Data that is missing, empty, too small for the batch, or not what the model takes."""

    exit_code = ExitCode.DATA


class ProtocolError(AflError):
    """A message that the protocol does not allow: wrong length, wrong order, out of range."""

    exit_code = ExitCode.REFUSED


class VersionError(ProtocolError):
    """What only another version of afl can mean or do: trying again helps once one end is upgraded."""

    exit_code: ExitCode = ExitCode.VERSION


class RefusedError(AflError):
    """The server refused this worker; trying again cannot help."""

    exit_code = ExitCode.REFUSED


class PeerError(AflError):
    """What the server says of other workers, and this one cannot believe: it sends nothing."""

    exit_code = ExitCode.REFUSED


class PolicyError(AflError):
    """A run that the site's own policy forbids; ``keys`` are those of the policy."""

    exit_code = ExitCode.POLICY

    def __init__(self, message: str, keys: Sequence[str]) -> None:
        super().__init__(message)
        self.keys = keys


class BudgetError(AflError):
    """A step that would cost a record more privacy than the run, or the site's policy, allows."""

    exit_code = ExitCode.PRIVACY


class LostServerError(AflError):
    """The server could not be reached for longer than ``give_up_after``."""

    exit_code = ExitCode.LOST_SERVER


class NonFiniteError(AflError):
    """A loss or a gradient that is infinite or not a number."""

    exit_code = ExitCode.DIVERGED


class DivergedError(AflError):
    """A run whose loss stayed above ``faults.divergence``."""

    exit_code = ExitCode.DIVERGED


class AddressError(AflError):
    """An address that cannot be listened on or connected to as written."""

    exit_code = ExitCode.PORT


class StorageError(AflError):
    """A file of the run that cannot be written: the disk is full, or the run directory is gone."""

    exit_code = ExitCode.STORAGE


class RunGoneError(StorageError):
    """The run directory is gone, or another has its place: there is nothing to resume."""


class RunCompleteError(AflError):
    """There is nothing left to do: the run has ended as configured."""

    exit_code = ExitCode.OK


class RunAbortedError(AflError):
    """The run ended before its last round."""

    exit_code = ExitCode.ABORTED


def cannot_begin(directory: Path, error: OSError) -> AflError:
    """That no run can begin in a directory; on a disk that is full, it can once it no longer is."""
    where = f"run.directory: {directory} cannot be written: {why_unwritable(error)}"
    if error.errno in DISK_FULL:
        return StorageError(f"{where}; free some space, and start the server again")
    return ConfigError(f"{where}; name another directory")
