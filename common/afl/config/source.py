"""YAML text as plain values, each with the place where it stands; ``${ENV}`` is filled in on the way.

Scalars follow YAML 1.2's core schema, in which ``1e-3`` is a number, ``on`` and ``no`` are text, and ``1:30``
is not ninety; PyYAML's own loader follows YAML 1.1, where each of these is otherwise. Only what a
configuration needs is taken: mappings with text keys, lists and scalars. Nothing is constructed from tags,
and size, depth and the expansion of aliases are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import yaml

from afl.config.problems import InvalidConfigError, KeyPath, Problem, shown

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"

LARGEST_TEXT: Final = 256 * 1024
"""Characters. A configuration has a few thousand; PyYAML reads about 100,000 a second."""

MOST_VALUES: Final = 10_000
"""Values after aliases are expanded: a "billion laughs" file is refused before it grows."""

DEEPEST: Final = 32

AMBIGUOUS_WORDS: Final = frozenset({"yes", "no", "on", "off"})
"""Booleans to YAML 1.1, text to YAML 1.2, whatever their case."""

_WORDS: Final[Mapping[str, bool | None]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_NUMBERS: Final[Mapping[str, Callable[[str], int | float]]] = {
    r"[-+]?[0-9]{1,400}": int,
    r"0x[0-9a-fA-F]{1,400}|0o[0-7]{1,400}": partial(int, base=0),
    r"(?=.*[.eE])[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?": float,
    r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)": lambda text: float(text.replace(".", "")),
}

_VARIABLE: Final = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})?", re.ASCII)


@dataclass(frozen=True)
class Origin:
    """Where a value comes from."""

    where: str
    """``file:line`` or the ``--set`` text."""
    written: str | None = None
    """The text before ``${ENV}`` was filled in, where it was."""
    word: str | None = None
    """The value, where it is an unquoted word that older YAML reads as a boolean."""


@dataclass
class Tree:
    """Values, the origin of each by its path, and what was wrong in reading them."""

    value: Value
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def origin(self, path: KeyPath) -> Origin:
        """The origin of the value at ``path``, or of the nearest section around it that exists."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, Origin(""))


def read_yaml(text: str, source: str, environment: Mapping[str, str], *, with_lines: bool = True) -> Tree:
    """One YAML document; messages call it ``source``, and the line in it ``with_lines``.

    ``${ENV}`` is filled in from ``environment``. ``${ENV:-text}`` stands for ``text`` where the variable is
    unset or empty, ``$${`` for ``${`` itself. An unquoted value is typed after it was filled in, a quoted one
    stays text. What leaves the rest readable (a key given twice, an undefined variable) is in ``problems``.

    Raises:
        InvalidConfigError: if it is not YAML, or more than a configuration can be.
    """
    reader = _Reader(source, environment, with_lines=with_lines)
    if len(text) > LARGEST_TEXT:
        raise reader.refusal(None, f"{len(text):,} characters", f"at most {LARGEST_TEXT:,}")
    try:
        root = reader.compose(text)
        if root is not None:
            reader.tree.value = reader.values(root, ())
    except yaml.YAMLError as error:
        raise reader.syntax_error(error, text) from error
    return reader.tree


