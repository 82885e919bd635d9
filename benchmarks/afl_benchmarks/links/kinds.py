"""The ways in which workers may reach their server here: plain loopback, a proxy, or network namespaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from afl_benchmarks.links.namespaces import NamespaceLinks, UnavailableError
from afl_benchmarks.links.pipe import Carried, Link
from afl_benchmarks.links.proxy import ProxyLinks

LinkKind = Literal["auto", "namespaces", "proxy"]

_LOOPBACK = {"listen": "127.0.0.1:0"}


class Links(Protocol):
    """A link for each worker.

    Attributes:
        kind: how they are made.
        server_section: what the server's configuration must say.
        worker_options: what a worker's command line must say.
    """

    kind: ClassVar[str]
    server_section: ClassVar[Mapping[str, Any]]
    worker_options: ClassVar[Sequence[str]]

    def aim(self, port: int) -> None:
        """The server listens there."""

    def address(self, number: int) -> str:
        """What a worker's ``--server`` is."""

    def inside(self, number: int) -> Sequence[str]:
        """The command that a worker's own command is given to."""

    def carried(self) -> Carried:
        """What all links have carried so far."""


class _Loopback:
    kind: ClassVar[str] = "none"
    server_section: ClassVar[Mapping[str, Any]] = _LOOPBACK
    worker_options: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        self._port = 0

    def aim(self, port: int) -> None:
        self._port = port

    def address(self, number: int) -> str:  # noqa: ARG002
        return f"127.0.0.1:{self._port}"

    def inside(self, number: int) -> Sequence[str]:  # noqa: ARG002
        return ()

    def carried(self) -> Carried:
        return Carried()


@contextlib.contextmanager
def links_of(kind: LinkKind, count: int, link: Link | None) -> Iterator[Links]:
    """Links, of which nothing is left afterwards.

    Args:
        kind: ``auto`` is namespaces where this machine can make them, else the proxy, and says why.
        link: None for plain loopback.

    Raises:
        UnavailableError: if ``kind`` is ``namespaces`` and this machine cannot make them.
    """
    if link is None:
        yield _Loopback()
        return
    if kind != "proxy":
        namespaces = NamespaceLinks(count, link)
        try:
            namespaces.make()
        except UnavailableError as error:
            if kind == "namespaces":
                raise
            print(f"no namespaces here ({error}): the proxy makes the links", flush=True)
        else:
            with contextlib.closing(namespaces):
                yield namespaces
            return
    with ProxyLinks(count, link) as proxy:
        yield proxy
