"""Fetching a data set through torchvision, safely where several workers start at once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

from afl.errors import DataError


def download_into(folder: Path, name: str, fetch: Callable[[Path], object]) -> None:
    """Make ``folder/name`` by ``fetch(temporary folder)``, which must write it at ``temporary/name``.

    The result is moved into place whole: another process sees all of it or nothing. Where two fetch at
    once, the first to finish wins.

    Raises:
        afl.DataError: if it could not be fetched or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            fetch(Path(temporary))
            if not (folder / name).exists():
                (Path(temporary) / name).rename(folder / name)
    except (URLError, OSError, RuntimeError) as error:
        if (folder / name).exists():
            return
        raise DataError(f"could not download {name} into {folder.resolve()}: {error}") from error