def resolve_plain(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar by YAML 1.2's core schema."""
    if text in _WORDS:
        return _WORDS[text]
    for form, number in _NUMBERS.items():
        if re.fullmatch(form, text, re.ASCII):
            return number(text)
    return text


class _Composer(yaml.SafeLoader):
    """PyYAML's nodes, each with its line; tags and what would expand for ever are refused before it grows."""

    def __init__(self, text: str, reader: _Reader) -> None:
        super().__init__(text)
        self._reader = reader
        self._open: list[str | None] = []
        """The anchors of the nodes around the next one."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """The next node with all that is in it."""
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        tag, anchor = getattr(event, "tag", None), getattr(event, "anchor", None)
        if len(self._open) > DEEPEST:
            raise self._reader.too_deep(event, len(self._open))
        if isinstance(event, yaml.AliasEvent):
            if anchor in self._open or anchor not in self.anchors:
                found = f"*{anchor}, with no &{anchor} that ended before it"
                raise self._reader.refusal(_line(event), found, "an alias of an earlier value")
        elif tag is not None:
            accepted = "values without tags (nothing that starts with !)"
            raise self._reader.refusal(_line(event), f"the tag {tag}", accepted)
        else:
            # A later anchor of the same name takes its place, as YAML has it.
            self.anchors.pop(anchor, None)
        self._open.append(anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        return node


class _Reader:
    """Turns one document's nodes into values."""

    def __init__(self, source: str, environment: Mapping[str, str], *, with_lines: bool) -> None:
        self.tree = Tree(None)
        self._source = source
        self._environment = environment
        self._with_lines = with_lines
        self._values = 0

    def where(self, line: int | None) -> str:
        return f"{self._source}:{line}" if self._with_lines and line is not None else self._source

    def refusal(self, line: int | None, found: str, accepted: str) -> InvalidConfigError:
        return InvalidConfigError(self._source, [Problem((), found, accepted, where=self.where(line))])

    def too_deep(self, place: yaml.Event | yaml.Node, depth: int) -> InvalidConfigError:
        return self.refusal(_line(place), f"values nested {depth} deep", f"at most {DEEPEST} levels")

    def syntax_error(self, error: yaml.YAMLError, text: str) -> InvalidConfigError:
        if isinstance(error, yaml.reader.ReaderError):
            line = text.count("\n", 0, error.position) + 1
            return self.refusal(line, f"the character U+{error.character:04X}", "printable text")
        accepted = (
            "YAML: a 'key: value' a line, sections indented by spaces, text with : # { [ & * ! % @ in quotes"
        )
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
            found = f"at column {mark.column + 1}: {_in_words(error, mark, text)}"
            return self.refusal(mark.line + 1, found, accepted)
        return self.refusal(None, str(error), accepted)

    def compose(self, text: str) -> yaml.Node | None:
        """The root node of the only document; None if there is none."""
        composer = _Composer(text, self)
        root = composer.get_node() if composer.check_node() else None
        if composer.check_node():
            line = _line(composer.peek_event())  # type: ignore[no-untyped-call]
            raise self.refusal(line, "a second document", "one document, without a further ---")
        return root

    def values(self, node: yaml.Node, path: KeyPath) -> Value:
        """The value of ``node``, with everything below it entered into the tree's origins."""
        self._values += 1
        if self._values > MOST_VALUES:
            found = f"more than {MOST_VALUES:,} values, aliases expanded"
            raise self.refusal(_line(node), found, f"at most {MOST_VALUES:,}")
        if len(path) > DEEPEST:
            raise self.too_deep(node, len(path))
        self.tree.origins.setdefault(path, Origin(self.where(_line(node))))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.values(item, (*path, position)) for position, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        result: dict[str, Value] = {}
        for key, child in node.value:
            name, where = self._key(key), self.where(_line(key))
            below = (*path, name)
            if name in result:
                found = f"a second value; the first is at {self.tree.origins[below].where}"
                self._problem(below, found, "each key once in a section", where)
            else:
                self.tree.origins[below] = Origin(where)
                result[name] = self.values(child, below)
        return result

    def _problem(self, path: KeyPath, found: str, accepted: str, where: str) -> None:
        self.tree.problems.append(Problem(path, found, accepted, where=where))

    def _key(self, key: yaml.Node) -> str:
        if not isinstance(key, yaml.ScalarNode):
            raise self.refusal(_line(key), "a list or a mapping as a key", "keys that are text")
        if key.value == "<<" and key.style is None:
            accepted = "each key written out, or a whole section as an alias"
            raise self.refusal(_line(key), "the merge key <<", accepted)
        return str(key.value)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Value:
        where = self.tree.origins[path].where
        text, is_plain = self._filled_in(node.value, path, where), node.style is None
        word = text if is_plain and text.lower() in AMBIGUOUS_WORDS else None
        self.tree.origins[path] = Origin(where, None if text == node.value else node.value, word)
        if any("\ud800" <= character <= "\udfff" for character in text):
            accepted = "text without halves of surrogate pairs (\\ud800 to \\udfff)"
            self._problem(path, shown(text), accepted, where)
            return ""
        return resolve_plain(text) if is_plain else text

    def _filled_in(self, text: str, path: KeyPath, where: str) -> str:
        def value(match: re.Match[str]) -> str:
            name, default = match[1], match[2]
            if match[0] == "$${":
                return "${"
            if name is None:
                accepted = "${NAME} or ${NAME:-default}; $${ stands for the two characters themselves"
                self._problem(path, shown(text), accepted, where)
                return ""
            found = self._environment.get(name)
            if found is None and default is None:
                accepted = f"{name} set in the environment, or ${{{name}:-default}}"
                self._problem(path, f"{text}, and {name} is not set", accepted, where)
            return found or default or ""

        return _VARIABLE.sub(value, text)


def _line(place: yaml.Event | yaml.Node) -> int:
    """The line on which a YAML event or node begins, counted from 1."""
    assert place.start_mark is not None
    return int(place.start_mark.line) + 1


def _in_words(error: yaml.MarkedYAMLError, mark: yaml.Mark, text: str) -> str:
    """What the parser says, and first what it most often means."""
    detail = "; ".join(part for part in (error.context, error.problem) if part)
    if "'\\t'" in detail:
        return f"a tab, where YAML takes spaces only ({detail})"
    if "mapping values are not allowed" in detail:
        return f"a second colon, or a line indented under a value, or no colon in the line before ({detail})"
    if "flow" in detail and any("${" in line for line in text.splitlines()[mark.line : mark.line + 1]):
        return f"${{...}} between {{ }} or [ ], where it must be in quotes ({detail})"
    return detail
