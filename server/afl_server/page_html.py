"""The status page as a document: all that matters is in it, also for browsers without JavaScript."""

from __future__ import annotations

from html import escape
from string import Template
from typing import Any

from afl_server.page_data import PageData
from afl_server.page_words import NONE, WORKER_STATES
from afl_server.static_files import template

ROWS = 10
"""Of the table, before the page's script shows all."""


class PageHtml:
    """Fills in the page's template."""

    def __init__(self, data: PageData) -> None:
        self._data = data
        self._template = Template(template())

    def made(self) -> bytes:
        """The page as it is now; everything that is filled in is escaped."""
        state = self._data.state()
        words = {name: escape(value) for name, value in state["words"].items()}
        rows = "".join(map(_row, self._data.worst_rows(ROWS)))
        done = f"{state['round'] / state['rounds']:.4f}"
        return self._template.substitute(words, phase=state["phase"], done=done, rows=rows).encode()


def _row(row: dict[str, Any]) -> str:
    accuracy = NONE if row["accuracy"] is None else f"{100 * row['accuracy']:.1f} %"
    numbers = [NONE if row[name] is None else f"{row[name]:.4g}" for name in ("loss", "weight", "seconds")]
    cells = [accuracy, *numbers, WORKER_STATES[row["state"]]]
    tail = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr><th scope="row">{int(row["id"])}</th>{tail}</tr>'
