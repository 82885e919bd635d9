"""How long a run stands still when its server, or a worker, is killed and started again at once.

python -m afl_benchmarks.recovery --dim 1000000 --compressor top-k --ratio 0.3

The time from the start of the new process to the next closed round, less what the process needs to start (the
imports of a process of its kind that does nothing else, measured in the same run).
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

TASK = "afl_benchmarks.noop:Noop"
TIMEOUT_S = 120.0
POLL_S = 0.005
START_AFTER = 20
"""Rounds before the first kill, and between two."""

Process = subprocess.Popen[bytes]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=1_000_000)
    parser.add_argument("--compressor", default="top-k", choices=["identity", "rand-k", "top-k"])
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for key, value in _measure(options, Path(folder)).items():
            print(f"{key:44} {value}")


class _Run:
    """A server and two workers, each its own process, of which one is killed and started again."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        self._folder = folder
        self._metrics = folder / "run" / "metrics.jsonl"
        config = folder / "server.yaml"
        config.write_text(yaml.safe_dump(_config(options, folder, port)))
        worker = (
            "afl_worker",
            "--task",
            TASK,
            "--server",
            f"127.0.0.1:{port}",
            "--journal",
            folder / "journal",
        )
        self._commands: dict[str, Sequence[object]] = {
            "server": ("afl_server", "--config", config, "--no-live"),
            **{str(number): (*worker, "--id", number) for number in range(2)},
        }
        self.processes = {name: self.start(name) for name in self._commands}

    def start(self, name: str) -> Process:
        """Start a process."""
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *map(str, self._commands[name])], stderr=log, stdout=log
            )

    def rounds(self) -> int:
        """How many are closed."""
        if not self._metrics.exists():
            return 0
        return self._metrics.read_bytes().count(b'{"event": "round"')

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds."""
        deadline = time.monotonic() + TIMEOUT_S
        while not holds():
            if time.monotonic() > deadline:
                raise RuntimeError((self._folder / "log").read_text(errors="replace")[-3000:])
            time.sleep(POLL_S)

    def standstill(self, name: str) -> float:
        """Kill a process, start it again; seconds from that to the next closed round."""
        before = self.rounds()
        self.wait_for(lambda: self.rounds() >= before + START_AFTER)
        self.processes[name].kill()
        self.processes[name].wait()
        closed = self.rounds()
        since = time.monotonic()
        self.processes[name] = self.start(name)
        # A server first writes the lines again that its log repeats.
        self.wait_for(lambda: self.rounds() > closed)
        return time.monotonic() - since

    def close(self) -> None:
        """End all of them."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    starts = {kind: [_imports(kind) for _ in range(3)] for kind in ("afl_server", "afl_worker")}
    run = _Run(options, folder)
    try:
        found: dict[str, Any] = {"dim": options.dim, "compressor": options.compressor}
        for name, kind in (("server", "afl_server"), ("0", "afl_worker")):
            start = statistics.median(starts[kind])
            times = [run.standstill(name) for _ in range(options.repeats)]
            what = "server" if name == "server" else "worker"
            found[f"{what}: process start, s"] = round(start, 2)
            found[f"{what}: start to next closed round, s (median)"] = round(statistics.median(times), 2)
            found[f"{what}: the same less the start, s (median)"] = round(statistics.median(times) - start, 2)
            found[f"{what}: the same less the start, s (max)"] = round(max(times) - start, 2)
        return found
    finally:
        run.close()


def _imports(kind: str) -> float:
    since = time.monotonic()
    subprocess.run([sys.executable, "-m", kind, "--version"], check=True, capture_output=True)
    return time.monotonic() - since


def _config(options: argparse.Namespace, folder: Path, port: int) -> dict[str, Any]:
    compressor: dict[str, Any] = {"name": options.compressor}
    if options.compressor != "identity":
        compressor["ratio"] = options.ratio
    return {
        "workers": 2,
        "task": {"name": TASK, "options": {"dim": options.dim}, "batch_size": 1},
        "algorithm": {
            "name": "afl-com",
            "rounds": 1_000_000,
            "eta_w": 1e-3,
            "eta_q": 0.1,
            "uplink": compressor,
        },
        "evaluation": {"every": 1_000_000},
        "run": {"seed": 1, "directory": str(folder / "run")},
        "server": {"listen": f"127.0.0.1:{port}", "http": None},
    }


if __name__ == "__main__":
    main()
