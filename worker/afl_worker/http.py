"""HTTP for probes: /healthz, /readyz."""

from __future__ import annotations

from afl.config.address import Address
from afl.daemon.http import OVER, Answer, Environ, HttpPages, text
from afl_worker.runtime import WorkerProcess


class WorkerPages(HttpPages):
    """Says whether the process answers, and whether it takes part.

    Nothing here depends on how long a step takes: the server ends the session of a worker that is silent.

    Raises:
        AddressError: if the address cannot be listened on.
    """

    def __init__(self, process: WorkerProcess, address: Address) -> None:
        self._process = process
        super().__init__(address, "--http")

    def answer(self, path: str, environ: Environ) -> Answer:  # noqa: ARG002  # the path says all
        """For probes."""
        if path == "/healthz":
            return text("200 OK", "ok\n")
        if path != "/readyz":
            return text("404 Not Found", "try /healthz or /readyz\n")
        if self._process.is_over:
            return OVER
        if self._process.has_session:
            return text("200 OK", "ready\n")
        return text("503 Service Unavailable", "no session with the server\n")
