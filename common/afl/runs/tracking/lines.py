"""A run's metrics, read while they are written, as whole rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from afl.paths import plain_file
from afl.runs.metrics import RANKING
from afl.runs.tracking.tracker import TrackedRound

# With more workers than this, their own accuracies and losses are left to `metrics.jsonl`: a thousand curves
# are more than trackers' pages can show.
MOST_WORKERS = 64


class RoundReader:
    """Reads ``metrics.jsonl`` on and on; rounds up to ``after`` are passed over.

    A round is whole once a later one has begun, since an evaluation's line follows its round's.
    """

    def __init__(self, path: Path, after: int) -> None:
        self._path = path
        self._after = after
        self._offset = 0
        self._round = 0
        self._metrics: dict[str, float] = {}

    def whole_rounds(self) -> Iterator[TrackedRound]:
        """The rounds that have become whole since the last call; ``ValueError`` if a line is not JSON."""
        with plain_file(self._path) as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._offset += len(line)
                yield from self._take(json.loads(line))

    def last_round(self) -> Iterator[TrackedRound]:
        """The round that nothing more can come of, since the run is over."""
        if self._metrics and self._round > self._after:
            yield TrackedRound(self._round, self._metrics)
        self._metrics = {}

    def _take(self, line: Mapping[str, Any]) -> Iterator[TrackedRound]:
        round_ = int(line["round"])
        if round_ != self._round:
            yield from self.last_round()
            self._round = round_
        if round_ > self._after:
            self._metrics.update(numbers_of(line))


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """What a line of the metrics measures, by a tracker's name for it."""
    event = line.get("event")
    if event not in {"round", "evaluation"}:
        return {}
    numbers = {
        f"{'sent' if key.startswith(('uplink_', 'downlink_')) else event}/{key}": float(value)
        for key, value in line.items()
        if type(value) in {int, float} and key != "round"
    }
    numbers |= {
        f"integers/{key}": float(value)
        for key, value in line.get("integers", {}).items()
        if type(value) in {int, float}
    }
    own = line.get("means", {}).keys() - RANKING  # the others are in the line itself
    numbers |= {f"{event}/mean_{key}": float(line["means"][key]) for key in own}
    workers = line.get("workers", []) if event == "evaluation" else []
    if len(workers) <= MOST_WORKERS:
        for worker, metrics in enumerate(workers):
            numbers |= {f"worker/{worker}/{key}": float(value) for key, value in metrics.items()}
    return numbers
