"""The schema as documentation: ``afl-server --help-config``, and what the reference's table is made of."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from afl.config import describe
from afl.config.compressors import OPTIONS
from afl.config.schema import Algorithm, Compressor, Config
from afl.core.algorithms.registry import algorithm_named, algorithm_names

_NARROWEST = 72

_NOTE = """\
A value may hold ${NAME} or ${NAME:-default}, filled in from the environment ($${ is the text itself); quoted,
it stays text. --set section.key=value overrides the file and may be given several times."""


@dataclass(frozen=True)
class Key:
    """One key of the configuration, as documented.

    Attributes:
        name: from the root, dotted.
        accepts: type and bounds, in words.
        default: as it would be written, or ``required``.
        unit: empty where it has none.
        description: what it means.
        is_section: whether it holds other keys.
    """

    name: str
    accepts: str
    default: str
    unit: str
    description: str
    is_section: bool = False


def all_keys() -> list[Key]:
    """Every key, sections before what is in them."""
    return list(_keys(Config, ""))


def help_text(width: int = 100) -> str:
    """The schema for a terminal of ``width`` columns."""
    width = max(width, _NARROWEST)
    documented = all_keys()
    name_width = max(len(key.name) for key in documented)
    default_width = max(len(key.default) for key in documented)
    lines = []
    for key in documented:
        is_new_part = key.is_section and "." not in key.name
        if is_new_part:
            lines.append("")
        head = f"{key.name:<{name_width}}  {key.default:<{default_width}}  "
        unit = f" [{key.unit}]" if key.unit else ""
        about = key.description if is_new_part else f"{key.description}{unit}"
        lines += _wrapped(about, head, width)
        if not is_new_part:
            lines += _wrapped(key.accepts, " " * len(head), width)
    heading = f"{'KEY':<{name_width}}  {'DEFAULT':<{default_width}}  MEANING [UNIT], ACCEPTED"
    note = textwrap.wrap(_NOTE, width)
    return "\n".join([*note, "", heading, *lines]) + "\n"


def _wrapped(text: str, head: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _keys(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        section = describe.section(field)
        assert field.description, f"{prefix}{name} has no description"
        is_plain_section = section is not None and section is not Compressor
        default = "" if is_plain_section else _default(field)
        accepts = "a section" if is_plain_section else describe.accepted(field)
        yield Key(
            prefix + name,
            accepts,
            default,
            describe.unit(field),
            field.description,
            is_section=section is not None,
        )
        if section is not None:
            yield from _keys(section, f"{prefix}{name}.")
    if model is Algorithm:
        for algorithm in map(algorithm_named, algorithm_names()):
            for own in algorithm.options:
                default = "required" if own.default is None else json.dumps(own.default)
                description = f"{own.description}; {algorithm.name} only"
                yield Key(prefix + own.name, own.accepted, default, own.unit, description)
    if model is Compressor:
        for name, option in OPTIONS.items():
            description = f"{option.description}; {' and '.join(option.compressors)} only"
            yield Key(prefix + name, option.accepts, option.default or "required", option.unit, description)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default)
