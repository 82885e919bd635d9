"""Links made by the kernel: a network namespace for each worker, behind a pair of virtual Ethernet devices.

Both ends of a pair send through ``netem`` (rate and delay), or through ``tbf`` where there is no delay.
TCP runs over the whole link. Needs root, iproute2 and a kernel with these queueing disciplines.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from afl_benchmarks.links.pipe import Carried, Link

_LARGEST_COUNT = 250
"""One subnet a link in one of the networks 10.64.0.0/16 to 10.191.0.0/16."""

_QUEUE_PACKETS = 1000
"""As many as a device's own queue has by default; beyond it packets are dropped."""

_BURST = "8kb"
_LATENCY = "200ms"


class UnavailableError(Exception):
    """This machine cannot do it; the message says what it lacks."""


class NamespaceLinks:
    """A namespace and a link for each worker, from :meth:`make` to :meth:`close`.

    The server stays outside and listens on all addresses, as each link has its own.

    Args:
        count: the number of links.
    """

    kind: ClassVar[str] = "namespaces"
    server_section: ClassVar[Mapping[str, Any]] = {"listen": "0.0.0.0:0", "insecure": True}
    worker_options: ClassVar[Sequence[str]] = ("--insecure",)

    def __init__(self, count: int, link: Link) -> None:
        self._link = link
        self._count = count
        self._prefix = f"afl{os.getpid() % 100_000}"
        self._network = f"10.{64 + os.getpid() % 128}"
        self._port = 0
        self._undo = contextlib.ExitStack()

    def make(self) -> None:
        """Make them.

        Raises:
            UnavailableError: if this machine cannot; then nothing is left of them.
        """
        if self._count > _LARGEST_COUNT:
            raise UnavailableError(f"{self._count} links are more than {_LARGEST_COUNT}")
        if os.geteuid() != 0:
            raise UnavailableError("network namespaces need root")
        for command in ("ip", "tc"):
            if shutil.which(command) is None:
                raise UnavailableError(f"there is no command {command} (iproute2)")
        with contextlib.ExitStack() as undo:
            for number in range(self._count):
                self._make(number, undo)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Remove them; processes inside must have ended."""
        self._undo.close()

    def aim(self, port: int) -> None:
        """The server listens on this port."""
        self._port = port

    def address(self, number: int) -> str:
        """The server's, from inside a namespace."""
        return f"{self._network}.{number}.1:{self._port}"

    def inside(self, number: int) -> Sequence[str]:
        """What runs a command in a worker's namespace."""
        return ("ip", "netns", "exec", self._name(number))

    def carried(self, number: int | None = None) -> Carried:
        """Bytes of Ethernet frames that one link, or all of them, have carried so far."""
        numbers = range(self._count) if number is None else [number]
        # The device outside receives what goes to the server.
        up, down = (
            sum(int((self._statistics(each) / f"{way}_bytes").read_text()) for each in numbers)
            for way in ("rx", "tx")
        )
        return Carried(up, down)

    def _statistics(self, number: int) -> Path:
        return Path("/sys/class/net") / self._name(number) / "statistics"

    def _make(self, number: int, undo: contextlib.ExitStack) -> None:
        name, inner = self._name(number), "link0"
        _run("ip", "netns", "add", name)
        undo.callback(_run, "ip", "netns", "del", name)
        _run("ip", "link", "add", name, "type", "veth", "peer", "name", inner, "netns", name)
        # Both devices go at once; with the namespace they would go some time later.
        undo.callback(_run, "ip", "link", "del", name)
        for prefix, device, host in ((("ip",), name, 1), (("ip", "-n", name), inner, 2)):
            # Segments that the kernel has not cut yet would count as one packet.
            _run(*prefix, "link", "set", "dev", device, "gso_max_segs", "1")
            _run(*prefix, "addr", "add", f"{self._network}.{number}.{host}/30", "dev", device)
            _run(*prefix, "link", "set", "dev", device, "up")
        for prefix, device in ((("tc",), name), (("tc", "-n", name), inner)):
            _run(*prefix, "qdisc", "add", "dev", device, "root", *self._discipline())

    def _discipline(self) -> Sequence[str]:
        rate = f"{self._link.rate * 8:.0f}bit"
        if self._link.delay == 0:
            return ("tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
        delay = f"{self._link.delay * 1e6:.0f}us"
        return ("netem", "rate", rate, "delay", delay, "limit", str(_QUEUE_PACKETS))

    def _name(self, number: int) -> str:
        return f"{self._prefix}-{number}"


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise UnavailableError(f"{' '.join(command)}: {result.stderr.strip()}")
