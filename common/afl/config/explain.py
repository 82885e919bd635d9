"""The schema's validation errors in words: key, value, what would be accepted, nearest right name.

Nothing of the validating library shows: no type name, no class name, no address of its manual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from afl.config import describe
from afl.config.problems import KeyPath, Problem, dotted, nearest, shown
from afl.config.schema import Config
from afl.config.source import resolve_plain

_WORDS_FOR_NONE: Final = frozenset({"off", "no", "none", "false", "never", "disabled"})


def explained(location: KeyPath, kind: str, value: object, context: Mapping[str, Any]) -> Problem:
    """One validation error as a problem.

    Args:
        location: pydantic's location of it.
        kind: pydantic's type of it.
        value: the value it is about.
        context: pydantic's further data; holds ``error`` where a validator of ours raised it.
    """
    field, path = field_at(location)
    if kind == "extra_forbidden":
        return unknown_key(location, value)
    if field is None:
        accepted = "text, a finite number, true, false, null, a list or a mapping"
        return Problem(location, shown(value), accepted)
    accepted = describe.accepted(field)
    if kind == "missing":
        return Problem(path, "nothing", accepted)
    note = _note(field, kind, value, context)
    return Problem(path, shown(value), accepted, nearest=nearest(value, describe.choices(field)), note=note)


def _note(field: FieldInfo, kind: str, value: object, context: Mapping[str, Any]) -> str | None:
    if describe.takes_null(field) and str(value).lower() in _WORDS_FOR_NONE:
        return "for none, write null"
    if not isinstance(value, str):
        return None
    if kind == "value_error":
        return str(context["error"])
    is_quoted_number = kind.endswith("_type") and not isinstance(resolve_plain(value), str | None)
    return "the quotes make it text; leave them out" if is_quoted_number else None


def unknown_key(location: KeyPath, value: object, also: Sequence[str] = ()) -> Problem:
    """A key that its section does not have; ``also`` are keys it has besides those of the schema."""
    name = str(location[-1])
    known = [*_section(location[:-1]).model_fields, *also]
    written = name.replace("-", "_")
    elsewhere = [dotted(key) for key in _all_keys(Config) if key[-1] == written]
    meant = nearest(name, known)
    if elsewhere and written not in known:
        meant = elsewhere[0]
    return Problem(
        location, f"{shown(value)}, under an unknown key", f"one of {', '.join(known)}", nearest=meant
    )


def names(section: type[BaseModel]) -> str:
    """The keys of a section, for a message."""
    return ", ".join(section.model_fields)


def _section(path: KeyPath) -> type[BaseModel]:
    model: type[BaseModel] = Config
    for part in path:
        inner = describe.section(model.model_fields[str(part)])
        assert inner is not None
        model = inner
    return model


def _all_keys(model: type[BaseModel], path: KeyPath = ()) -> list[KeyPath]:
    keys: list[KeyPath] = []
    for name, field in model.model_fields.items():
        keys.append((*path, name))
        inner = describe.section(field)
        if inner is not None:
            keys.extend(_all_keys(inner, (*path, name)))
    return keys


def field_at(location: KeyPath) -> tuple[FieldInfo | None, KeyPath]:
    """The deepest field on the way to ``location``, and its path; no field inside a free section.

    What pydantic appends to a location to tell the members of a union apart is thereby left out.
    """
    model: type[BaseModel] | None = Config
    field: FieldInfo | None = None
    for depth, part in enumerate(location):
        if model is None:
            free = field is not None and describe.is_free(field)
            return (None, location) if free else (field, location[:depth])
        if part not in model.model_fields:
            return None, location
        field = model.model_fields[str(part)]
        model = describe.section(field)
    return field, location
