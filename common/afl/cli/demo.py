"""``afl demo``: a real federation on this machine, from its first process to its model file."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from afl.cli.children import Child, Children
from afl.cli.status import fetch_status
from afl.cli.view import describe_workers, facts, make_console, run_view
from afl.config import config_from_mapping, dump_config
from afl.config.quantities import shown_bytes, shown_seconds
from afl.errors import AflError, ConfigError, ExitCode, LostServerError
from afl.extras import INSTALL_HINT

HELP = "run a real federation on this machine, without a network"

REFRESH_S: Final = 0.25

MOST_WORKERS: Final = 50
"""1,797 images leave each of 50 workers at least two to test on; of 100 workers some get none."""

FEWEST_PROCESSES: Final = 4
"""Each process imports PyTorch and scikit-learn, five to six seconds of one core: on two cores ten would take
half a minute to start, and the run itself takes five seconds."""

EVALUATIONS: Final = 30

BYTES_A_VALUE: Final = 4

_COMPRESSORS: Final[Mapping[str, str]] = {
    "rand-k": "a random tenth of each update, the same coordinates at every worker",
    "top-k": "the largest tenth of each worker's update, and where it belongs",
    "identity": "whole updates, uncompressed",
}

_INTRODUCTION: Final = """\
{workers} workers hold handwritten digits that never leave them{skew}. They and a server
are separate processes ({processes} for the workers, {hosting}), which talk over real sockets.
The server gives the workers that the model serves worst the most weight.
What travels: {compressor}.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "--workers", type=int, default=10, metavar="M", help=f"1 to {MOST_WORKERS} (default: 10)"
    )
    parser.add_argument("--rounds", type=int, default=150, metavar="T", help="update rounds (default: 150)")
    parser.add_argument(
        "--compressor", choices=list(_COMPRESSORS), default="rand-k", help="what travels (default: rand-k)"
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="P",
        help="processes that host the workers (default: one a worker, but no more than "
        f"{FEWEST_PROCESSES} or the number of cores)",
    )
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same model (default: 1)")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="write models, metrics and logs here (default: a new temporary directory)",
    )


