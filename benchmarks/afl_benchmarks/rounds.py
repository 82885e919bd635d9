"""What a round costs: a real server and real workers with a no-op oracle, beside the floor.

python -m afl_benchmarks.rounds --dim 100000 --workers 10 --compressor rand-k --ratio 0.1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from afl.core.algorithms.settings import CompressorChoice
from afl_benchmarks import floor
from afl_benchmarks.daemons import Daemons

TASK = "afl_benchmarks.noop:Noop"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, dim=100_000, rounds=200)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--processes", type=int, help="that the workers are spread over; without it, each has its own"
    )
    options = parser.parse_args()
    options.processes = options.processes or options.workers
    result = run(options)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for key, value in result.items():
        print(f"{key:38} {value}")


def add_options(parser: argparse.ArgumentParser, *, dim: int, rounds: int) -> None:
    """What a federation on the no-op task is like."""
    parser.add_argument("--dim", type=int, default=dim)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--compressor", default="rand-k", choices=["identity", "rand-k", "top-k"])
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--bits", type=int, help="of an integer on a grid; without it, values are float32")
    parser.add_argument("--masked", action="store_true", help="with secure aggregation; it needs --bits")
    parser.add_argument("--chunk-bytes", type=int, default=1 << 20)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the run's configuration"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the system, then the floor with the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        measured = _federation(options, Path(folder))
    gradient_bytes = measured.pop("_gradient_bytes")
    up, down = (size // (options.processes * options.rounds) for size in gradient_bytes)
    seconds = floor.measure(
        clients=options.processes,
        up=up,
        down=down,
        chunk=options.chunk_bytes,
        rounds=min(options.rounds, 200 if options.dim <= 1_000_000 else 12),
    )
    floor_ms = 1e3 * statistics.median(seconds)
    round_ms = measured["round_ms (median)"]
    left_ms = round_ms - measured["workers' own compute, ms a round"]
    return {
        "dim": options.dim,
        "workers": options.workers,
        "processes": options.processes,
        "compressor": f"{options.compressor}"
        + ("" if options.compressor == "identity" else f" {options.ratio}")
        + ("" if options.bits is None else f", {options.bits} bits")
        + (", masked" if options.masked else ""),
        "bytes up, a process and round": up,
        "bytes down, a process and round": down,
        **measured,
        "floor_ms (median)": round(floor_ms, 3),
        "left after own compute, ms": round(left_ms, 3),
        "round / floor": round(round_ms / floor_ms, 2),
        "left / floor": round(left_ms / floor_ms, 2),
    }


def compressor_of(options: argparse.Namespace) -> CompressorChoice:
    """The one that the options name."""
    own = {} if options.compressor == "identity" else {"ratio": options.ratio}
    return CompressorChoice(
        options.compressor, own if options.bits is None else {**own, "bits": options.bits}
    )


def config_of(options: argparse.Namespace, folder: Path, **server: Any) -> dict[str, Any]:
    """The configuration of a federation on the no-op task, with more in its section ``server``."""
    compressor = compressor_of(options)
    return {
        "workers": options.workers,
        "task": {"name": TASK, "options": {"dim": options.dim}, "batch_size": 1},
        "algorithm": {
            "name": "afl-com",
            "rounds": options.rounds,
            "eta_w": 0.01,
            "eta_q": 0.1,
            "uplink": {"name": compressor.name, **compressor.options},
        },
        "privacy": {"secure_aggregation": options.masked},
        "evaluation": {"every": options.rounds},
        "run": {"seed": 1, "directory": str(folder / "run")},
        "server": {"listen": "127.0.0.1:0", "http": None, "chunk_bytes": options.chunk_bytes, **server},
    }


def worker_options(options: argparse.Namespace) -> tuple[str, ...]:
    """The command line's, of a worker of such a federation."""
    return ("--task", TASK, *(["--trust-server-keys"] if options.masked else []))


def _federation(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with Daemons(config_of(options, folder), folder, options.set) as daemons:
        idle = own_bytes(psutil.Process(daemons.server.pid))
        peak = _Peak(daemons.server.pid)
        try:
            for ids in _groups(options.workers, options.processes):
                daemons.start_worker(ids, f"127.0.0.1:{daemons.port}", worker_options(options))
            daemons.join()
        finally:
            peak.stop()
        timings = [
            line for name in daemons.workers for line in daemons.events(name) if line["event"] == "timings"
        ]
    return _figures(folder / "run", timings, options, idle=idle, peak=peak)


def _groups(workers: int, processes: int) -> list[str]:
    """As ``--id`` has them, of one process each."""
    starts = [workers * place // processes for place in range(processes + 1)]
    return [f"{start}-{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in pairwise(starts)]


def _figures(
    run_directory: Path,
    timings: Sequence[Mapping[str, Any]],
    options: argparse.Namespace,
    *,
    idle: int,
    peak: _Peak,
) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["event"] == "round"]
    seconds = seconds[max(1, len(seconds) // 10) :]
    cores = os.cpu_count() or 1

    def per_round(phase: str) -> float:
        total = sum(float(record[f"{phase}_cpu"]) for record in timings)
        return 1e3 * total / int(options.rounds) / min(cores, len(timings))

    own = per_round("compute") + per_round("codec") + per_round("prepare")
    communication = json.loads((run_directory / "summary.json").read_text())["communication"]
    model = 4 * options.dim
    return {
        "_gradient_bytes": [
            communication[direction]["wire_bytes_by_kind"]["gradient"] for direction in ("uplink", "downlink")
        ],
        "rounds measured": len(seconds),
        "round_ms (median)": round(1e3 * statistics.median(seconds), 3),
        "round_ms (min)": round(1e3 * min(seconds), 3),
        "compute, CPU ms a round over cores": round(per_round("compute"), 3),
        "codec, CPU ms a round over cores": round(per_round("codec"), 3),
        "prepare, CPU ms a round over cores": round(per_round("prepare"), 3),
        "workers' own compute, ms a round": round(own, 3),
        "server idle, MB": round(idle / 1e6, 1),
        "server peak above idle, MB": round((peak.highest - idle) / 1e6, 1),
        "server peak above idle, models": round((peak.highest - idle) / model, 2),
        "server memory, second to last quarter, MB": peak.drift(),
    }


def own_bytes(process: psutil.Process) -> int:
    """A process's resident memory without the pages of files: of PyTorch's libraries some 100 MB come in only
    as the process ends."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


class _Peak:
    """Samples a process's own memory."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._stopped = threading.Event()
        self.samples: list[int] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    @property
    def highest(self) -> int:
        return max(self.samples)

    def drift(self) -> str:
        """Median of the second and of the last quarter of the samples."""
        quarter = max(1, len(self.samples) // 4)
        second, last = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        return f"{statistics.median(second or last) / 1e6:.1f} to {statistics.median(last) / 1e6:.1f}"

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(0.05):
            try:
                self.samples.append(own_bytes(self._process))
            except psutil.NoSuchProcess:
                return


if __name__ == "__main__":
    main()
