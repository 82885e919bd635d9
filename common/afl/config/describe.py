"""What a schema field accepts, in words, made from its type and bounds so that the two cannot differ."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from afl.config.quantities import Duration, Size


@dataclass(frozen=True)
class Unit:
    """The unit of a field, in its annotation."""

    name: str


@dataclass(frozen=True)
class Accepts:
    """What a field accepts, in its annotation, where type and bounds do not say it."""

    text: str


@dataclass(frozen=True)
class OneOf:
    """The names of which a field takes one, in its annotation: those that are installed when it is asked."""

    names: Callable[[], Sequence[str]]


@dataclass(frozen=True)
class Null:
    """What null means for a field, in its annotation."""

    meaning: str


def accepted(field: FieldInfo) -> str:
    """What a field accepts: ``a whole number, 1 to 100``."""
    return _accepted(field.annotation, field.metadata)


def unit(field: FieldInfo) -> str:
    """The unit of a field's value; empty where it has none."""
    for item in field.metadata:
        if isinstance(item, Unit):
            return item.name
    arms = _unwrapped(field)
    return "s" if Duration in arms else "bytes" if Size in arms else ""


def choices(field: FieldInfo) -> list[str]:
    """The words among which a field's value is chosen; empty where it is not."""
    for item in field.metadata:
        if isinstance(item, OneOf):
            return list(item.names())
    return [
        word
        for arm in _arms(field.annotation)
        if get_origin(arm) is Literal
        for word in get_args(arm)
        if word is not None
    ]


def section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section of its own; None for a value."""
    for arm in _unwrapped(field):
        if isinstance(arm, type) and issubclass(arm, BaseModel):
            return arm
    return None


def is_free(field: FieldInfo) -> bool:
    """Whether a field is a section that takes any key."""
    return any(get_origin(arm) is dict for arm in _unwrapped(field))


def takes_null(field: FieldInfo) -> bool:
    """Whether a field may be null."""
    return type(None) in _unwrapped(field)


def _unwrapped(field: FieldInfo) -> list[Any]:
    """The types a field may have, without their bounds."""
    return [get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in _arms(field.annotation)]


def _arms(annotation: Any) -> Sequence[Any]:
    """The members of a union; the type itself if it is none."""
    return get_args(annotation) if get_origin(annotation) in {Union, types.UnionType} else (annotation,)


def _accepted(annotation: Any, metadata: Iterable[Any]) -> str:
    metadata = _flattened(metadata)
    for item in metadata:
        if isinstance(item, Accepts):
            return item.text
        if isinstance(item, OneOf):
            return _either(item.names())
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _accepted(inner, [*more, *metadata])
    null = next((f"null ({item.meaning})" for item in metadata if isinstance(item, Null)), "null")
    arms = _arms(annotation)
    if len(arms) > 1:
        words = [null if arm is type(None) else _accepted(arm, metadata) for arm in arms]
        return f"{', '.join(words[:-1])}, or {words[-1]}"
    if get_origin(annotation) is Literal:
        return _either(get_args(annotation))
    return _kind(annotation) + _bounds(metadata)


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _kind(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section with {', '.join(annotation.model_fields)}"
    if annotation in _KINDS:
        return _KINDS[annotation]
    assert get_origin(annotation) is dict, f"no words for {annotation}"
    return "a section of any keys"


_KINDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    Duration: "a duration (250ms, 30s, 5m, 1h, or a number of seconds)",
    Size: "a size (64KiB, 1MiB, 2GB, or a number of bytes)",
}


def _flattened(metadata: Iterable[Any]) -> list[Any]:
    """The metadata, with that of ``Field(...)`` inside a union's member taken out of its wrapper."""
    flat: list[Any] = []
    for item in metadata:
        flat.extend(item.metadata if isinstance(item, FieldInfo) else [item])
    return flat


def _bounds(metadata: Iterable[Any]) -> str:
    lowest = above = highest = None
    for item in metadata:
        if isinstance(item, Gt):
            above = item.gt
        elif isinstance(item, Ge):
            lowest = item.ge
        elif isinstance(item, Le):
            highest = item.le
    if above is not None:
        return f" above {_bound(above)}" + (f" and at most {_bound(highest)}" if highest is not None else "")
    if lowest is not None and highest is not None:
        return f" from {_bound(lowest)} to {_bound(highest)}"
    assert lowest is None, "no words for a lower bound alone"
    assert highest is None, "no words for an upper bound alone"
    return ""


def _bound(bound: Any) -> str:
    """A bound as a person would write it; 2147483647 is 2^31 - 1."""
    if isinstance(bound, float) and not isinstance(bound, Duration):
        return f"{bound:g}".replace("e+", "e")
    return "2^31 - 1" if bound == 2**31 - 1 and not isinstance(bound, Size) else str(bound)
