"""Packages that only some tasks need."""

from __future__ import annotations

import importlib
from typing import Any

from afl.errors import ConfigError

INSTALL_HINT = "pip install 'afl[tasks]'"

PROVIDED = frozenset({"sklearn", "torchvision", "pyarrow", "PIL"})
"""Top-level modules that the extra brings."""


def require(module: str, purpose: str) -> Any:
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
        raise ConfigError(f"the package {package} is needed to {purpose}: {INSTALL_HINT}") from error
