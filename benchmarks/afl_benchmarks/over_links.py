"""Time and bytes to a worst worker's accuracy, over links of a given rate and delay.

python -m afl_benchmarks.over_links --data-dir data --mbit 20 --round-trip 50ms
python -m afl_benchmarks.over_links --data-dir data --mbit 0            # plain loopback
python -m afl_benchmarks.over_links --table docs/network/links.jsonl    # only the tables again

A server and one process for each worker, each behind a link of its own; the server's side has no limit.
The methods, the data and the step sizes are those of `python -m afl_reproduction` (EXPERIMENT, and the search
in RESULTS).
A run ends when the last target is reached, or with the last evaluation until --rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from afl.config import Config, Duration, dump_config
from afl.errors import AflError, ConfigError
from afl.runs.files import SUMMARY_FILE
from afl_benchmarks.daemons import Daemons
from afl_benchmarks.links.kinds import links_of
from afl_benchmarks.links.namespaces import UnavailableError
from afl_benchmarks.links.pipe import Link
from afl_benchmarks.links.results import (
    LinkRun,
    Point,
    add_run,
    median_round,
    overhead_table,
    read_runs,
    table,
)
from afl_benchmarks.metrics_tail import MetricsTail
from afl_reproduction.command import chosen_steps
from afl_reproduction.experiment import Experiment, load_experiment
from afl_reproduction.search_log import LOG_FILE, SearchLog

METHODS = ("afl-br", "afl-com-top-k", "afl-com-rand-k")
TARGETS = (0.5, 0.6, 0.7, 0.75)

_POLL_S = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.table is not None:
            runs = read_runs(options.table)
            print(table(runs, options.targets), overhead_table(runs), sep="\n", end="")
            return 0
        experiment = load_experiment(options.experiment)
        unknown = sorted(set(options.methods) - experiment.methods.keys())
        if unknown:
            raise ConfigError(f"no method {', '.join(unknown)}; there is {', '.join(experiment.methods)}")
        for method in options.methods:
            run = _measure(experiment, method, options)
            add_run(options.out, run)
            last = run.points[-1]
            print(
                f"{run.method}: {run.rounds} rounds, {run.round_seconds:.3f} s each; worst accuracy "
                f"{last.worst_accuracy:.3f} at round {last.round}, after {last.seconds:.1f} s",
                flush=True,
            )
    except (AflError, UnavailableError, RuntimeError) as error:
        print(f"links: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afl_benchmarks.over_links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--experiment", default="fashion-mnist", help="a shipped one, or a folder")
    parser.add_argument("--part", default="main", help="the experiment's part whose search chose the steps")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD")
    parser.add_argument("--results", type=Path, default=Path("docs/reproduction"), metavar="DIR")
    parser.add_argument("--data-dir", metavar="DIR", help="as a worker's")
    parser.add_argument("--mbit", type=float, default=20.0, help="10^6 bit/s each way; 0: plain loopback")
    parser.add_argument(
        "--round-trip", type=_duration, default=0.05, metavar="DURATION", help="50ms by default"
    )
    parser.add_argument(
        "--links",
        choices=["auto", "namespaces", "proxy"],
        default="auto",
        help="how links are made; auto: namespaces where this machine can, else the proxy",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--rounds", type=int, default=1000, help="a run ends with the last evaluation until then"
    )
    parser.add_argument("--targets", type=float, nargs="+", default=list(TARGETS), metavar="ACCURACY")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the run")
    parser.add_argument("--out", type=Path, default=Path("links.jsonl"), metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of such a file")
    return parser


def _duration(text: str) -> float:
    try:
        return float(Duration(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _configuration(experiment: Experiment, method: str, options: argparse.Namespace) -> Config:
    log = SearchLog(options.results / experiment.name / LOG_FILE)
    steps = chosen_steps(experiment, options.part, log)
    overrides = steps[method].overrides if method in steps else []
    return experiment.config(method, [*overrides, *options.set]).with_seed(options.seed)


def _measure(experiment: Experiment, method: str, options: argparse.Namespace) -> LinkRun:
    config = _configuration(experiment, method, options)
    workers = config.workers
    link = Link(options.mbit * 1e6 / 8, options.round_trip / 2) if options.mbit else None
    with tempfile.TemporaryDirectory() as name, links_of(options.links, workers, link) as links:
        folder = Path(name)
        values = yaml.safe_load(dump_config(config))
        values["run"]["directory"] = str(folder / "run")
        values["server"] |= {"http": None, **links.server_section}
        with Daemons(values, folder) as daemons:
            links.aim(daemons.port)
            data = () if options.data_dir is None else ("--data-dir", options.data_dir)
            for number in range(workers):
                daemons.start_worker(
                    str(number),
                    links.address(number),
                    [*links.worker_options, *data],
                    inside=links.inside(number),
                )
            watch = _Watch(daemons, folder / "run", workers)
            last = last_evaluation(options.rounds, config.algorithm.rounds, config.evaluate_every)
            watch.until(lambda: watch.is_done(max(options.targets), last))
            daemons.stop()
            carried = links.carried()
            summary = json.loads((folder / "run" / SUMMARY_FILE).read_text(encoding="utf-8"))
    sent = summary["communication"]
    algorithm = config.algorithm
    return LinkRun(
        method=experiment.methods[method].label,
        links=links.kind,
        mbit=options.mbit,
        round_trip_ms=options.round_trip * 1e3 if link else 0.0,
        seed=options.seed,
        rounds=len(watch.round_seconds),
        round_seconds=median_round(watch.round_seconds),
        carried_up=carried.up,
        carried_down=carried.down,
        messages_up=sent["uplink"]["wire_bytes"],
        messages_down=sent["downlink"]["wire_bytes"],
        path=watch.path_digest(),
        machine=f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        settings={
            "workers": workers,
            "batch_size": config.task.batch_size,
            "block": algorithm.block_length,
            "eta_w": algorithm.eta_w_value,
            "eta_q": algorithm.eta_q,
            "evaluation_every": config.evaluate_every,
        },
        points=watch.points,
    )


def last_evaluation(wanted: int, rounds: int, every: int) -> int:
    """The last evaluated round until ``wanted``, or the first of all; the run's last is always evaluated."""
    return rounds if wanted >= rounds else min(rounds, max(every, wanted // every * every))


class _Watch:
    """What a run's metrics say as it goes on, and when they said so."""

    def __init__(self, daemons: Daemons, directory: Path, workers: int) -> None:
        self.points: list[Point] = []
        self.round_seconds: list[float] = []
        self._daemons = daemons
        self._metrics = MetricsTail(directory)
        self._path = hashlib.sha256()
        self._digest = ""
        self._began_at = 0.0
        self.until(lambda: self._ready() >= workers)
        self._began_at = time.monotonic()

    def until(self, holds: Callable[[], bool]) -> None:
        """Look, until it holds.

        Raises:
            RuntimeError: if a process ends badly before.
        """
        while not holds():
            self._daemons.check()
            time.sleep(_POLL_S)

    def is_done(self, target: float, last: int) -> bool:
        """Whether an evaluation has reached the target, or is that of the round ``last``.

        Raises:
            RuntimeError: if the server has ended and there is none.
        """
        has_ended = self._daemons.server.poll() is not None
        for line in self._metrics.new():
            self._take(line)
            if self.points and (self.points[-1].worst_accuracy >= target or self.points[-1].round >= last):
                return True
        if has_ended:
            raise RuntimeError(f"the server has ended, and round {last} was not evaluated")
        return False

    def path_digest(self) -> str:
        """A checksum of what the metrics say of losses and dual weights, up to the last evaluation."""
        return self._digest

    def _take(self, line: dict[str, Any]) -> None:
        if line["event"] == "round":
            self.round_seconds.append(line["seconds"])
            values = [line[key] for key in ("round", "loss_max", "loss_mean", "dual_weight_max")]
            self._path.update(json.dumps(values).encode())
        elif line["event"] == "evaluation":
            self._digest = self._path.hexdigest()[:16]
            self.points.append(
                Point(
                    line["round"],
                    round(time.monotonic() - self._began_at, 2),
                    line["worst_accuracy"],
                    line["uplink_bytes"],
                    line["downlink_bytes"],
                )
            )

    def _ready(self) -> int:
        return sum(line.get("event") == "worker_ready" for line in self._daemons.events("server"))


if __name__ == "__main__":
    sys.exit(main())
