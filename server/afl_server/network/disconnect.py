"""Cutting a peer off: gRPC has no word for a call whose peer takes nothing, not even the call's end."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from pathlib import Path
from urllib.parse import unquote

_Place = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def disconnect(peer: str, port: int) -> bool:
    """Shut down the connection that a peer has made to a port of this process; whether there was one.

    Whatever else goes over the same connection is cut too, and comes back by itself.

    Args:
        peer: as gRPC names it, such as ``ipv4:127.0.0.1:42596``.
        port: the server's own.
    """
    wanted = _named(peer)
    found = False
    for descriptor in _descriptors():
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            # A socket of our own for the same connection: the descriptor may be another's by now.
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if _place(connection.getpeername()) == wanted and connection.getsockname()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
                    found = True
        except (OSError, TypeError):
            # Closed meanwhile, or no connection over IP.
            continue
    return found


def _descriptors() -> list[int]:
    """Those that are open; none where the machine does not tell."""
    with contextlib.suppress(OSError):
        return [int(path.name) for path in Path("/dev/fd").iterdir()]
    return []


def _named(peer: str) -> _Place | None:
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    return _place((host.strip("[]"), int(port))) if kind in {"ipv4", "ipv6"} else None


def _place(address: object) -> _Place:
    """Host and port; of an IPv4 host that came by an IPv6 socket, the IPv4 address.

    Raises:
        TypeError: if it is not such an address.
    """
    if not isinstance(address, tuple):
        raise TypeError(f"{address!r} has no host")
    host = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return mapped or host, address[1]
