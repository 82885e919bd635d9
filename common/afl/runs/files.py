"""The files of a run directory, as whoever reads them needs them: while the run goes on, and afterwards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from afl.errors import DataError
from afl.outside import plain
from afl.paths import read_named
from afl.runs.shapes import EvaluationLine, RoundLine, Summary, check_values

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
EVENTS_FILE = "events.json"
STATE_FOLDER = "state"
TRACKERS_FOLDER = "trackers"

LINES: Final[Mapping[str, type[RoundLine | EvaluationLine]]] = {
    "round": RoundLine,
    "evaluation": EvaluationLine,
}
"""The lines of the metrics, by their ``event``."""

MODEL_NAMES = ("final", "random", "best")


def model_file(name: str) -> str:
    """The file of one of a run's models (``final``, ``random`` or ``best``)."""
    return f"model-{name}.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a model's file, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def count(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class StoredModel:
    """What a model's file says.

    ``digest`` is 32 hexadecimal digits over names, types, shapes and bytes of the tensors alone: models of
    two runs that agree to the bit have the same. ``tensors`` are ordered by name.
    """

    metadata: Mapping[str, str]
    tensors: Sequence[StoredTensor]
    digest: str


def read_model(path: Path) -> StoredModel:
    """Read all of a model's file; :class:`DataError` if it is no safetensors file, or damaged."""
    # Commands that read metrics alone start without PyTorch.
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    from afl.core.model.parameters import digest_of  # noqa: PLC0415

    tensors = []

    def noted(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors.append(StoredTensor(name, tuple(tensor.shape), dtype))
            yield name, tensor

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            digest = digest_of(noted((name, file.get_tensor(name)) for name in sorted(file.keys())))
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: no safetensors file, or a damaged one: {error}") from error
    return StoredModel(metadata, tensors, digest)


def metrics_entries(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """The lines of a run's metrics, and whether the last one is cut: a server may be writing it.

    :class:`DataError` if a line before it is no JSON object, or a value in one is of another type than ours.
    """
    lines = read_named(path).decode("utf-8", "replace").splitlines()
    entries: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(lines) and entries:
                return entries, True
            raise DataError(f"{path}:{number}: not JSON, or damaged: {error}") from error
        except RecursionError as error:
            raise DataError(f"{path}:{number}: nested too deeply to be a line of a run's metrics") from error
        if not isinstance(entry, dict):
            raise DataError(f"{path}:{number}: not an object of a run's metrics")
        event = entry.get("event")
        if isinstance(event, str) and event in LINES:
            check_values(entry, LINES[event], f"{path}:{number}")
        # A program other than ours may have written it.
        entries.append(entry if line.isprintable() and "\\" not in line else plain(entry))
    return entries, False


def read_summary(path: Path) -> dict[str, Any]:
    """A run's summary. Raises DataError if it is no JSON object, or has a value of another type than ours,
    and OSError if it cannot be read."""
    try:
        summary = json.loads(read_named(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON, or damaged: {error}") from error
    if not isinstance(summary, dict):
        raise DataError(f"{path}: not the summary of a run")
    check_values(summary, Summary, str(path))
    # A program other than ours may have written it.
    found: dict[str, Any] = plain(summary)
    return found


def of_event(entries: Iterable[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    """The lines of one kind (``round`` or ``evaluation``), by round, the last of each."""
    found = {entry["round"]: entry for entry in entries if entry.get("event") == event}
    return [found[round_] for round_ in sorted(found)]
