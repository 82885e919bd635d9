"""Cutting a peer off: gRPC has no word for a call whose peer takes nothing, not even the call's end."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Container, Iterable
from pathlib import Path
from urllib.parse import unquote

Place = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]
"""Where a connection comes from: host and port."""


class Connections:
    """Those that were made to a port of this process.

    Args:
        port: the server's own.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._sockets: dict[tuple[int, int], Place | None] = {}
        """By descriptor and inode, so that none is asked twice; ``None`` for what is no such connection."""

    def now(self) -> dict[Place, int]:
        """The descriptors of all that are open."""
        known, self._sockets = self._sockets, {}
        for descriptor in _descriptors():
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                key = descriptor, status.st_ino
                self._sockets[key] = known[key] if key in known else self._place_of(descriptor)
            except OSError:
                # Closed meanwhile.
                continue
        return {place: key[0] for key, place in self._sockets.items() if place is not None}

    def cut(self, places: Iterable[Place]) -> int:
        """Shut these down; how many were there."""
        return sum(self._cut(descriptor, place) for place, descriptor in self._among(set(places)))

    def _among(self, wanted: Container[Place]) -> list[tuple[Place, int]]:
        return [(place, descriptor) for place, descriptor in self.now().items() if place in wanted]

    def _cut(self, descriptor: int, wanted: Place) -> bool:
        with contextlib.suppress(OSError, TypeError), socket.socket(fileno=os.dup(descriptor)) as connection:
            # A socket of our own for the same connection: the descriptor may be another's by now.
            if _place(connection.getpeername()) == wanted and connection.getsockname()[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _place_of(self, descriptor: int) -> Place | None:
        # What is listened on has no peer yet, and never will.
        with contextlib.suppress(OSError, TypeError), socket.socket(fileno=os.dup(descriptor)) as connection:
            place = _place(connection.getpeername())
            return place if connection.getsockname()[1] == self._port else None
        return None


def disconnect(peer: str, port: int) -> bool:
    """Shut down the connection that a peer has made to a port of this process; whether there was one.

    Whatever else goes over the same connection is cut too, and comes back by itself.

    Args:
        peer: as gRPC names it, such as ``ipv4:127.0.0.1:42596``.
        port: the server's own.
    """
    return Connections(port).cut(places_of([peer])) > 0


def places_of(peers: Iterable[str]) -> set[Place]:
    """Where these peers, as gRPC names them, come from; those that come over no network are left out."""
    return {place for place in map(_named, peers) if place is not None}


def _descriptors() -> list[int]:
    """Those that are open; none where the machine does not tell."""
    with contextlib.suppress(OSError):
        return [int(path.name) for path in Path("/dev/fd").iterdir()]
    return []


def _named(peer: str) -> Place | None:
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return _place((host.strip("[]"), int(port))) if kind in {"ipv4", "ipv6"} else None


def _place(address: object) -> Place:
    """Host and port; of an IPv4 host that came by an IPv6 socket, the IPv4 address.

    Raises:
        TypeError: if it is not such an address.
    """
    if not isinstance(address, tuple):
        raise TypeError(f"{address!r} has no host")
    host = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return mapped or host, address[1]
