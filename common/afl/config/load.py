"""Reading a configuration: the file, its overrides, and every problem in them at once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Final, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from afl.config import describe, explain, rules
from afl.config.address import Address
from afl.config.problems import InvalidConfigError, KeyPath, Problem, dotted, shown
from afl.config.schema import BROKEN_RULE, Config, Section
from afl.config.source import LARGEST_TEXT, Origin, Tree, Value, read_yaml
from afl.core.algorithms.algorithm import KEYS
from afl.paths import opened

_S = TypeVar("_S", bound=Section)

Rules: TypeAlias = Callable[[Mapping[str, Any]], Iterator[Problem]]
"""What values, as they are written, break of what several keys demand of each other."""

_SECTIONS: Final = {
    name: model
    for name, field in Config.model_fields.items()
    if (model := describe.section(field)) is not None
}

_NOT_PLAIN: Final = re.compile(r"[-\[\]{}&*!|>%@`#,?]|[^'\"].*(?:: | #|:$)")
"""Text without quotes that YAML reads as something else, by its beginning or by what is in it."""

_LARGEST_FILE: Final = 4 * LARGEST_TEXT
"""Bytes: what is read at most, since no character of UTF-8 has more than four."""


def load_config(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The configuration in a YAML file.

    Args:
        path: the file.
        overrides: ``a.b=c`` each, as given with ``--set``; ``c`` is YAML. A later one wins.
        environment: what ``${NAME}`` and ``${NAME:-default}`` are filled in from; by default the process's.

    Raises:
        InvalidConfigError: a ConfigError that shows every problem found: where, the key, the value, what
            would be accepted, and for a wrong name the nearest right one.
    """
    environment = os.environ if environment is None else environment
    return config_from_text(_text(Path(path)), str(path), overrides, environment)


