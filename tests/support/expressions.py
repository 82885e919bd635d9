"""What a PromQL expression names."""

from __future__ import annotations

import re

_SELECTOR = re.compile(r"\b((?:afl|process)_\w+|up\b)(\{[^}]*\})?")
_LABELS = re.compile(r"\b(?:on|by|ignoring|without|group_left|group_right)\s*\(([^)]*)\)")
_MATCHERS = re.compile(r"(\w+)\s*(?:=~|!=|=)")


def selectors(expression: str) -> list[str]:
    """Each metric that it reads, with its matchers."""
    return [name + matchers for name, matchers in _SELECTOR.findall(_without_grouping(expression))]


def metrics(expression: str) -> set[str]:
    """The names of the metrics that it reads."""
    return {name for name, _ in _SELECTOR.findall(_without_grouping(expression))}


def labels(expression: str) -> set[str]:
    """The labels that it groups, joins and matches by."""
    grouped = {label.strip() for found in _LABELS.findall(expression) for label in found.split(",")}
    matched = {label for selector in selectors(expression) for label in _MATCHERS.findall(selector)}
    return (grouped | matched) - {""}


def _without_grouping(expression: str) -> str:
    return _LABELS.sub("", expression)
