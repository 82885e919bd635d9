"""A Prometheus of the tests' own, and what there is to ask it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from support.federation import fetch

START_S = 60.0

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (apt-get install prometheus)"
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)"
)


class Prometheus:
    """A server on a free port of loopback, with its data in a folder; a context manager.

    Args:
        config: of the command's ``--config.file``.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self._folder = folder
        self._config = config

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(dict(self._config)), encoding="utf-8")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._log = (self._folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address={self._address}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self.wait_until(self._is_ready, START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now.

        Raises:
            AssertionError: if it cannot be evaluated.
        """
        return self._series("query", query=expression)

    def query_range(self, expression: str, *, seconds: float, step: float) -> list[dict[str, Any]]:
        """The series of an expression over the last ``seconds``.

        Raises:
            AssertionError: if it cannot be evaluated.
        """
        end = time.time()
        return self._series("query_range", query=expression, start=end - seconds, end=end, step=step)

    def rules(self) -> list[dict[str, Any]]:
        """All rules, with their health."""
        groups = self.get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_until(self, holds: Callable[[], bool], timeout: float) -> None:
        """Ask until something holds.

        Raises:
            AssertionError: if it does not in time, or the process has ended.
        """
        tick = threading.Event()
        deadline = time.monotonic() + timeout
        while not holds():
            assert self._process.poll() is None, self.text
            assert time.monotonic() < deadline, f"not within {timeout:g} s:\n{self.text}"
            tick.wait(0.1)

    @property
    def text(self) -> str:
        """The end of what it has logged."""
        return (self._folder / "prometheus.log").read_text(encoding="utf-8", errors="replace")[-4000:]

    def get(self, path: str, **parameters: object) -> Any:
        """The data of an answer of its API.

        Raises:
            AssertionError: if it says that there is an error.
        """
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            return json.loads(fetch(url))["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def _series(self, path: str, **parameters: object) -> list[dict[str, Any]]:
        series: list[dict[str, Any]] = self.get(path, **parameters)["result"]
        return series

    def _is_ready(self) -> bool:
        try:
            fetch(f"http://{self._address}/-/ready")
        except OSError:
            return False
        return True
