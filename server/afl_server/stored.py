"""The configuration of a run that is gone on with."""

from __future__ import annotations

from pathlib import Path

from afl.config import Config, load_config
from afl.errors import ConfigError
from afl.runs.files import CONFIG_FILE, STATE_FOLDER


def stored_config(directory: Path, overrides: list[str]) -> Config:
    """The configuration of the run in a directory, to go on with.

    Raises:
        ConfigError: if there is no run that can be gone on with.
    """
    if not (directory / STATE_FOLDER).is_dir():
        raise ConfigError(
            f"--resume {directory}: no run that can be gone on with is there (no folder "
            f"{directory / STATE_FOLDER}); give the run.directory of one that was stopped"
        )
    config = load_config(directory / CONFIG_FILE, overrides)
    return config.model_copy(update={"run": config.run.model_copy(update={"directory": directory})})
