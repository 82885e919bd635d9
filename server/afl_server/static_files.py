"""The status page's own files, read once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from afl.daemon.http import Body

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

TEMPLATE = "index.html"


@dataclass(frozen=True)
class StaticFile:
    """A file as it is served.

    Attributes:
        tag: changes with its content.
    """

    body: Body
    kind: str
    tag: str


def template() -> str:
    """The page with places for what the server fills in."""
    return (files("afl_server") / "page" / TEMPLATE).read_text(encoding="utf-8")


def static_files() -> dict[str, StaticFile]:
    """By path below the page's address, as in ``page/page.css``."""
    found = {}
    folder = files("afl_server") / "page"
    for place, prefix in ((folder, "page/"), (folder / "uplot", "page/uplot/")):
        for entry in place.iterdir():
            kind = next((kind for ending, kind in _TYPES.items() if entry.name.endswith(ending)), None)
            if kind is not None:
                content = entry.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
                found[prefix + entry.name] = StaticFile(Body.of(content), kind, tag)
    return found