def config_from_text(
    text: str,
    source: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Config:
    """The configuration in YAML, such as :func:`afl.config.dump_config` gave; else as :func:`load_config`."""
    tree = _read(text, source, environment, Config)
    for override in overrides:
        _apply(override, tree, environment)
    return _validated(tree, source, Config, _broken_rules)


def load_section(path: Path, model: type[_S], broken_rules: Rules) -> tuple[_S, Tree]:
    """What is no run's configuration but written like one, such as a site's policy, and where each value
    stands; errors as of :func:`load_config`."""
    tree = _read(_text(path), str(path), os.environ, model)
    return _validated(tree, str(path), model, broken_rules), tree


def config_from_mapping(values: Mapping[str, Any], source: str = "the configuration") -> Config:
    """The configuration in plain values, nested as in the file; else as :func:`load_config`."""
    return _validated(Tree(dict(values)), source, Config, _broken_rules)


def _read(text: str, source: str, environment: Mapping[str, str], model: type[Section]) -> Tree:
    tree = read_yaml(text, source, environment)
    if not isinstance(tree.value, dict):
        found = "an empty file" if tree.value is None else f"{shown(tree.value)} at the top"
        accepted = f"sections and keys: {', '.join(model.model_fields)}"
        raise _refusal(source, found, accepted, where=tree.origin(()).where)
    return tree


def _text(path: Path) -> str:
    try:
        with opened(path) as file:
            data = file.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            found, accepted = f"more than {_LARGEST_FILE:,} bytes", f"at most {LARGEST_TEXT:,} characters"
            raise _refusal(str(path), found, accepted)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        found = f"the byte 0x{error.object[error.start]:02x}, which is not UTF-8"
        raise _refusal(str(path), found, "text in UTF-8", where=f"{path}:{line}") from error
    except FileNotFoundError as error:
        raise _refusal(str(path), "no such file", "a YAML file", note=_siblings(path)) from error
    except IsADirectoryError as error:
        raise _refusal(str(path), "a directory", "a YAML file", note=_siblings(path / "_")) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(str(path), f"a file that cannot be read ({reason})", "a readable YAML file") from error


def _siblings(path: Path) -> str | None:
    """A sentence on the YAML files beside ``path``, for a person who mistyped its name."""
    try:
        names = sorted(other.name for other in path.parent.iterdir() if other.suffix in {".yaml", ".yml"})
    except (OSError, ValueError):
        return None
    return f"{path.parent} holds {', '.join(names[:10])}" if names else None


def _refusal(
    source: str, found: str, accepted: str, *, where: str = "", note: str | None = None
) -> InvalidConfigError:
    return InvalidConfigError(source, [Problem((), found, accepted, note=note, where=where or source)])


def _apply(override: str, tree: Tree, environment: Mapping[str, str]) -> None:
    """Put one ``--set a.b=c`` into the tree; what is wrong with it goes to the tree's problems."""
    where = f"--set {override}"
    key, equals, text = override.partition("=")
    path: KeyPath = tuple(key.strip().split("."))
    if not equals or "" in path:
        wrong = Problem((), shown(override), "key=value, such as algorithm.rounds=100", where=where)
        tree.problems.append(wrong)
        return
    if _takes_only_text(path) and _NOT_PLAIN.match(text):
        # The shell has taken the quotes: [::1]:50051 is no list here, and what follows " #" no comment.
        text = json.dumps(text, ensure_ascii=False)
    try:
        value = read_yaml(text, where, environment, with_lines=False)
    except InvalidConfigError as error:
        tree.problems += [replace(problem, key=path, where=where) for problem in error.problems]
        return
    section = tree.value
    for depth, part in enumerate(path[:-1], start=1):
        assert isinstance(section, dict)
        if section.get(str(part)) is None:
            section[str(part)] = {}
            tree.origins[path[:depth]] = value.origin(())
        section = section[str(part)]
        if not isinstance(section, dict):
            found = f"{shown(section)} at {dotted(path[:depth])}, which is no section"
            accepted = f"a key inside a section, or --set {dotted(path[:depth])}=..."
            tree.problems.append(Problem(path, found, accepted, where=where))
            return
    assert isinstance(section, dict)
    section[str(path[-1])] = value.value
    tree.origins = {key: origin for key, origin in tree.origins.items() if key[: len(path)] != path}
    tree.problems = [problem for problem in tree.problems if problem.key[: len(path)] != path]
    tree.origins.update({(*path, *below): origin for below, origin in value.origins.items()})
    tree.origins.setdefault(path, value.origin(()) if value.origins else Origin(where))
    tree.problems += [replace(problem, key=(*path, *problem.key)) for problem in value.problems]


def _takes_only_text(path: KeyPath) -> bool:
    """Whether a key's value is text, a path or an address, or null, and can be nothing else."""
    model: type[BaseModel] | None = Config
    field = None
    for part in path:
        field = model.model_fields.get(str(part)) if model is not None else None
        model = describe.section(field) if field is not None else None
    return field is not None and {NoneType, *describe.types_of(field)} <= {NoneType, str, Path, Address}


def _validated(tree: Tree, source: str, model: type[_S], broken_rules: Rules) -> _S:
    assert isinstance(tree.value, dict)
    made = None
    # A section without a line in it is null to YAML.
    sections = _SECTIONS if model is Config else {}
    values = {key: {} if value is None and key in sections else value for key, value in tree.value.items()}
    problems = [*tree.problems, *broken_rules(values)]
    try:
        made = model.model_validate(values)
    except ValidationError as error:
        problems += [
            explain.explained(line["loc"], line["type"], line["input"], line.get("ctx", {}), model)
            for line in error.errors(include_url=False)
            if line["type"] != BROKEN_RULE
        ]
    problems += _ambiguous(tree, model)
    if problems or made is None:
        assert problems, "a rule of a model that was not checked on the values as written"
        raise InvalidConfigError(source, _arranged(problems, tree))
    return made


def _arranged(problems: Sequence[Problem], tree: Tree) -> list[Problem]:
    """One problem a key, the first found, each with its place; ordered as the file, then ``--set``."""
    order = {path: position for position, path in enumerate(_preorder(tree.value))}
    first: dict[tuple[KeyPath, str], Problem] = {}
    for problem in problems:
        origin = tree.origin(problem.key)
        note = problem.note
        if note is None and not problem.where and origin.written is not None and problem.key in tree.origins:
            note = f"filled in from {origin.written}"
        located = replace(problem, note=note, where=problem.where or origin.where)
        first.setdefault((problem.key, problem.where if not problem.key else ""), located)

    def position(problem: Problem) -> tuple[bool, int]:
        path = problem.key
        while path and path not in order:
            path = path[:-1]
        return problem.where.startswith("--set "), order.get(path, 0)

    return sorted(first.values(), key=position)


def _preorder(value: Value, path: KeyPath = ()) -> Iterator[KeyPath]:
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    )
    for key, child in children:
        yield from _preorder(child, (*path, key))


def _ambiguous(tree: Tree, model: type[Section]) -> Iterator[Problem]:
    """Unquoted on, off, yes and no where any value goes, so that no type can tell which was meant."""
    for path, origin in tree.origins.items():
        if origin.word is not None and explain.field_at(path, model)[0] is None:
            found = f"{origin.word}, a boolean to some readers of YAML and text to others"
            accepted = f'true or false, or "{origin.word}" in quotes if the text is meant'
            yield Problem(path, found, accepted)


def _broken_rules(values: Mapping[str, Any]) -> Iterator[Problem]:
    for name, model in _SECTIONS.items():
        section = values.get(name, {})
        if name not in rules.RULES or not isinstance(section, Mapping):
            continue
        defaults = {
            key: field.default for key, field in model.model_fields.items() if not field.is_required()
        }
        for problem in rules.RULES[name]({**defaults, **section}):
            yield replace(problem, key=(name, *problem.key))
    if isinstance(section := values.get("algorithm"), Mapping):
        about = rules.loaded(str(section.get("name")))
        own = [option.name for option in about.options] if about is not None else []
        for key, value in section.items():
            if key not in KEYS and key not in own:
                yield explain.unknown_key(("algorithm", key), value, own)
    yield from rules.whole(values)
