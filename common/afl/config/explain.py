"""The schema's validation errors in words: key, value, what would be accepted, nearest right name.

Nothing of the validating library shows: no type name, no class name, no address of its manual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from afl.config import describe
from afl.config.problems import KeyPath, Problem, dotted, nearest, shown
from afl.config.schema import Config, Section
from afl.config.source import resolve_plain

_WORDS_FOR_NONE: Final = frozenset({"off", "no", "none", "false", "never", "disabled"})


def explained(
    location: KeyPath, kind: str, value: object, context: Mapping[str, Any], root: type[Section] = Config
) -> Problem:
    """One validation error of pydantic's; ``context`` holds ``error`` where a validator of ours raised it."""
    field, path = field_at(location, root)
    if kind == "extra_forbidden":
        return unknown_key(location, value, root=root)
    if field is None:
        accepted = "text, a finite number, true, false, null, a list or a mapping"
        return Problem(location, shown(value), accepted)
    accepted = describe.accepted(field)
    if kind == "missing":
        return Problem(path, "nothing", accepted)
    note = _note(field, kind, value, context)
    return Problem(path, shown(value), accepted, nearest=nearest(value, describe.choices(field)), note=note)


def _note(field: FieldInfo, kind: str, value: object, context: Mapping[str, Any]) -> str | None:
    if type(None) in describe.types_of(field) and str(value).lower() in _WORDS_FOR_NONE:
        return "for none, write null"
    if kind == "value_error" and isinstance(value, str | list):
        return str(context["error"])
    if not isinstance(value, str):
        return None
    is_quoted_number = kind.endswith("_type") and not isinstance(resolve_plain(value), str | None)
    return "the quotes make it text; leave them out" if is_quoted_number else None


def unknown_key(
    location: KeyPath, value: object, also: Sequence[str] = (), root: type[Section] = Config
) -> Problem:
    """A key that its section does not have; ``also`` are keys it has besides those of the schema."""
    section: type[BaseModel] | None = root
    if len(location) > 1:
        field, _ = field_at(location[:-1], root)
        assert field is not None
        section = describe.section(field)
    assert section is not None
    known = [*section.model_fields, *also]
    name = str(location[-1])
    meant, written = nearest(name, known), name.replace("-", "_")
    if written not in known:
        elsewhere = [dotted(key) for key in _all_keys(root) if key[-1] == written]
        meant = elsewhere[0] if elsewhere else meant
    accepted = f"one of {', '.join(known)}"
    return Problem(location, f"{shown(value)}, under an unknown key", accepted, nearest=meant)


def _all_keys(model: type[BaseModel], path: KeyPath = ()) -> Iterator[KeyPath]:
    for name, field in model.model_fields.items():
        yield (*path, name)
        if (inner := describe.section(field)) is not None:
            yield from _all_keys(inner, (*path, name))


def field_at(location: KeyPath, root: type[Section] = Config) -> tuple[FieldInfo | None, KeyPath]:
    """The deepest field on the way to ``location``, and its path; no field inside a free section.

    What pydantic appends to a location to tell the members of a union apart is thereby left out.
    """
    model: type[BaseModel] | None = root
    field: FieldInfo | None = None
    for depth, part in enumerate(location):
        if model is None:
            is_free = field is not None and any(get_origin(arm) is dict for arm in describe.types_of(field))
            return (None, location) if is_free else (field, location[:depth])
        if part not in model.model_fields:
            return None, location
        field = model.model_fields[str(part)]
        model = describe.section(field)
    return field, location