@dataclass(frozen=True)
class Plan:
    """What a demo runs.

    Attributes:
        groups: the worker ids of each worker process.
    """

    workers: int
    rounds: int
    compressor: str
    seed: int
    groups: tuple[range, ...]

    @classmethod
    def of(cls, options: argparse.Namespace) -> Plan:
        """The plan that the options ask for.

        Raises:
            ConfigError: if they ask for what cannot be run.
        """
        if not 1 <= options.workers <= MOST_WORKERS:
            raise ConfigError(f"--workers {options.workers}: a demo has 1 to {MOST_WORKERS} workers")
        if options.rounds < 1:
            raise ConfigError(f"--rounds {options.rounds}: at least 1")
        if options.seed < 0:
            raise ConfigError(f"--seed {options.seed}: a whole number, at least 0")
        processes = options.processes
        if processes is None:
            processes = min(options.workers, max(FEWEST_PROCESSES, _cores()))
        if not 1 <= processes <= options.workers:
            raise ConfigError(f"--processes {processes}: 1 to the number of workers ({options.workers})")
        if importlib.util.find_spec("sklearn") is None:
            raise ConfigError(f"the demo's images come with scikit-learn, which is not here: {INSTALL_HINT}")
        groups = _divided(options.workers, processes)
        return cls(options.workers, options.rounds, options.compressor, options.seed, groups)

    def config(self) -> dict[str, Any]:
        """The run's configuration."""
        is_compressed = self.compressor != "identity"
        return {
            "workers": self.workers,
            "task": {"name": "digits"},
            "algorithm": {
                "name": "afl-com" if is_compressed else "afl-br",
                "rounds": self.rounds,
                "eta_w": 0.1,
                "eta_q": 0.1,
                **({"uplink": {"name": self.compressor, "ratio": 0.1}} if is_compressed else {}),
            },
            "evaluation": {"every": max(1, self.rounds // EVALUATIONS)},
            "run": {"seed": self.seed},
            "server": {"listen": "127.0.0.1:0", "http": "127.0.0.1:0", "start_timeout": "120s"},
        }

    def introduction(self) -> str:
        """What will be seen."""
        processes = len(self.groups)
        return _INTRODUCTION.format(
            workers=self.workers,
            skew=", 80 % of a digit each" if self.workers == 10 else "",
            processes=processes,
            hosting="one each" if processes == self.workers else "each hosting several",
            compressor=_COMPRESSORS[self.compressor],
        )


def run(options: argparse.Namespace) -> ExitCode:
    """Run the federation and print what came of it."""
    plan = Plan.of(options)
    console = make_console()
    console.print(plan.introduction())
    started = time.monotonic()
    with _directory(options.keep) as directory, Children() as children:
        listening = _start(children, plan, directory)
        with _Progress(console) as progress:
            _follow(children, len(plan.groups) + 1, f"127.0.0.1:{listening['http_port']}", progress)
    seconds = time.monotonic() - started
    console.print(result_table(directory, sessions=len(plan.groups), dim=listening["dim"], seconds=seconds))
    console.print(f"\nNext:  afl inspect {directory}")
    console.print("       afl-server --help and afl-worker --help, for a federation across machines")
    return ExitCode.OK


def result_table(directory: Path, *, sessions: int, dim: int, seconds: float) -> RenderableType:
    """What came of a run, for someone who has not seen one before.

    Args:
        sessions: connections that a broadcast went over.
        dim: d, the parameters of the model.
    """
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    evaluations = [
        entry
        for entry in map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        if entry["event"] == "evaluation"
    ]
    first, last = evaluations[0], evaluations[-1]
    sent, uncompressed = sent_and_uncompressed(summary, sessions=sessions, dim=dim)
    return facts(
        {
            "worst worker, at the start": f"accuracy {first['worst_accuracy']:.3f} "
            f"(worker {first['worst_worker']}, after round {first['round']})",
            "worst worker, at the end": f"accuracy {last['worst_accuracy']:.3f} "
            f"(worker {last['worst_worker']}, after round {last['round']})",
            "mean over the workers": f"from {first['mean_accuracy']:.3f} to {last['mean_accuracy']:.3f}",
            "time": f"{shown_seconds(seconds)} in all, most of it to start the processes",
            "on the wire": f"{shown_bytes(sent)}; uncompressed: {shown_bytes(uncompressed)}, "
            f"{uncompressed / sent:.1f} times as much",
            "the model": str(directory / "model-final.safetensors"),
        },
        title=f"{summary['rounds']} rounds with {summary['workers']} workers",
    )


def sent_and_uncompressed(summary: Mapping[str, Any], *, sessions: int, dim: int) -> tuple[int, int]:
    """Bytes on the wire both ways, and what whole vectors in their place would have made of them.

    Without compression each worker sends ``dim`` values a round, and each connection gets ``dim`` values
    a round and the first model; scalars and envelopes stay what they were.
    """
    directions = summary["communication"].values()
    sent = sum(direction["wire_bytes"] for direction in directions)
    parts = [direction["payload_bytes_by_part"] for direction in directions]
    vectors = sum(part["values"] + part["indices"] for part in parts)
    whole = summary["rounds"] * (summary["workers"] + sessions) + sessions
    return sent, sent - vectors + whole * dim * BYTES_A_VALUE


class _Progress:
    """The run as it goes: redrawn on a terminal, a line where something changed elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )
        self._last_line = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, state: Mapping[str, Any]) -> None:
        """Show a state of the server."""
        if self._live is not None:
            self._live.update(Group(run_view(state), Text("Ctrl-C ends it.", style="dim")), refresh=True)
            return
        line = _line(state)
        if line != self._last_line:
            self._console.print(line)
            self._last_line = line


def _line(state: Mapping[str, Any]) -> str:
    last = state["last"]
    if last is None:
        return describe_workers(state)
    return (
        f"round {last['round']} of {state['rounds']}: worst worker {last['worst_worker']}, "
        f"accuracy {last['worst_accuracy']:.3f} (mean {last['mean_accuracy']:.3f})"
    )


def _start(children: Children, plan: Plan, directory: Path) -> dict[str, Any]:
    """Start the server, and the workers once it listens; the fields of its event ``listening``."""
    config = directory / "demo.yaml"
    config.write_text(dump_config(config_from_mapping(plan.config(), "the demo")), encoding="utf-8")
    # In quotes, and with what would be filled in from the environment escaped.
    where = json.dumps(str(directory).replace("${", "$${"))
    server = children.start(
        "server",
        "afl_server",
        ["--config", str(config), "--set", f"run.directory={where}", "--no-live"],
        directory / "server.log",
    )
    while (event := children.next_event()) is None or event.name != "listening":
        if event is not None and not event.fields:
            raise _failure(server)
    server_address = f"127.0.0.1:{event.fields['port']}"
    for group in plan.groups:
        ids = f"{group[0]}-{group[-1]}" if len(group) > 1 else f"{group[0]}"
        children.start(
            f"workers {ids}" if len(group) > 1 else f"worker {ids}",
            "afl_worker",
            [
                *("--id", ids, "--server", server_address, "--device", "cpu", "--give-up-after", "30s"),
                *("--journal", str(directory / "journal")),
            ],
            directory / f"workers-{ids}.log",
        )
    return event.fields


def _follow(children: Children, processes: int, server: str, progress: _Progress) -> None:
    """Show the run until every process has ended.

    Raises:
        AflError: if one fails.
    """
    due = time.monotonic()
    while processes:
        event = children.next_event(timeout=max(0.0, due - time.monotonic()))
        if event is not None and not event.fields:
            processes -= 1
            if event.child.wait() != 0:
                raise _failure(event.child)
        if time.monotonic() >= due:
            # The server is gone as soon as the run is over; its workers follow.
            with contextlib.suppress(LostServerError):
                progress.show(fetch_status(server))
            due = time.monotonic() + REFRESH_S


def _failure(child: Child) -> AflError:
    """What to say of a child that ended before its time, with the last that it said."""
    code = child.wait()
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    failure = AflError(f"the {child.name} process {how}; its log ({child.log}) ends:\n{child.tail}")
    if code in set(ExitCode) - {ExitCode.OK}:
        failure.exit_code = ExitCode(code)
    return failure


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """The run's directory; a temporary one goes again if a person stops the demo."""
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
            if any(keep.iterdir()):
                raise ConfigError(f"--keep {keep}: the directory is not empty; name a new one")
        except OSError as error:
            raise ConfigError(f"--keep {keep}: {error.strerror}") from error
        yield keep
        return
    directory = Path(tempfile.mkdtemp(prefix="afl-demo-"))
    try:
        yield directory
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _divided(workers: int, processes: int) -> tuple[range, ...]:
    """The ids in runs whose lengths differ by at most one."""
    edges = [workers * index // processes for index in range(processes + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(edges))


def _cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
