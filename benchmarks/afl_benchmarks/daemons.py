"""A server and workers as a benchmark runs them: from the command line, with JSON logs in files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 120.0
_POLL_S = 0.01


class Daemons:
    """A server and the workers that were started beside it; a context manager that leaves no process behind.

    Args:
        config: the run's; it is written to ``folder``.
        folder: where the configuration and the logs go, and the workers' journals.
        overrides: ``KEY=VALUE`` for the server's ``--set``.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, overrides: Sequence[str] = ()) -> None:
        self._folder = folder
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        path = folder / "server.yaml"
        path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        options = [part for text in overrides for part in ("--set", text)]
        self.server = self._start("server", ["-m", "afl_server", "--config", str(path), *options])
        self.port = 0

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def open(self) -> None:
        """Wait until the server listens; ``port`` is known then."""
        self.port = self._listening_port()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_worker(
        self, ids: str, server: str, options: Sequence[str] = (), *, inside: Sequence[str] = ()
    ) -> None:
        """Start a worker process for ``ids``.

        Args:
            inside: a command that the worker's own is given to.
        """
        journal = str(self._folder / "journal")
        arguments = ["-m", "afl_worker", "--id", ids, "--server", server, "--journal", journal, *options]
        self._workers[ids] = self._start(f"worker-{ids}", arguments, inside)

    def join(self, timeout: float = 3600.0) -> None:
        """Wait until all have ended well.

        Raises:
            RuntimeError: if one has not, with the end of its log.
        """
        deadline = time.monotonic() + timeout
        while running := [name for name, process in self._all.items() if process.poll() is None]:
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{', '.join(running)} did not end within {timeout:g} s")
            time.sleep(_POLL_S)
        self.check()

    def check(self) -> None:
        """No process has ended badly.

        Raises:
            RuntimeError: if one has, with the end of its log.
        """
        for name, process in self._all.items():
            if process.poll():
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{self._text(name)[-3000:]}")

    def stop(self) -> None:
        """Ask the server to end, which it does after the step that is open; then the workers.

        Raises:
            RuntimeError: if the server does not.
        """
        if self.server.poll() is None:
            self.server.send_signal(signal.SIGTERM)
        try:
            self.server.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the server did not end within {END_TIMEOUT_S:g} s") from None

    def pause(self) -> None:
        """Stop all of them where they are (SIGSTOP)."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let all of them go on."""
        self._send(signal.SIGCONT)

    def close(self) -> None:
        """End all of them at once."""
        for process in self._all.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log lines of ``server`` or ``worker-IDS``."""
        return [json.loads(line) for line in self._text(name).splitlines() if line.startswith("{")]

    @property
    def workers(self) -> list[str]:
        """The names of the workers' processes."""
        return [f"worker-{ids}" for ids in self._workers]

    @property
    def _all(self) -> dict[str, subprocess.Popen[bytes]]:
        return {"server": self.server, **{f"worker-{ids}": each for ids, each in self._workers.items()}}

    def _start(
        self, name: str, arguments: Sequence[str], inside: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        # A proxy for HTTP would come between them, and is no part of what is measured.
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [*inside, sys.executable, *arguments, "--json-logs"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
            )

    def _send(self, number: signal.Signals) -> None:
        for process in self._all.values():
            if process.poll() is None:
                process.send_signal(number)

    def _text(self, name: str) -> str:
        # The last line may be under way.
        text = (self._folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return text[: text.rfind("\n") + 1]

    def _listening_port(self) -> int:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check()
            for line in self.events("server"):
                if line["event"] == "listening":
                    return int(line["port"])
            if self.server.poll() is not None:
                raise RuntimeError("the server ended before it listened: is the run complete already?")
            time.sleep(_POLL_S)
        raise RuntimeError(f"the server did not listen within {START_TIMEOUT_S:g} s")
