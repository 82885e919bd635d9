"""What files that somebody may have damaged or edited must hold before anything of them is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from afl.errors import DataError


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class Summary(_Shape):
    """``summary.json``."""

    result: str
    reason: str
    rounds: int


class RoundLine(_Shape):
    """A round's line of ``metrics.jsonl``."""

    event: Literal["round"]
    round: int
    synchronization: int
    uplink_bytes: int
    downlink_bytes: int
    uplink_float_equivalents: float
    downlink_float_equivalents: float


class EvaluationLine(_Shape):
    """An evaluation's line of ``metrics.jsonl``."""

    event: Literal["evaluation"]
    round: int
    worst_worker: int
    worst_accuracy: float | None
    mean_accuracy: float | None
    max_loss: float | None
    mean_loss: float | None
    workers: list[dict[str, float | None]]
    examples: list[int] = []
    uplink_bytes: int
    downlink_bytes: int
    uplink_float_equivalents: float
    downlink_float_equivalents: float


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


def read(path: Path, shape: type[_T]) -> _T:
    """A JSON file of this shape.

    Raises:
        FileNotFoundError: if it is not there.
        DataError: if it is of another shape, no JSON, or cannot be read.
    """
    try:
        return shape.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise DataError(f"{path}: damaged, or of another version of afl: {_first(error)}") from error


def require(value: object, shape: type[BaseModel], where: str) -> None:
    """Say what is wrong with a value of another shape.

    Raises:
        DataError: if it is.
    """
    try:
        shape.model_validate(value)
    except ValidationError as error:
        raise DataError(f"{where}: damaged, or of another version of afl: {_first(error)}") from error


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, problem["loc"]))
    return f"{place}: {problem['msg']}" if place else problem["msg"]
