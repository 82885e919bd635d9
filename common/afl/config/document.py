"""The schema as documentation: ``afl-server --help-config``, and what the reference's table is made of."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from afl.config import describe
from afl.config.compressors import BITS_ACCEPTED, BITS_TAKERS, RATIO_ACCEPTED, RATIO_TAKERS, listed
from afl.config.schema import Algorithm, Compressor, Config, Dual
from afl.core.algorithms.algorithm import SHARED_OPTIONS
from afl.core.algorithms.algorithm import Algorithm as AnAlgorithm
from afl.core.algorithms.builtin import BUILT_IN
from afl.core.algorithms.registry import algorithm_named, algorithm_names, users_of
from afl.core.dual import DualRule, rule_named, rule_names
from afl.core.messages import BITS

_NARROWEST = 72

_RATIO = (
    "share of the values that is sent: k = max(1, round(ratio * d)) of d; theory is the least that keeps"
    " AFL-BR's rate, from the number of workers"
)

_BITS = (
    "of each value, which is then an integer on a grid that all share; entropy-coded where that is shorter;"
    " what is rounded away is sent later"
)

_NOTE = """\
A value may hold ${NAME} or ${NAME:-default}, filled in from the environment ($${ is the text itself); quoted,
it stays text. --set section.key=value overrides the file and may be given several times; text in it needs no
quotes but the shell's."""


@dataclass(frozen=True)
class Key:
    """One key of the configuration: its dotted name, and what is said of it.

    A default is as it would be written, or ``required``; the unit is empty where there is none.
    """

    name: str
    accepts: str
    default: str
    unit: str
    description: str
    is_section: bool = False


def all_keys(of: type[BaseModel] = Config) -> list[Key]:
    """Every key, sections before what is in them."""
    return list(_keys(of, ""))


def help_text(width: int = 100) -> str:
    """The schema for a terminal of ``width`` columns."""
    width = max(width, _NARROWEST)
    documented = all_keys()
    name_width = max(len(key.name) for key in documented)
    default_width = max(len(key.default) for key in documented)
    indent = " " * (name_width + default_width + 4)
    wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False, break_long_words=False)
    lines = [
        *wrap(_NOTE),
        "",
        f"{'KEY':<{name_width}}  {'DEFAULT':<{default_width}}  MEANING [UNIT], ACCEPTED",
    ]
    for key in documented:
        head = f"{key.name:<{name_width}}  {key.default:<{default_width}}  "
        if key.is_section and "." not in key.name:
            lines += ["", *wrap(key.description, initial_indent=head, subsequent_indent=indent)]
        else:
            about = f"{key.description} [{key.unit}]" if key.unit else key.description
            lines += wrap(about, initial_indent=head, subsequent_indent=indent)
            lines += wrap(key.accepts, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines) + "\n"


def _keys(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        section = describe.section(field)
        assert field.description, f"{prefix}{name} has no description"
        description = " ".join(field.description.split())
        if model is Algorithm and name in SHARED_OPTIONS - {"eta_q"}:
            users = users_of(name)
            description += f"; {listed(users)} only" if len(users) < len(BUILT_IN) else ""
        is_plain_section = section is not None and section is not Compressor
        default = "" if is_plain_section else _default(field)
        accepts = "a section" if is_plain_section else describe.accepted(field)
        unit = describe.unit(field)
        yield Key(prefix + name, accepts, default, unit, description, is_section=section is not None)
        if section is not None:
            yield from _keys(section, f"{prefix}{name}.")
    own: Iterable[type[DualRule] | AnAlgorithm] = ()
    if model is Algorithm:
        own = map(algorithm_named, algorithm_names())
    elif model is Dual:
        own = map(rule_named, rule_names())
    for owner in own:
        for option in owner.options:
            default = "required" if option.default is None else json.dumps(option.default)
            description = f"{option.description}; {owner.name} only"
            yield Key(prefix + option.name, option.accepted, default, option.unit, description)
    if model is Compressor:
        description = f"{_RATIO}; {listed(RATIO_TAKERS)} only"
        yield Key(f"{prefix}ratio", RATIO_ACCEPTED, "required", "k/d", description)
        description = f"{_BITS}; {listed(BITS_TAKERS)}, and additive compressors of your own, only"
        yield Key(f"{prefix}{BITS}", BITS_ACCEPTED, "float32", "bits a value", description)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return json.dumps(default) if default is None or isinstance(default, bool) else str(default)
