"""Packages that only some tasks and commands need."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from afl.errors import ConfigError

_INSTALL = "pip install 'afl[{}]'"

INSTALL_HINT = _INSTALL.format("tasks")

PROVIDED = frozenset({"sklearn", "torchvision", "pyarrow", "PIL"})
"""Top-level modules that the extra brings."""


def check_installed(module: str, purpose: str, extra: str) -> None:
    """That a top-level ``module``, which ``extra`` brings, is there; it is not imported.

    Raises:
        afl.ConfigError: if it is not, with the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"the package {module} is needed to {purpose}: {_INSTALL.format(extra)}")


def require(module: str, purpose: str, extra: str = "tasks") -> Any:
    """The imported ``module`` (dotted name); ``purpose`` completes "... is needed to".

    Raises:
        afl.ConfigError: if its package is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ConfigError(
            f"the package {package} is needed to {purpose}: {_INSTALL.format(extra)}"
        ) from error
