"""The names that a daemon's pages may be asked by.

A page on loopback, or in a network of its own, is also reached by whatever web page an operator's browser
shows, if that page's name is made to stand for this address (DNS rebinding). Such a request has a foreign
name in its Host field; an address there is never one.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

from afl.daemon.http import Answer, Environ, text

_LOOPBACK: Final = "localhost"


class OwnNames:
    """This machine's, and further ones.

    Args:
        refusal: what a request by another name is told.
    """

    def __init__(self, names: Iterable[str], refusal: str) -> None:
        self._names = {name.lower().rstrip(".") for name in (_LOOPBACK, socket.gethostname(), *names)}
        self._refusal = text("403 Forbidden", f"{refusal}\n")

    def refusal(self, environ: Environ) -> Answer | None:
        """What a request by a foreign name is answered with; ``None`` for another request."""
        host = environ.get("HTTP_HOST")
        return None if host is None or self._is_ours(host) else self._refusal

    def _is_ours(self, host: str) -> bool:
        name, colon, port = host.lower().rpartition(":")
        if not colon or not port.isdecimal():
            name = host.lower()
        name = name.rstrip(".")
        if name in self._names or name.endswith(f".{_LOOPBACK}"):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True
