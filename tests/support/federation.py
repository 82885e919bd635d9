"""A federation of real processes on this machine: one server, and worker processes that come and go."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from afl.site.policy import DEFAULT_MIN_BATCH
from support.log_lines import check_line
from support.process import END_S, Process
from support.proxy import Proxy


class Federation:
    """A server and its workers; a context manager that leaves no process behind.

    The server listens on a free port of loopback and writes to ``folder / "run"``, unless the
    configuration says otherwise.

    Args:
        config: the run's configuration.
        folder: an empty folder of its own.
        environment: added to every process's.
    """

    def __init__(
        self, config: Mapping[str, Any], folder: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.directory = folder / "run"
        self.workers: list[Process] = []
        self._environment = dict(environment or {})
        self._config = completed(config, self.directory)
        self.servers: list[Process] = []

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "server.yaml").write_text(yaml.safe_dump(self._config), encoding="utf-8")
        self.start_server()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for process in [*self.workers, *self.servers]:
            process.close()
        if kind is None:
            self._check_events()

    def _check_events(self) -> None:
        """What was logged is what :mod:`afl.daemon.events` defines."""
        lines = [line for process in [*self.workers, *self.servers] for line in process.events]
        wrong = {check_line(line) for line in lines if "event" in line} - {""}
        assert not wrong, wrong

    @property
    def server(self) -> Process:
        """The server's process; the last, if it was started again."""
        assert self.servers, "use `with Federation(...)`"
        return self.servers[-1]

    def start_server(self, *options: str, environment: Mapping[str, str] | None = None) -> Process:
        """Start the server; the first time, and again once it has ended."""
        server = Process(
            f"server {len(self.servers) + 1}",
            ["-m", "afl_server", "--config", str(self.folder / "server.yaml"), *options],
            folder=self.folder,
            environment={**self._environment, **(environment or {})},
        )
        self.servers.append(server)
        return server

    def start_resumed(self, directory: Path, *options: str) -> Process:
        """Start the server on a run directory alone."""
        arguments = ["-m", "afl_server", "--resume", str(directory), *options]
        server = Process("server (resumed)", arguments, folder=self.folder, environment=self._environment)
        self.servers.append(server)
        return server

    @property
    def port(self) -> int:
        """The port that workers connect to; waits until it is open."""
        port: int = self.server.wait_for("listening")["port"]
        return port

    @property
    def address(self) -> str:
        """What a worker's ``--server`` is."""
        return f"127.0.0.1:{self.port}"

    def start(
        self,
        ids: str,
        *options: str,
        server: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Start a worker process for ``ids``; it connects to ``server``, by default to the server itself."""
        # What tests send is nobody's, and some are quicker with tiny minibatches.
        size = self._config.get("task", {}).get("batch_size", DEFAULT_MIN_BATCH)
        floor = ["--min-batch", "1"] if size < DEFAULT_MIN_BATCH and "--policy" not in options else []
        worker = Process(
            f"worker {ids}",
            ["-m", "afl_worker", "--id", ids, "--server", server or self.address, *floor, *options],
            folder=self.folder,
            environment={**self._environment, **(environment or {})},
        )
        self.workers.append(worker)
        return worker

    def finish(self, timeout: float = END_S) -> None:
        """Wait until the server and all workers that still run have ended well.

        Raises:
            AssertionError: if one does not, with the end of what each of them logged.
        """
        try:
            self.server.expect(0, timeout)
            for worker in self.workers:
                if worker.is_running:
                    worker.expect(0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report()}") from error

    def report(self) -> str:
        """The end of what the last processes logged."""
        processes = [*self.servers[-4:], *self.workers[-8:]]
        return "\n".join(f"--- {process.name}\n{process.text[-4000:]}" for process in processes)

    # What there is to see.

    def get(self, path: str) -> str:
        """A page of the server's HTTP side."""
        port = self.server.wait_for("listening")["http_port"]
        return fetch(f"http://127.0.0.1:{port}{path}")

    def status(self) -> dict[str, Any]:
        """``/status``."""
        page: dict[str, Any] = json.loads(self.get("/status"))
        return page

    def metrics(self) -> dict[str, float]:
        """``/metrics``: the value of each sample by its name with labels, as Prometheus writes it."""
        lines = [line for line in self.get("/metrics").splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def wait_until(self, holds: Callable[[dict[str, Any]], bool], timeout: float = END_S) -> dict[str, Any]:
        """The first ``/status`` of which ``holds`` is true; asked for twenty times a second.

        Raises:
            AssertionError: if there is none in time.
        """
        tick = threading.Event()
        for _ in range(max(1, int(timeout * 20))):
            status = self.status()
            if holds(status):
                return status
            tick.wait(0.05)
        raise AssertionError(f"the status was not as waited for within {timeout:g} s: {status}")

    def summary(self) -> dict[str, Any]:
        """``summary.json``."""
        content: dict[str, Any] = json.loads((self.directory / "summary.json").read_text(encoding="utf-8"))
        return content

    def records(self, event: str) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` of one kind: ``round`` or ``evaluation``."""
        text = (self.directory / "metrics.jsonl").read_text(encoding="utf-8")
        return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]

    def model(self, name: str) -> dict[str, torch.Tensor]:
        """``model-NAME.safetensors``."""
        return load_file(self.directory / f"model-{name}.safetensors")

    def model_bytes(self, name: str = "final") -> dict[str, bytes]:
        """The raw bytes of each tensor of a model: equal for models that are equal to the bit."""
        return {key: tensor.numpy().tobytes() for key, tensor in sorted(self.model(name).items())}

    def model_metadata(self, name: str) -> dict[str, str]:
        """What a model's file says of it."""
        with safe_open(self.directory / f"model-{name}.safetensors", framework="pt") as file:
            metadata: dict[str, str] = file.metadata()
            return metadata


def completed(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The configuration with free ports and a run directory where it names none."""
    result = dict(config)
    result["server"] = {"listen": "127.0.0.1:0", "http": "127.0.0.1:0", **config.get("server", {})}
    result["run"] = {"directory": str(directory), "seed": 7, **config.get("run", {})}
    return result


def needed_options(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a worker's command line must say: of a task that is named by its module, and where messages are
    masked, whom it believes."""
    name = config["task"]["name"]
    task = ("--task", name) if ":" in name else ()
    is_masked = config.get("privacy", {}).get("secure_aggregation", False)
    return (*task, "--trust-server-keys") if is_masked else task


def run_together(
    config: Mapping[str, Any],
    folder: Path,
    groups: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = END_S,
) -> Federation:
    """A federation from start to end, with one worker process for each of ``groups``; what it wrote stays.

    All processes start at once: the workers wait at a door for the server to open.
    """
    with Proxy() as door, Federation(config, folder, environment=environment) as federation:
        for ids in groups:
            federation.start(ids, *needed_options(config), server=door.address)
        door.aim(federation.port)
        federation.finish(timeout)
    return federation


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def fetch(url: str, timeout: float = 10.0) -> str:
    """A page, past any proxy the environment names.

    Raises:
        urllib.error.HTTPError: if its status is not 200.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=timeout) as response:
        body: bytes = response.read()
    return body.decode()
