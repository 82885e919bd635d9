"""Files that may be replaced while the server runs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from afl.daemon import events
from afl.errors import ConfigError
from afl.paths import from_start

LOG = logging.getLogger("afl.server")

RETRY_S = 1.0

_T = TypeVar("_T")

_Signature: TypeAlias = "tuple[tuple[int, int, int] | None, ...]"


class ReloadedFiles(Generic[_T]):
    """What files hold, read again when they have changed; asked from any thread.

    Files that cannot be used in place of usable ones are logged, once, and what was read before stays: who
    replaces two files is seen between them. They are tried again, at most once in :data:`RETRY_S`: what was
    wrong need not change them, as where no descriptor was free.

    Args:
        what: their key in the configuration, for logs.
        read: reads them; raises :class:`ConfigError`.

    Raises:
        ConfigError: if they cannot be used in the first place.
    """

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], _T]) -> None:
        self._what = what
        self._paths = paths
        self._read = read
        self._lock = threading.Lock()
        self._retry_at = math.inf
        """When to try again files that could not be used, in seconds of the monotonic clock."""
        self._told = ""
        # Before reading: what changes meanwhile is read once more.
        self._signature = self._sign()
        self._value = read()

    def current(self) -> _T:
        """What the files hold, or last held."""
        with self._lock:
            signature = self._sign()
            if signature != self._signature or time.monotonic() >= self._retry_at:
                if signature != self._signature:
                    self._told = ""
                self._signature = signature
                self._renew()
            return self._value

    def _renew(self) -> None:
        try:
            value = self._read()
        except ConfigError as error:
            self._retry_at = time.monotonic() + RETRY_S
            if str(error) != self._told:
                self._told = str(error)
                LOG.error(  # noqa: TRY400  # the message says all
                    "%s has changed and cannot be used, so what was there before stays in use: %s",
                    self._what,
                    error,
                    extra=events.ReloadFailed(what=self._what).extra,
                )
            return
        self._retry_at = math.inf
        if value == self._value:
            return
        self._value = value
        LOG.info(
            "%s has changed and was read again", self._what, extra=events.Reloaded(what=self._what).extra
        )

    def _sign(self) -> _Signature:
        return tuple(map(_signature, self._paths))


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = from_start(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
