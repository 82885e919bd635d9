"""What files that somebody may have damaged or edited must hold before anything of them is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from afl.errors import DataError
from afl.paths import read_plain


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


class Integers(_Shape):
    """What a round's integer messages were like."""

    uplink_bits: float | None
    downlink_bits: float
    smallest_exponent: int
    largest_exponent: int
    zeros: float
    at_limit: float


class FirstRound(_Shape):
    """A summary's first round."""

    round: Count
    loss_max: float | None
    loss_mean: float


class Standing(_Shape):
    """A summary's evaluation."""

    round: Count
    worst_worker: Count | None
    worst_accuracy: float | None
    mean_accuracy: float | None
    max_loss: float | None
    mean_loss: float
    smooth_worst_loss: float | None = None
    rank_by: str | None = None
    better: str | None = None
    worst_value: float | None = None
    mean_value: float | None = None
    own_metrics: dict[str, dict[str, float | None]] = {}


class Sent(_Shape):
    """A summary's bytes in one direction."""

    wire_bytes: Count
    wire_bytes_by_kind: dict[str, Count]
    payload_bytes_by_part: dict[str, Count]
    float_equivalents_as_bytes: Annotated[float, Field(ge=0, lt=2**63)]


class Summary(_Shape):
    """``summary.json``."""

    result: str
    reason: str
    rounds: Count
    seconds: Annotated[float, Field(ge=0, lt=2**40)] = 0.0
    sites: list[str | None] = []
    first_round: FirstRound | None = None
    first: Standing | None = None
    last: Standing | None = None
    best: Standing | None = None
    communication: dict[Literal["uplink", "downlink"], Sent] = {}
    uncompressed_bytes: Count = 0
    models: list[str] = []


class Line(_Shape):
    """What lines of ``metrics.jsonl`` say of the bytes up to their round."""

    round: Count
    uplink_bytes: Count
    downlink_bytes: Count
    uplink_float_equivalents: float
    downlink_float_equivalents: float


class RoundLine(Line):
    """A round's."""

    synchronization: Count
    seconds: Annotated[float, Field(ge=0, lt=2**40)] = 0.0
    loss_max: float | None = None
    loss_max_worker: Count | None = None
    loss_mean: float = 0.0
    dual_weight_max: float | None = None
    integers: Integers | None = None


class EvaluationLine(Line):
    """An evaluation's; ``workers`` has the metrics of each, ``examples`` their numbers of test examples; with
    hidden losses there are the ``means`` instead, and ``worst_worker`` is null."""

    worst_worker: Count | None
    worst_accuracy: float | None
    mean_accuracy: float | None
    max_loss: float | None
    mean_loss: float | None
    workers: list[dict[str, float | None]] = []
    examples: list[Count] = []
    smooth_worst_loss: float | None = None
    rank_by: str | None = None
    better: str | None = None
    worst_value: float | None = None
    mean_value: float | None = None
    sites: list[str | None] = []
    dual_weights: list[float] = []
    means: dict[str, float] = {}
    absent: list[Count] = []
    non_finite: list[Count] = []
    warnings: list[str] = []
    tensor_residual_norms: dict[str, float] = {}


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
        return checked(read_plain(path), shape, str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def checked(value: object, shape: type[_T], where: str) -> _T:
    """A value, or JSON in bytes, as this shape; :class:`DataError` if it is of another."""
    try:
        return shape.model_validate_json(value) if isinstance(value, bytes) else shape.model_validate(value)
    except ValidationError as error:
        raise _damaged(error.errors(include_url=False, include_context=False)[0], where) from error


def check_values(value: object, shape: type[BaseModel], where: str) -> None:
    """:class:`DataError` if something that is there is of another type. What is missing is left to whoever
    needs it: an older version may not have written it."""
    try:
        shape.model_validate(value)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False):
            if problem["type"] != "missing":
                raise _damaged(problem, where) from error


@contextlib.contextmanager
def damage_named(where: str) -> Iterator[None]:
    """Within the block, values that are typed but do not go together are a :class:`DataError`."""
    try:
        yield
    except KeyError as error:
        raise DataError(f"{where}: lacks {error}; was it written by another version of afl?") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{where}: damaged, or of another version of afl: {error}") from error


def _damaged(problem: ErrorDetails, where: str) -> DataError:
    place = ".".join(map(str, problem["loc"]))
    what = f"{place}: {problem['msg']}" if place else problem["msg"]
    return DataError(f"{where}: damaged, or of another version of afl: {what}")
