"""A hook of MkDocs: what a page says of files beside the documents.

In the repository such a link leads to the file. The site holds the documents alone, so there it is a link
into the repository where ``repo_url`` names one, and otherwise the file's path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import PurePosixPath
from typing import Any, Protocol

DOCS = "docs"

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)\s]*)\)")
_FENCE = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)


class _Page(Protocol):
    file: Any


def on_page_markdown(markdown: str, *, page: _Page, config: Any, files: Any) -> str:
    """The page with each link that leaves the documents replaced (MkDocs calls this for every page)."""
    del files
    return rewritten(markdown, page.file.src_uri, config.repo_url or "")


def rewritten(markdown: str, source: str, repository: str) -> str:
    """The text of the page ``source`` (below docs) with each link out of docs replaced, but in code."""
    folder = posixpath.join(DOCS, posixpath.dirname(source))

    def replaced(link: re.Match[str]) -> str:
        target, _, anchor = link["target"].partition("#")
        path = posixpath.normpath(posixpath.join(folder, target))
        if PurePosixPath(path).parts[0] == DOCS:
            return link[0]
        if repository:
            return (
                f"[{link['text']}]({repository.rstrip('/')}/blob/main/{path}{'#' + anchor if anchor else ''})"
            )
        return link["text"] if path in link["text"] else f"{link['text']} (`{path}`)"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(replaced, part) for part in parts)
