"""Questions about paths, each of which can fail: a folder above is closed to this user, a name too long."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from afl.errors import DISK_FULL, AflError, ConfigError, StorageError

_MAY_NOT = "this process may not look or write there; name another path, or run it as a user who may"

_MORE_FILES = "allow more open files (ulimit -n, LimitNOFILE= of a unit)"

_ADVICE = {
    errno.EACCES: _MAY_NOT,
    errno.EPERM: _MAY_NOT,
    errno.ENAMETOOLONG: "a name has at most 255 bytes and a path 4095; name a shorter one",
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
}

FIFO_WAIT_S = 10.0

_start = Path()
"""The folder that this process was started in; that in which it is now, until :func:`begin_here`."""


@contextlib.contextmanager
def naming_paths(kind: type[AflError] = ConfigError, option: str = "") -> Iterator[None]:
    """Within the block, an OSError about a path, which a user chose, is an AflError of this kind.

    Every question about a path can fail: a folder above it is closed to this user, or its name too long.
    A full disk is a StorageError in any case. Other errors pass: what names no path is a bug.

    Args:
        option: what the user chose the path by, for the message.
    """
    try:
        yield
    except OSError as error:
        reason = _about_path(error)
        if not reason:
            raise
        kind = StorageError if error.errno in DISK_FULL else kind
        raise kind(f"{option}: {reason}" if option else reason) from error


def _about_path(error: OSError) -> str:
    """What is wrong with which path, and what would be right; empty if it is about none."""
    if error.errno == errno.ENOMEM:
        return ""
    if isinstance(error.filename, str | bytes | os.PathLike):  # else nothing, or a descriptor
        reason = f"{os.fsdecode(error.filename)}: {error.strerror}"
        return f"{reason}; {_ADVICE.get(error.errno or 0, 'name another path')}"
    if error.errno in DISK_FULL:
        return f"{error.strerror}; free some space"
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        return f"{error.strerror}; let TMPDIR name a folder that can be written"
    return ""


def kind_of(path: Path) -> Literal["folder", "file", ""]:
    """What is at a path; empty if nothing is.

    OSError if that cannot be known, where Path.exists, from Python 3.14 on, says that nothing is.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return "folder" if stat.S_ISDIR(mode) else "file"


def opened(path: Path) -> BinaryIO:
    """A file that a person named, to be read. A FIFO is waited for :data:`FIFO_WAIT_S` at most: as one that a
    shell makes of a command it has a writer, or else it would be waited for without a word."""
    if not path.is_fifo():
        return path.open("rb")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not select.select([descriptor], [], [], FIFO_WAIT_S)[0]:
        os.close(descriptor)
        raise OSError(errno.EAGAIN, f"it is a FIFO, and nobody has written to it for {FIFO_WAIT_S:g} s", path)
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


def read_named(path: Path) -> bytes:
    """All of what :func:`opened` opens."""
    with opened(path) as file:
        return file.read()


def plain_file(path: Path) -> BinaryIO:
    """A file that afl has written, to be read; an OSError if something else has its place, such as a FIFO,
    which would be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no plain file", str(path))


def read_plain(path: Path) -> bytes:
    """All of a :func:`plain_file`."""
    with plain_file(path) as file:
        return file.read()


def expanded(path: str | Path) -> Path:
    """With the folder that a leading ``~`` stands for; as it is, if no such user is known here."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  # Path.expanduser raises


def begin_here() -> None:
    """What a person names is looked for from the folder that this process is in now, wherever a task's code
    may change to."""
    global _start  # noqa: PLW0603  # as the working directory is the process's
    _start = Path.cwd()


def from_start(path: Path) -> Path:
    """Where a path is that a person has named, by the folder that this process was started in."""
    return _start / path


def as_argument(path: Path) -> str:
    """As a shell takes it, in a command to be pasted: quoted where it must be, and not like an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
