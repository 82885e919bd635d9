"""Where a process keeps its workers' keys: beside their journals, whose locks are theirs too."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from afl.core.messages import Position
from afl.core.secrecy.keys import DIGEST_BYTES, KEY_BYTES, LARGEST_EPOCH, OwnKey
from afl.daemon import events
from afl.errors import PeerError, StorageError
from afl.paths import from_start, read_plain
from afl.runs import durable
from afl_worker.journal import KEYS_SUFFIX

LOG = logging.getLogger("afl.worker")

_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}
"""There can be none; that a journal cannot be either is told with what to do about it."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Standing:
    """Where the server is with a worker: the open position, and whether it has the worker's report for it."""

    open: Position
    is_held: bool


class KeyFiles:
    """One file a worker, which only its user can read: ``folder/RUN_ID/worker-ID.keys``.

    Args:
        level: what the journals beside them survive, ``process`` or ``machine``.
        hides_losses: whether the run's losses are hidden.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        workers: Sequence[int],
        level: str = "machine",
        *,
        hides_losses: bool = False,
    ) -> None:
        self._folder = from_start(folder) / run_id
        self._workers = workers
        self._boot = "" if level == "machine" else _boot_id()
        self._hides_losses = hides_losses

    def check(self, *, is_masked: bool) -> None:
        """Raise PeerError if the run tells more now than it did when the keys were made: whoever starts this
        process again must not be able to ask for what has left it masked."""
        for worker, (_, _, losses_were_hidden) in self._found().items():
            if is_masked and (self._hides_losses or not losses_were_hidden):
                continue
            what = "worker {}'s losses" if is_masked else "messages without masks"
            raise PeerError(
                f"the server asks for {what.format(worker)}, which this run has kept from it until now "
                f"({self._path(worker)}); a run that tells more needs another run id"
            )

    def read(self) -> dict[int, OwnKey]:
        """Those that are there; one that is damaged is as good as none. Raises StorageError if one cannot be
        read."""
        return {worker: key for worker, (key, _, _) in self._found().items()}

    def of_another_boot(self) -> list[int]:
        """Workers whose journal may have lost its last entries with the machine's memory."""
        kept = {self._boot, _boot_id()}
        return [worker for worker, (_, boot, _) in self._found().items() if boot not in kept]

    def _found(self) -> dict[int, tuple[OwnKey, str, bool]]:
        found = {}
        for worker in self._workers:
            path = self._path(worker)
            try:
                found[worker] = _parsed(read_plain(path))
            except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
                event = events.JournalDamaged(worker=worker)
                LOG.warning("%s holds no key; another is made", path, extra=event.extra)
            except OSError as error:
                if error.errno not in _NO_FILE:
                    raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        return found

    def write(self, keys: Mapping[int, OwnKey]) -> None:
        """Make keys durable. Raises StorageError if they cannot be written."""
        for worker, key in keys.items():
            path = self._path(worker)
            values = {
                "epoch": key.epoch,
                "private": key.private.hex(),
                "roster": key.roster.hex(),
                "boot": self._boot,
                "hides_losses": self._hides_losses,
            }
            try:
                durable.write_whole(path, json.dumps(values).encode(), mode=0o600)
            except OSError as error:
                raise StorageError(f"{path} cannot be written: {error.strerror}") from error

    def _path(self, worker: int) -> Path:
        return self._folder / f"worker-{worker}{KEYS_SUFFIX}"


class KeysInMemory:
    """Where workers keep no journal: the keys end with the process."""

    def read(self) -> dict[int, OwnKey]:
        """None: a new process has none."""
        return {}

    def write(self, keys: Mapping[int, OwnKey]) -> None:
        """They are kept by whoever made them."""


def _parsed(text: bytes) -> tuple[OwnKey, str, bool]:
    values = json.loads(text)
    key = OwnKey(int(values["epoch"]), bytes.fromhex(values["private"]), bytes.fromhex(values["roster"]))
    is_key = 1 <= key.epoch <= LARGEST_EPOCH and len(key.private) == KEY_BYTES
    if not is_key or len(key.roster) not in {0, DIGEST_BYTES}:
        raise ValueError("not a key")
    return key, str(values["boot"]), bool(values["hides_losses"])


def _boot_id() -> str:
    """Which of the machine's lives this is."""
    return _BOOT_ID.read_text(encoding="ascii").strip()
