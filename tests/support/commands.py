"""Commands as processes of their own, whose imports are done once for all of them.

A daemon spends three seconds of a core on importing other people's libraries, and a fifth of one on ours. One
process that has done so (``multiprocessing``'s fork server) becomes each of them here. What reads the
environment as it is imported, and other releases, import all that is ours afresh (:mod:`forked_daemon`).
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
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import psutil
import pytest

from afl.errors import ExitCode
from forked_daemon import become

FROM_NOTHING = "AFL_TESTS_FROM_NOTHING"
"""Set it to start every process from nothing."""

COMMAND_S = 300.0
"""From a command's start to its end."""

END_S = 90.0
"""A command's end, on a machine busy with others; alone it takes a second."""

_MODULES = ("afl_cli", "afl_server", "afl_worker")
_COMPILED: Path | None = None
PREPARED = multiprocessing.get_context("forkserver")
PREPARED.set_forkserver_preload(
    [
        "annotated_types",
        "constriction.constriction",
        "dp_accounting.rdp",
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
        "afl.core.algorithms.afl_com",
        "afl.core.algorithms.update_server",
        "afl.core.compressors.identity",
        "afl.tasks.synthetic",
        "afl_cli.main",
        "afl_server.main",
        "afl_server.runner.run",
        "afl_worker.main",
        "afl_worker.process",
        "afl_worker.training.setup",
    ]
)


class Command(Protocol):
    """A process, however it was started."""

    pid: int

    def wait(self, timeout: float) -> int | None:
        """Its exit status, negative for a signal; ``None`` if it does not end in time."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""


def start(
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    error: int,
    output: int = subprocess.DEVNULL,
) -> Command:
    """Start ``python ARGUMENTS`` in ``folder``; what it writes to standard error goes to the descriptor."""
    is_ours = arguments[0] == "-m" and arguments[1] in _MODULES
    if is_ours and not os.environ.get(FROM_NOTHING):
        return _Forked(arguments[1:], folder, environment, error, output)
    return _Spawned(arguments, folder, environment, error, output)


def run_command(
    *arguments: str, folder: Path | None = None, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` in ``folder``, to its end; ``environment`` is added to this process's own."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as error:
        command = start(
            arguments,
            folder=folder or Path.cwd(),
            environment={**os.environ, **environment},
            error=error.fileno(),
            output=output.fileno(),
        )
        status = command.wait(COMMAND_S)
        if status is None:
            command.send_signal(signal.SIGKILL)
            command.wait(END_S)
        error.seek(0)
        output.seek(0)
        assert status is not None, f"{arguments} has not ended in {COMMAND_S:g} s:\n{error.read()}"
        return subprocess.CompletedProcess(arguments, status, output.read(), error.read())


def prepare(compiled: Path) -> None:
    """Start the process that becomes the others, unless it runs; what they import is ``compiled`` there."""
    global _COMPILED  # noqa: PLW0603  # as the fork server, there is one
    _COMPILED = compiled
    multiprocessing.forkserver.ensure_running()


class _Spawned:
    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        error: int,
        output: int = subprocess.DEVNULL,
    ) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-W", "error::UserWarning", *arguments],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
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
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        error: int,
        output: int = subprocess.DEVNULL,
    ) -> None:
        with Connection(os.dup(error), readable=False) as log, contextlib.ExitStack() as stack:
            shown = None
            if output != subprocess.DEVNULL:
                shown = stack.enter_context(Connection(os.dup(output), readable=False))
            self._process = PREPARED.Process(
                target=become, args=(tuple(arguments), folder, dict(environment), log, shown, _COMPILED)
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


class ForkedPopen:
    """What :mod:`afl_cli.federation.children` needs of ``subprocess.Popen``, of a prepared process."""

    def __init__(self, command: Sequence[str], **_: object) -> None:
        read, write = os.pipe()
        self.stderr = os.fdopen(read, encoding="utf-8", errors="replace")
        arguments = command[command.index("-m") + 1 :]
        self._forked = _Forked(arguments, Path.cwd(), os.environ, write)
        os.close(write)

    def wait(self, timeout: float = END_S) -> int:
        status = self._forked.wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("a prepared process", timeout)
        return status

    def poll(self) -> int | None:
        return self._forked.wait(0.0)

    def send_signal(self, number: signal.Signals) -> None:
        self._forked.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


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


def started_simulation(
    arguments: Sequence[str], folder: Path, is_under_way: Callable[[psutil.Process], bool]
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """``afl simulate ARGUMENTS`` in ``folder``, from nothing, once it is under way, and the processes below
    it; its output and errors are to be read."""
    process = simulation(arguments, folder)
    try:
        command, deadline = psutil.Process(process.pid), time.monotonic() + 2 * END_S
        while not is_under_way(command):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        return process, command.children(recursive=True)
    except BaseException:
        process.kill()
        process.communicate()
        raise


def simulation(arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """``afl simulate ARGUMENTS`` in ``folder``, from nothing, with its output and errors to be read."""
    return subprocess.Popen(
        [sys.executable, "-m", "afl_cli", "simulate", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def interrupted(
    process: subprocess.Popen[str], number: signal.Signals, below: Sequence[psutil.Process] = ()
) -> tuple[str, str]:
    """What a command has still shown, and its errors, once a signal has ended it and all ``below`` it; by
    default what it has started itself."""
    below = below or psutil.Process(process.pid).children(recursive=True)
    assert below
    process.send_signal(number)
    try:
        shown, errors = process.communicate(timeout=END_S)
    finally:
        process.kill()
    assert process.returncode == ExitCode.INTERRUPTED, shown + errors
    assert gone(below)
    return shown, errors


def gone(processes: Sequence[psutil.Process]) -> bool:
    """Whether all of them have ended, or soon do."""
    return not psutil.wait_procs(processes, timeout=END_S)[1]
