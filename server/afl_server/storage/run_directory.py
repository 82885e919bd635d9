"""A run's directory: new, or of a run that is resumed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from afl.config import Config, config_from_text, load_config
from afl.config.compare import access_keys, differences
from afl.daemon import events
from afl.daemon.logs import add_to_every_line
from afl.errors import ConfigError, ExitCode, RunCompleteError, StorageError
from afl.paths import as_argument, from_start, kind_of, naming_paths, read_plain
from afl.runs.files import CONFIG_FILE, METRICS_FILE, STATE_FOLDER, SUMMARY_FILE
from afl.runs.versions import VERSIONS_FILE
from afl.security import certificates
from afl_server.storage.records import RunRecords, new_run_id
from afl_server.storage.store import ASIDE, Checkpoint, Entry, RunStore, content_named, unusable

LOG = logging.getLogger("afl.server")

LEAST_KEY_BYTES = 32
"""Of ``server.integrity_key``: as many as its codes have."""


@dataclass(frozen=True)
class OpenRun:
    """A run that this process may write.

    Attributes:
        config: with its seed.
        store: its durable state, if it has any.
        checkpoint: what it resumes from; ``None`` for a new run.
        entries: the outcomes since.
    """

    config: Config
    records: RunRecords
    store: RunStore | None
    checkpoint: Checkpoint | None = None
    entries: Iterable[Entry] = ()

    def discard(self) -> None:
        """No run comes of it: a directory that was made for it is free again."""
        if self.checkpoint is None:
            if self.store is not None:
                self.store.discard()
            self.records.discard()
            return
        self.close()

    def close(self) -> None:
        """Write no more."""
        self.records.close()
        if self.store is not None:
            self.store.close()


def open_run(config: Config, fresh_seed: int) -> OpenRun:
    """Go on with the run in ``config.run.directory`` if one is there that has not ended, else begin one.

    Args:
        fresh_seed: for a new run whose configuration names none.

    Raises:
        ConfigError: if the directory cannot be used, or holds a run of another configuration.
        RunCompleteError: if the run has ended; whoever starts servers again may leave it.
        InUseError: if another process runs it.
        StorageError: if the run's state is damaged.
    """
    directory = None if config.run.directory is None else from_start(config.run.directory)
    if directory is not None and config.server.state != "off" and _has_state(directory):
        store = RunStore(directory / STATE_FOLDER, config.server.state, _key(config, directory))
        try:
            if not store.is_empty:
                return _resumed(config, directory, store)
            _clear(directory)
        except BaseException:
            store.close()
            raise
        store.close()
    if config.run.seed is None:
        config = config.with_seed(fresh_seed)
    run_id = new_run_id()
    add_to_every_line(run_id=run_id)
    directory = directory or from_start(Path("runs") / run_id)
    if config.server.state == "off":
        return OpenRun(config, RunRecords.create(run_id, directory, config), None)
    key = _key(config, directory)
    RunRecords.claim(directory)
    # The state's folder first: a run whose server ended before it began is known by it.
    store = RunStore(directory / STATE_FOLDER, config.server.state, key)
    try:
        return OpenRun(config, RunRecords.create(run_id, directory, config), store)
    except BaseException:
        store.discard()
        raise


@naming_paths(option="run.directory")
def _has_state(directory: Path) -> bool:
    return kind_of(directory / STATE_FOLDER) == "folder"


def _key(config: Config, directory: Path) -> bytes | None:
    """What a run's state is sealed with.

    Raises:
        ConfigError: if the file holds no key, or lies where whoever may write the state may write it too.
    """
    path = config.server.integrity_key
    if path is None:
        return None
    name = "server.integrity_key"
    if from_start(path).resolve().is_relative_to(directory.resolve()):
        raise ConfigError(
            f"{name} {path} lies in the run's directory; keep it where only its owner can write"
        )
    certificates.warn_if_open(LOG, name, path)
    key = certificates.read_file(path, name).strip()
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"{name} {path} holds {len(key)} bytes; a key has at least {LEAST_KEY_BYTES}: "
            "openssl rand -hex 32 makes one"
        )
    return key


def _clear(directory: Path) -> None:
    """A server that ended before its first checkpoint has left nothing that counts."""
    metrics = directory / METRICS_FILE
    if not metrics.exists() or metrics.stat().st_size == 0:
        for name in (CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, VERSIONS_FILE):
            (directory / name).unlink(missing_ok=True)


def _resumed(config: Config, directory: Path, store: RunStore) -> OpenRun:
    checkpoint, entries = store.load()
    add_to_every_line(run_id=checkpoint.run_id)
    # Its own word: the file beside it is anyone's to edit.
    state = directory / STATE_FOLDER
    with content_named(StorageError, unusable(state)):
        stored = config_from_text(checkpoint.values["config"], f"the configuration in {state}")
    different = differences(stored, config)
    if different:
        file = directory / CONFIG_FILE
        what = (
            f"run.directory: {directory} holds a run of another configuration; use the run's own, or name "
            "another directory"
            if _is_of(stored, file)
            else f"{file} is not as it was when the run was begun; write the run's own values there again, "
            "or begin a new run in another directory"
        )
        raise ConfigError(what + ":\n" + "\n".join(f"  {line}" for line in different))
    if _result(directory) == ExitCode.OK.name.lower():
        raise RunCompleteError(
            f"run.directory: {directory} already holds this run, which is complete; to see it: afl inspect "
            f"{as_argument(directory)}; to run it again, name another directory: --set run.directory=runs/NEW"
        )
    assert stored.run.seed is not None
    config = config.with_seed(stored.run.seed)
    with content_named(StorageError, unusable(state)):
        records = RunRecords.resume(checkpoint.run_id, directory, config, checkpoint.values["metrics_bytes"])
    _tell_access(stored, config)
    return OpenRun(config, records, store, checkpoint, _with_losses(store, records, entries))


def _tell_access(stored: Config, config: Config) -> None:
    """With ``--resume`` they come from a file that anyone who may write to the run's directory can edit."""
    before, now = access_keys(stored), access_keys(config)
    shown = ", ".join(f"{key}: {value}" for key, value in now.items()) or "anybody, without TLS and tokens"
    LOG.info("whom this server lets in: %s", shown, extra=events.AccessResumed(changed=()).extra)
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        LOG.warning(
            "whom this server lets in is not as the run's state has it: %s; if it was not you who changed "
            "that, stop, and resume with --config and a file of your own",
            "; ".join(f"{key} was {before.get(key, 'off')}" for key in changed),
            extra=events.AccessResumed(changed=changed).extra,
        )


