"""What a process sends, in a file: each message as gRPC frames it, a zero byte and four of its length first.

These are the bytes of the stream as they leave, without HTTP/2 around them and before TLS. Only the stream's
metadata, which holds the token if there is one, is not among them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from afl.errors import ConfigError, DataError, StorageError, why_unwritable

PREFIX_BYTES = 5


class Capture:
    """Adds messages to a file; what a killed process has left of its last one goes.

    Raises:
        ConfigError: if the file cannot be opened, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with self._opened():
                whole = sum(PREFIX_BYTES + len(message) for message in _messages_of(path))
            os.truncate(path, whole)
        except ValueError as error:
            raise ConfigError(f"--capture {path} holds something else; name a new file") from error
        except OSError as error:
            raise ConfigError(f"--capture {path}: {why_unwritable(error)}; name another file") from error

    def write(self, message: bytes) -> None:
        """Add one, before it leaves. Raises StorageError."""
        try:
            with self._opened() as file:
                file.write(b"\0" + len(message).to_bytes(PREFIX_BYTES - 1, "big") + message)
        except OSError as error:
            raise StorageError(f"--capture {self._path}: {why_unwritable(error)}") from error

    def _opened(self) -> BinaryIO:
        def private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self._path, "ab", opener=private)  # the caller closes it


def captured(path: Path) -> Iterator[bytes]:
    """The whole messages of a file, in order. Raises DataError if it cannot be read, or holds others."""
    try:
        yield from _messages_of(path)
    except ValueError as error:
        raise DataError(f"{path} is none that afl-worker --capture has written") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _messages_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while prefix := file.read(PREFIX_BYTES):
            if prefix[0]:
                raise ValueError("not a message of gRPC")
            size = int.from_bytes(prefix[1:], "big")
            message = file.read(size)
            if len(prefix) < PREFIX_BYTES or len(message) < size:
                return
            yield message
