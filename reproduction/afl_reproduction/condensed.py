"""A run in a small file of JSON lines: a line about the run, then one for each evaluation.

Figures and tables are drawn from these files alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afl.config import Config, config_from_mapping, dump_config
from afl.config.source import read_yaml
from afl.errors import ConfigError
from afl_lab.plots.points import Point

_KEPT = ("workers", "task", "algorithm", "evaluation", "run", "worker")
"""The sections that a simulated run depends on."""


@dataclass(frozen=True)
class CondensedRun:
    """One run.

    Attributes:
        about: ``part``, ``run``, ``label``, ``seed``, ``result``, ``seconds``, ``versions``, ``config``.
    """

    about: Mapping[str, Any]
    points: Sequence[Point]

    @property
    def config(self) -> Config:
        """As it was run."""
        return config_from_mapping(self.about["config"])

    def write(self, path: Path) -> None:
        """As JSON lines."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(dict(self.about)), *(json.dumps(asdict(point)) for point in self.points)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_run(path: Path) -> CondensedRun:
    """A file that :meth:`CondensedRun.write` wrote.

    Raises:
        ConfigError: if it is not one.
    """
    try:
        about, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return CondensedRun(about, [Point(**line) for line in lines])
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no condensed run: {error}; delete it to run it again") from error


def plain_config(config: Config) -> dict[str, Any]:
    """What the result depends on, as plain values that load again."""
    values = read_yaml(dump_config(config), "configuration", {}).value
    assert isinstance(values, dict)
    return {name: values[name] for name in _KEPT}


def is_same(stored: Mapping[str, Any], config: Config) -> bool:
    """Whether a stored configuration is ``config``, but for what a result does not depend on."""
    return plain_config(config_from_mapping(stored)) == plain_config(config)


def run_file(results: Path, part: str, name: str, seed: int) -> Path:
    """Where a run's condensed file is."""
    return results / "runs" / part / f"{name}-seed-{seed}.jsonl"
