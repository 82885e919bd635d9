"""What a schema field accepts, in words, made from its type and bounds so that the two cannot differ."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from afl.config.quantities import Duration, Size


class Unit(str):
    """The unit of a field, in its annotation."""


class Accepts(str):
    """What a field accepts, in its annotation, where type and bounds do not say it."""


class Null(str):
    """What null means for a field, in its annotation."""


@dataclass(frozen=True)
class OneOf:
    """The names of which a field takes one, in its annotation: those that are installed when it is asked."""

    names: Callable[[], Sequence[str]]


_KINDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    Duration: "a duration (250ms, 30s, 5m, 1h, or a number of seconds)",
    Size: "a size (64KiB, 1MiB, 2GB, or a number of bytes)",
}


def accepted(field: FieldInfo) -> str:
    """What a field accepts: ``a whole number, 1 to 100``."""
    return _accepted(field.annotation, field.metadata)


def unit(field: FieldInfo) -> str:
    """The unit of a field's value; empty where it has none."""
    types_ = types_of(field)
    own = "s" if Duration in types_ else "bytes" if Size in types_ else ""
    return next((item for item in field.metadata if isinstance(item, Unit)), own)


def choices(field: FieldInfo) -> list[str]:
    """The words among which a field's value is chosen; empty where it is not."""
    for item in field.metadata:
        if isinstance(item, OneOf):
            return list(item.names())
    literals = [arm for arm in _arms(field.annotation) if get_origin(arm) is Literal]
    return [word for literal in literals for word in get_args(literal)]


def section(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section of its own; None for a value."""
    models = [arm for arm in types_of(field) if isinstance(arm, type) and issubclass(arm, BaseModel)]
    return models[0] if models else None


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def types_of(field: FieldInfo) -> list[Any]:
    """The types a field may have, without their bounds."""
    return [get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in _arms(field.annotation)]


def _arms(annotation: Any) -> Sequence[Any]:
    """The members of a union; the type itself if it is none."""
    return get_args(annotation) if get_origin(annotation) in {Union, types.UnionType} else (annotation,)


def _accepted(annotation: Any, metadata: Iterable[Any]) -> str:
    # That of `Field(...)` inside a union's member is in a wrapper.
    metadata = [
        inner for item in metadata for inner in (item.metadata if isinstance(item, FieldInfo) else [item])
    ]
    for item in metadata:
        if isinstance(item, Accepts):
            return item
        if isinstance(item, OneOf):
            return _either(item.names())
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _accepted(inner, [*more, *metadata])
    arms = _arms(annotation)
    if len(arms) > 1:
        null = next((f"null ({item})" for item in metadata if isinstance(item, Null)), "null")
        words = [null if arm is type(None) else _accepted(arm, metadata) for arm in arms]
        return f"{', '.join(words[:-1])}, or {words[-1]}"
    return _kind(annotation) + _bounds(metadata)


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return _either(get_args(annotation))
    if get_origin(annotation) is dict:
        return "a section of any keys"
    if issubclass(annotation, BaseModel):
        return f"a section with {', '.join(annotation.model_fields)}"
    return _KINDS[annotation]


def _bounds(metadata: Iterable[Any]) -> str:
    names = ("gt", "ge", "le", "lt")
    found = {name: getattr(item, name) for item in metadata for name in names if hasattr(item, name)}
    match {name: _bound(bound) for name, bound in found.items()}:
        case {"gt": above, "le": most}:
            return f" above {above} and at most {most}"
        case {"gt": above}:
            return f" above {above}"
        case {"ge": least, "lt": below}:
            return f" from {least}, below {below}"
        case {"ge": least, "le": most}:
            return f" from {least} to {most}"
    assert not found, f"no words for {found}"
    return ""


def _bound(bound: Any) -> str:
    """A bound as a person would write it; 2147483647 is 2^31 - 1."""
    if isinstance(bound, float) and not isinstance(bound, Duration):
        return f"{bound:g}".replace("e+", "e")
    return "2^31 - 1" if bound == 2**31 - 1 and not isinstance(bound, Size) else str(bound)
