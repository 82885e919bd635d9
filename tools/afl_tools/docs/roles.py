"""An extension of Griffe, which reads the docstrings for the site: Sphinx's roles become code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")
_LITERAL = re.compile(r"``([^`]+)``")


def as_markdown(docstring: str) -> str:
    """A docstring whose roles and literals are code as Markdown has it."""
    return _LITERAL.sub(r"`\1`", _ROLE.sub(r"`\1`", docstring))


class Roles(Extension):
    """``:class:`Task``` reads well in an editor; Markdown has backticks only."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Of every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
