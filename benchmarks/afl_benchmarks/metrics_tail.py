"""The metrics of a run that goes on, line by line as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from afl.runs.files import METRICS_FILE


class MetricsTail:
    """Reads on where it was.

    Args:
        directory: the run's, which need not be there yet.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / METRICS_FILE
        self._position = 0

    def new(self) -> list[dict[str, Any]]:
        """The whole lines since the last time."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
