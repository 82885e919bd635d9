"""Addresses to listen on and to connect to, and the rule on plaintext."""

from __future__ import annotations

import errno
import ipaddress
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from afl.errors import AddressError, ConfigError

_SCHEME: Final = re.compile(r"(?:[a-z][a-z0-9+.-]*://|(?:dns|ipv4|ipv6|xds|vsock):(?=.*:))", re.IGNORECASE)
_UNIX: Final = re.compile(r"unix(?:-abstract)?:|/|\./", re.IGNORECASE)
_LABEL: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Address:
    """A host (a name, or an IP address without brackets) and a TCP port; 0 is any free one to a listener."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be at the other end."""
        return is_loopback(self.host)


def parse_listen(text: str) -> Address:
    """The address to listen on that ``text`` names.

    ``:50051`` and ``*:50051`` mean every address of this machine, IPv6 and IPv4; port 0 means any free port.

    Raises:
        AddressError: if it is not ``host:port``; the message says what would be.
    """
    host, port = _split(text)
    # By dual stack, every IPv4 address too.
    return Address("::" if host in {"", "*"} else host, port)


def listen_address(value: object) -> Address:
    """As :func:`parse_listen`, of a value of a configuration.

    Raises:
        ValueError: if it is no address.
    """
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):
        raise ValueError("not text")  # noqa: TRY004  # a TypeError would escape the validation
    try:
        return parse_listen(value)
    except AddressError as error:
        raise ValueError(str(error)) from error


def parse_target(text: str) -> Address:
    """The address to connect to that ``text`` names.

    Raises:
        AddressError: if it is not ``host:port``, has port 0, or names a wildcard, which only a listener can
            use; the message says what would be right.
    """
    host, port = _split(text)
    if host == "":
        raise AddressError(f"{text!r} names no host to connect to; on this machine it is localhost:{port}")
    if is_wildcard(host):
        raise AddressError(
            f"{text!r} means every address of a machine, which only a listener can use; connect to the"
            f" server's name or address, or to localhost:{port} if it runs on this machine"
        )
    if port == 0:
        raise AddressError(f"{text!r} has port 0, which only a listener can use; give the port of the server")
    return Address(host, port)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine and cannot be reached from another."""
    if host.casefold().removesuffix(".") == "localhost":
        return True
    address = _unmapped(host)
    return address is not None and address.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether ``host`` stands for every address of a machine: empty, ``*``, ``0.0.0.0``, ``::``."""
    if host in {"", "*"}:
        return True
    address = _unmapped(host)
    return address is not None and address.is_unspecified


def check_plaintext(listen: Address, *, insecure: bool) -> None:
    """Refuse to listen without TLS where others could read or alter what is sent.

    Raises:
        ConfigError: if ``listen`` is not loopback and the operator has not written that it is ``insecure``.
    """
    if not insecure and not listen.is_loopback:
        raise ConfigError(
            f"server.listen: {listen} is reachable from other machines, and without TLS anyone in between "
            "could read and alter the model and the updates; set server.tls, or use a loopback address such "
            f"as 127.0.0.1:{listen.port}, or set server.insecure to true if the network itself is trusted"
        )


_NOT_LISTENED: Final = {
    errno.EADDRINUSE: "another process listens there; name another port, or end that process",
    errno.EADDRNOTAVAIL: "it is not an address of this machine; name one that is, or :PORT for all of them",
    errno.EACCES: "ports below 1024 need more rights than this process has; name a higher one",
}


def why_not_listened(error: OSError) -> str:
    """Why an address cannot be listened on, and what to do."""
    return _NOT_LISTENED.get(error.errno or 0, error.strerror or str(error))


def _split(text: str) -> tuple[str, int]:
    """Host (without brackets, possibly empty) and port of ``host:port``, both checked."""
    if _UNIX.match(text):
        raise AddressError(f"{text!r} is a Unix socket, which is not supported; write host:port")
    if scheme := _SCHEME.match(text):
        rest = text[scheme.end() :].strip("/")
        raise AddressError(f"{text!r} starts with {scheme[0]!r}; write host:port alone: {rest}")
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        if not bracket or not _is_ipv6(host):
            raise AddressError(f"{text!r} has no IPv6 address in its brackets; write for example [::1]:50051")
        if not port.startswith(":"):
            raise AddressError(f"{text!r} has no port; write for example [{host}]:50051")
        port = port[1:]
    else:
        host, port = _split_bare(text)
    if not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or int(port) > 65535:
        raise AddressError(f"{text!r} has the port {port!r}; a port is a whole number from 0 to 65535")
    return host, int(port)


def _split_bare(text: str) -> tuple[str, str]:
    head, colon, port = text.rpartition(":")
    if ":" in head:
        # It may be meant in two ways.
        readings = [f"[{head}]:{port}"] if _is_ipv6(head) and port.isdecimal() else []
        readings += [f"[{text}]:50051"] if _is_ipv6(text) else []
        if readings:
            meant = " or ".join(readings)
            raise AddressError(f"{text!r}: an IPv6 address goes in brackets, before its port: {meant}")
        raise AddressError(f"{text!r} has more than one colon and is no IPv6 address; write host:port")
    if not colon:
        missing, host = ("host", "localhost") if text.isdecimal() else ("port", text or "localhost")
        example = f"{host}:{text if text.isdecimal() else 50051}"
        raise AddressError(f"{text!r} has no {missing}; write host:port, for example {example}")
    labels = head.removesuffix(".").split(".")
    if labels[-1].isdecimal():
        # A name whose last part is a number is an IPv4 address to every resolver, and "0" or "127.1" is one
        # to some resolvers only.
        if _ip_address(head) is None:
            raise AddressError(
                f"{text!r}: {head!r} is not an IPv4 address; it has four numbers from 0 to 255"
            )
    elif head not in {"", "*"} and not (len(head) <= 253 and all(map(_LABEL.fullmatch, labels))):
        raise AddressError(
            f"{text!r}: {head!r} is not a host name; it has letters a-z, digits and dashes between its dots"
        )
    return head, port


def shown_peer(peer: str) -> str:
    """As people write it what gRPC names ``ipv4:127.0.0.1:5`` or ``ipv6:%5B::1%5D:5``; anything else as it
    is."""
    scheme, _, address = peer.partition(":")
    return unquote(address) if scheme in {"ipv4", "ipv6"} else peer


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that ``host`` is; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_ipv6(host: str) -> bool:
    return isinstance(_ip_address(host), ipaddress.IPv6Address)


def _unmapped(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The same, where an IPv4 address mapped into IPv6 (``::ffff:127.0.0.1``) is the IPv4 address."""
    address = _ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
