"""``afl demo``: a real federation on this machine, from its first process to its model file."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import RenderableType

from afl.config import config_from_mapping, dump_config
from afl.config.quantities import shown_bytes, shown_seconds
from afl.errors import ConfigError, ExitCode, why_unwritable
from afl.optional_dependencies import INSTALL_HINT
from afl.terminal.display import RunDisplay
from afl.terminal.view import compared, facts, make_console
from afl_cli.federation.children import Children
from afl_cli.federation.local import LocalFederation
from afl_cli.federation.plan import FEWEST_PROCESSES, FederationPlan, groups_of, setting

HELP = "run a real federation on this machine, without a network"

MOST_WORKERS: Final = 50
"""1,797 images leave each of 50 workers at least two to test on; of 100 workers some get none."""

EVALUATIONS: Final = 30

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
    """Declare the command's options."""
    parser.add_argument(
        "--workers", type=int, default=10, metavar="M", help=f"1 to {MOST_WORKERS} (default: 10)"
    )
    parser.add_argument("--rounds", type=int, default=150, metavar="T", help="update rounds (default: 150)")
    parser.add_argument(
        "--compressor",
        choices=list(_COMPRESSORS),
        default="rand-k",
        help="which compressor (default: rand-k)",
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
        groups = groups_of(options.workers, options.processes)
        if importlib.util.find_spec("sklearn") is None:
            raise ConfigError(
                f"the demo's images come with scikit-learn, which is not installed: {INSTALL_HINT}"
            )
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
        """What the demo will show, as a paragraph for the terminal."""
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
        federation = LocalFederation(_processes(plan, directory), children)
        federation.start()
        with RunDisplay(console, hint="Ctrl-C ends it.", is_transient=True) as display:
            ending = federation.follow(display)
    if ending.code is not ExitCode.OK:
        print(f"afl demo: {ending.reason}", file=sys.stderr)
        return ending.code
    console.print(result_table(directory, seconds=time.monotonic() - started))
    console.print(f"\nNext:  afl inspect {directory}", soft_wrap=True)
    console.print("       afl new NAME, for a model of your own")
    return ExitCode.OK


def result_table(directory: Path, *, seconds: float) -> RenderableType:
    """What came of a run, for someone who has not seen one before."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    evaluations = [
        entry
        for entry in map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        if entry["event"] == "evaluation"
    ]
    first, last = evaluations[0], evaluations[-1]
    sent = sum(count["wire_bytes"] for count in summary["communication"].values())
    return facts(
        {
            "worst worker, at the start": f"accuracy {first['worst_accuracy']:.3f} "
            f"(worker {first['worst_worker']}, after round {first['round']})",
            "worst worker, at the end": f"accuracy {last['worst_accuracy']:.3f} "
            f"(worker {last['worst_worker']}, after round {last['round']})",
            "mean over the workers": f"from {first['mean_accuracy']:.3f} to {last['mean_accuracy']:.3f}",
            "time": f"{shown_seconds(seconds)} in all, most of it to start the processes",
            "on the wire": f"{shown_bytes(sent)}; uncompressed: "
            f"{compared(sent, summary['uncompressed_bytes'])}",
            "the model": str(directory / "model-final.safetensors"),
        },
        title=f"{summary['rounds']} rounds with {summary['workers']} workers",
    )


def _processes(plan: Plan, directory: Path) -> FederationPlan:
    """The processes of a demo; its configuration is written for them."""
    config = directory / "demo.yaml"
    config.write_text(dump_config(config_from_mapping(plan.config(), "the demo")), encoding="utf-8")
    return FederationPlan(
        server=["--config", str(config), *setting("run.directory", str(directory))],
        groups=plan.groups,
        worker=["--device", "cpu", "--give-up-after", "30s", "--journal", str(directory / "journal")],
        logs=directory,
    )


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """The run's directory; a temporary one goes again if a person stops the demo."""
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
            if any(keep.iterdir()):
                raise ConfigError(f"--keep {keep}: the directory is not empty; name a new one")
        except OSError as error:
            raise ConfigError(f"--keep {keep}: {why_unwritable(error)}; name a new directory") from error
        yield keep
        return
    directory = Path(tempfile.mkdtemp(prefix="afl-demo-"))
    try:
        yield directory
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        raise
