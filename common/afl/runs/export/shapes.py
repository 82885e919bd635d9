"""What files that somebody may have damaged or edited must hold before anything of them is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from afl.errors import DataError


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class Summary(_Shape):
    """``summary.json``."""

    result: str
    reason: str
    rounds: int


class Line(_Shape):
    """What lines of ``metrics.jsonl`` say of the bytes up to their round."""

    round: int
    uplink_bytes: int
    downlink_bytes: int
    uplink_float_equivalents: float
    downlink_float_equivalents: float


class RoundLine(Line):
    """A round's."""

    synchronization: int


class EvaluationLine(Line):
    """An evaluation's; ``workers`` has the metrics of each, ``examples`` their numbers of test examples; with
    hidden losses there are the ``means`` instead, and ``worst_worker`` is null."""

    worst_worker: int | None
    worst_accuracy: float | None
    mean_accuracy: float | None
    max_loss: float | None
    mean_loss: float | None
    workers: list[dict[str, float | None]] = []
    examples: list[int] = []
    smooth_worst_loss: float | None = None
    rank_by: str | None = None
    better: str | None = None
    worst_value: float | None = None
    mean_value: float | None = None
    sites: list[str | None] = []
    dual_weights: list[float] = []
    means: dict[str, float] = {}


class CardTask(_Shape):
    """``card.json``: its task."""

    name: str
    options: dict[str, Any]


class CardModel(_Shape):
    """``card.json``: its model."""

    digest: str


class Card(_Shape):
    """``card.json``."""

    task: CardTask
    model: CardModel


_T = TypeVar("_T", bound=BaseModel)


def read(path: Path, shape: type[_T]) -> _T | None:
    """A JSON file of this shape, ``None`` if there is none; :class:`DataError` if it is of another."""
    try:
        return checked(path.read_bytes(), shape, str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def checked(value: object, shape: type[_T], where: str) -> _T:
    """A value, or JSON in bytes, as this shape; :class:`DataError` if it is of another."""
    try:
        return shape.model_validate_json(value) if isinstance(value, bytes) else shape.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, problem["loc"]))
        what = f"{place}: {problem['msg']}" if place else problem["msg"]
        raise DataError(f"{where}: damaged, or of another version of afl: {what}") from error
