"""Which simulated runs there are to do: configurations times seeds, each with a run directory of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from afl.config import Config, load_config
from afl.errors import ConfigError, StorageError, why_unwritable
from afl.paths import kind_of
from afl.runs.durable import InUseError, lock, unlock
from afl.runs.files import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE, TRACKERS_FOLDER, read_summary

ENDED = frozenset({"ok", "diverged"})
"""Results that another try would give again."""


class Site(NamedTuple):
    """One of a federation's ``workers``, simulated alone: its examples are those that it has there."""

    worker: int
    workers: int


@dataclass(frozen=True)
class Job:
    """A run to simulate.

    Attributes:
        name: how it is shown; no two jobs of a call share it.
        config: with its seed.
        site: whose examples the only worker has; ``None`` for a whole federation.
        asks: whether who watches is shown each evaluation, and may end the run there.
    """

    name: str
    config: Config
    directory: Path
    saves_models: bool = True
    site: Site | None = None
    asks: bool = False

    def __post_init__(self) -> None:
        assert self.config.run.seed is not None

    def summary(self) -> dict[str, Any] | None:
        """That of a run that was simulated to its end, with models if wanted; ConfigError for another run."""
        config, summary = self.directory / CONFIG_FILE, self.directory / SUMMARY_FILE
        if not kind_of(config):
            return None
        if load_config(config, environment={}) != self.config:
            held = f"{self.directory} holds a run of another configuration (see {config})"
            raise ConfigError(f"{held}; name another directory with --out, or delete it")
        if not kind_of(summary):
            return None
        found = read_summary(summary)
        is_whole = found["result"] in ENDED and (found["models"] or not self.saves_models)
        return found if is_whole else None

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """The directory for this process alone; StorageError if another process has it, or it cannot be."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = lock(self.directory, "the run")
        except OSError as error:
            why = f"{self.directory} cannot be made: {why_unwritable(error)}"
            raise StorageError(f"{why}; name another folder with --out") from error
        except InUseError:
            claimed = f"another process is simulating the run in {self.directory}"
            raise StorageError(f"{claimed}; wait for it, or name another folder with --out") from None
        try:
            yield
        finally:
            unlock(handle)

    def clear(self) -> None:
        """Remove what an interrupted simulation left: a run is simulated whole or again."""
        names = [CONFIG_FILE, METRICS_FILE, SUMMARY_FILE]
        for path in (*map(self.directory.joinpath, names), *self.directory.glob("model-*.safetensors")):
            path.unlink(missing_ok=True)
        if (trackers := self.directory / TRACKERS_FOLDER).exists():
            shutil.rmtree(trackers)


def plan(
    configs: Sequence[Path],
    seeds: Sequence[int],
    out: Path,
    overrides: Sequence[str] = (),
    *,
    batched: bool = False,
    saves_models: bool = True,
) -> list[Job]:
    """A job for each configuration and seed, in ``out/NAME/seed-SEED``.

    Args:
        configs: files; each is named by its file name without the extension.
        seeds: none for the seed that each configuration gives.
        batched: compute all workers' gradients in one call (``worker.batch_oracles``).

    Raises:
        ConfigError: if a configuration is wrong, gives no seed where one is needed, or two have one name.
    """
    jobs: list[Job] = []
    names = [path.stem for path in configs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two configurations are called {name}; each needs a file name of its own")
    overrides = [*overrides, *(["worker.batch_oracles=true"] if batched else [])]
    for path in configs:
        config = load_config(path, overrides)
        own = [config.run.seed] if config.run.seed is not None else []
        if not seeds and not own:
            raise ConfigError(f"{path}: run.seed is not given; give it there, or --seeds")
        for seed in seeds or own:
            directory = out / path.stem / f"seed-{seed}"
            jobs.append(Job(f"{path.stem}, seed {seed}", config.with_seed(seed), directory, saves_models))
    return jobs
