"""Folders that are given on the command line, looked at before any work."""

from __future__ import annotations

import os
from pathlib import Path

from afl.errors import ConfigError


def check_folder(option: str, folder: Path) -> None:
    """See that a folder is there, or can be made.

    Raises:
        ConfigError: if a file is in its place or above it, or nothing may be written there.
    """
    there = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    if not there.is_dir():
        raise ConfigError(f"{option}: {there} is a file, where a folder is needed; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: nothing may be written into {there}; name another folder")
