"""Where a process keeps its workers' keys: beside their journals, whose locks are theirs too."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from afl.core.messages import Position
from afl.core.secrecy.keys import KEY_BYTES, OwnKey
from afl.daemon import events
from afl.errors import StorageError
from afl.paths import from_start
from afl.runs import durable
from afl_worker.journal import KEYS_SUFFIX

LOG = logging.getLogger("afl.worker")


@dataclass(frozen=True)
class Standing:
    """Where the server is with a worker: the open position, and whether it has the worker's report for it."""

    open: Position
    is_held: bool


class KeyFiles:
    """One file a worker, which only its user can read: ``folder/RUN_ID/worker-ID.keys``."""

    def __init__(self, folder: Path, run_id: str, workers: Sequence[int]) -> None:
        self._folder = from_start(folder) / run_id
        self._workers = workers

    def read(self) -> dict[int, OwnKey]:
        """Those that are there; one that is damaged is as good as none. Raises StorageError if one cannot be
        read."""
        found = {}
        for worker in self._workers:
            path = self._path(worker)
            try:
                found[worker] = _parsed(path.read_text(encoding="utf-8"))
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError):
                event = events.JournalDamaged(worker=worker)
                LOG.warning("%s holds no key; another is made", path, extra=event.extra)
            except OSError as error:
                raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        return found

    def write(self, keys: Mapping[int, OwnKey]) -> None:
        """Make keys durable. Raises StorageError if they cannot be written."""
        for worker, key in keys.items():
            path = self._path(worker)
            values = {"epoch": key.epoch, "private": key.private.hex(), "roster": key.roster.hex()}
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


def _parsed(text: str) -> OwnKey:
    values = json.loads(text)
    key = OwnKey(int(values["epoch"]), bytes.fromhex(values["private"]), bytes.fromhex(values["roster"]))
    if key.epoch < 1 or len(key.private) != KEY_BYTES:
        raise ValueError("not a key")
    return key
