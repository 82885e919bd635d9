"""Commands as processes of their own, whose imports of PyTorch are done once for all of them.

A daemon spends three seconds of a core on importing other people's libraries. One process that has done so
(``multiprocessing``'s fork server) becomes each of them here; all that is ours is imported afresh in each,
and compiled once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import pytest

from forked_daemon import become

FROM_NOTHING = "AFL_TESTS_FROM_NOTHING"
"""Set it to start every process from nothing."""

_MODULES = ("afl_server", "afl_worker")
_COMPILED: Path | None = None
PREPARED = multiprocessing.get_context("forkserver")
PREPARED.set_forkserver_preload(
    [
        "annotated_types",
        "constriction.constriction",
        "grpc.aio",
        "grpc_health.v1.health",
        "isal.isal_zlib",
        "numpy",
        "prometheus_client.core",
        "pydantic.dataclasses",
        "pydantic.fields",
        "pydantic.functional_serializers",
        "pydantic.main",
        "pydantic.plugin._loader",
        "pydantic.types",
        "rich.live",
        "safetensors.torch",
        "sklearn.datasets",
        "torch",
        "torch.func",
        "yaml",
    ]
)


class Command(Protocol):
    """A process, however it was started."""

    pid: int

    def wait(self, timeout: float) -> int | None:
        """Its exit status, negative for a signal; ``None`` if it does not end in time."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""


def start(arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], error: int) -> Command:
    """Start ``python ARGUMENTS`` in ``folder``; what it writes to standard error goes to the descriptor."""
    is_daemon = arguments[0] == "-m" and arguments[1] in _MODULES
    if is_daemon and not os.environ.get(FROM_NOTHING):
        return _Forked(arguments[1:], folder, environment, error)
    return _Spawned(arguments, folder, environment, error)


def prepare(compiled: Path) -> None:
    """Start the process that becomes the others, unless it runs; what they import is ``compiled`` there."""
    global _COMPILED  # noqa: PLW0603  # as the fork server, there is one
    _COMPILED = compiled
    multiprocessing.forkserver.ensure_running()


class _Spawned:
    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], error: int
    ) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-W", "error::UserWarning", *arguments],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=error,
        )
        self.pid = self._popen.pid

    def wait(self, timeout: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(timeout)
        return None

    def send_signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)


class _Forked:
    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], error: int
    ) -> None:
        with Connection(os.dup(error), readable=False) as log:
            self._process = PREPARED.Process(
                target=become, args=(tuple(arguments), folder, dict(environment), log, _COMPILED)
            )
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._status: int | None = None

    def wait(self, timeout: float) -> int | None:
        if self._status is None:
            self._process.join(timeout)
            self._status = self._process.exitcode
            if self._status is not None:
                self._process.close()
        return self._status

    def send_signal(self, number: signal.Signals) -> None:
        if self.wait(0.0) is None:
            os.kill(self.pid, number)


def without_rights() -> list[str]:
    """What is put before a command so that, run by a superuser, it may not look everywhere; else nothing."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("a superuser may look everywhere, and cannot give that up without setpriv")
    return ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


def daemon_without_rights(*arguments: str) -> list[str]:
    """What ``python`` is given to become ``afl-server ARGUMENTS`` without those rights."""
    command = [*without_rights(), sys.executable, "-m", "afl_server", *arguments]
    return ["-c", f"import os; os.execvp({command[0]!r}, {command!r})"]


def started_simulation(arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """``afl simulate ARGUMENTS`` in ``folder``, from nothing, with its output and errors to be read."""
    return subprocess.Popen(
        [sys.executable, "-m", "afl_cli", "simulate", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