def _is_of(stored: Config, file: Path) -> bool:
    """Whether a run of ``stored`` can be resumed by the configuration in a file."""
    try:
        return not differences(stored, load_config(file))
    except ConfigError:
        return False


def _with_losses(store: RunStore, records: RunRecords, entries: Iterator[Entry]) -> Iterator[Entry]:
    """The outcomes; once the last has been replayed, what is known to have followed it is told."""
    yield from entries
    rounds, evaluations = records.caught_up()
    found = []
    if store.loss is not None:
        found.append(store.loss.what)
        if store.loss.readable:
            found.append(f"{store.loss.readable} whole outcomes follow, kept in files *{ASIDE} there")
    if rounds or evaluations:
        found.append(
            f"{records.directory / METRICS_FILE} has {rounds} rounds and {evaluations} evaluations more than "
            "the state"
        )
    if found:
        LOG.error(
            "%s: what came later is lost; the run resumes from before it",
            "; ".join(found),
            extra=events.RoundsLost(rounds=rounds).extra,
        )


def _result(directory: Path) -> str:
    """How the run ended; empty if it has not, or if that cannot be read: its state says the same."""
    path = directory / SUMMARY_FILE
    try:
        return str(json.loads(read_plain(path))["result"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, KeyError) as error:
        LOG.warning(
            "%s cannot be read (%s); the run's state says how far it is",
            path,
            error or type(error).__name__,
            extra=events.SummaryDamaged(file=path.name).extra,
        )
        return ""
