"""``afl demo``: a real federation on this machine, from its first process to its model file."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import RenderableType

from afl.config import config_from_mapping, dump_config
from afl.config.compressors import IDENTITY
from afl.config.quantities import shown_bytes, shown_seconds
from afl.errors import ConfigError, ExitCode, why_unwritable
from afl.optional_dependencies import INSTALL_HINT
from afl.paths import as_argument, expanded
from afl.runs.files import METRICS_FILE, SUMMARY_FILE, metrics_entries, model_file, of_event, read_summary
from afl.runs.metrics import hidden_figures, ranked
from afl.security.identity import WorkerIds
from afl.terminal.display import RunDisplay
from afl.terminal.view import compared, facts, make_console
from afl_cli.federation.local import federate
from afl_cli.federation.peers import MASKED_BITS, by_certificates
from afl_cli.federation.plan import FederationPlan, groups_of, processes_option, setting

HELP = "run a real federation on this machine, without a network"

MOST_WORKERS: Final = 50
"""1,797 images leave each of 50 workers at least two to test on; of 100 workers some get none."""

EVALUATIONS: Final = 30

_COMPRESSORS: Final[Mapping[str, str]] = {
    "rand-k": "a random tenth of each update, the same coordinates at every worker",
    "top-k": "the largest tenth of each worker's update, and where it belongs",
    IDENTITY: "whole updates, uncompressed",
}

FEWEST_PRIVATE: Final = 3
"""Worker processes of a private demo: of the sum of two, each knows the other's part."""

MASKED: Final = ("rand-k", IDENTITY)
"""Of these, those whose messages can be masked."""

_INTRODUCTION: Final = """\
{workers} workers hold handwritten digits that never leave them{skew}. They and a server
are separate processes ({processes} for the workers, {hosting}), which talk over real sockets.
The server gives the workers that the model serves worst the most weight.
What travels: {compressor}.
"""

_PRIVATE: Final = """\
Updates, losses and metrics are masked: the server learns their sums, and no worker's
own. Each worker process has a certificate of its own, by which the others know it.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    workers = f"1 to {MOST_WORKERS} (default: 10)"
    parser.add_argument("--workers", type=int, default=10, metavar="M", help=workers)
    parser.add_argument("--rounds", type=int, default=150, metavar="T", help="update rounds (default: 150)")
    compressor = "which compressor (default: rand-k)"
    parser.add_argument("--compressor", choices=[*_COMPRESSORS], default="rand-k", help=compressor)
    processes_option(parser)
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same model (default: 1)")
    private = "mask what workers send: the server learns sums only"
    parser.add_argument("--private", action="store_true", help=private)
    keep = "write models, metrics and logs here (default: a new temporary directory)"
    parser.add_argument("--keep", type=expanded, metavar="DIR", help=keep)


def checked_groups(options: argparse.Namespace) -> tuple[range, ...]:
    """The worker ids of each worker process; raises ConfigError for options that cannot be run."""
    if not 1 <= options.workers <= MOST_WORKERS:
        raise ConfigError(f"--workers {options.workers}: a demo has 1 to {MOST_WORKERS} workers")
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: at least 1")
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: a whole number, at least 0")
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(f"the demo's images come with scikit-learn, which is not installed: {INSTALL_HINT}")
    groups = groups_of(options.workers, options.processes)
    if options.private:
        if options.compressor not in MASKED:
            raise ConfigError(
                f"--compressor {options.compressor}: masks are added to integers at places that all workers "
                f"share; with --private take {' or '.join(MASKED)}"
            )
        if len(groups) < FEWEST_PRIVATE:
            raise ConfigError(
                f"--private with {len(groups)} worker process{'es' * (len(groups) != 1)}: at least "
                f"{FEWEST_PRIVATE}, or one knows the other's part of the sum; give more --workers or more "
                "--processes"
            )
    return groups


def configuration(options: argparse.Namespace, tls: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The run's configuration, with the section ``server.tls``."""
    algorithm = {"name": "afl-br", "rounds": options.rounds, "eta_w": 0.1, "eta_q": 0.1}
    if options.compressor != IDENTITY:
        algorithm |= {"name": "afl-com", "uplink": {"name": options.compressor, "ratio": 0.1}}
    privacy = {}
    if options.private:
        algorithm["name"] = "afl-com"
        algorithm["uplink"] = {"name": IDENTITY, **algorithm.get("uplink", {}), "bits": MASKED_BITS}
        privacy = {"secure_aggregation": True, "losses": "hidden"}
    return {
        "workers": options.workers,
        "task": {"name": "digits"},
        "algorithm": algorithm,
        "evaluation": {"every": max(1, options.rounds // EVALUATIONS)},
        "run": {"seed": options.seed},
        "privacy": privacy,
        "server": {"listen": "127.0.0.1:0", "http": "127.0.0.1:0", "start_timeout": "120s", "tls": tls},
    }


def run(options: argparse.Namespace) -> ExitCode:
    """Run the federation and print what came of it."""
    groups = checked_groups(options)
    console = make_console()
    console.print(
        _INTRODUCTION.format(
            workers=options.workers,
            skew=", 80 % of a digit each" if options.workers == 10 else "",
            processes=len(groups),
            hosting="one each" if len(groups) == options.workers else "each hosting several",
            compressor=_COMPRESSORS[options.compressor],
        )
    )
    if options.private:
        console.print(_PRIVATE)
    started = time.monotonic()
    with _directory(options.keep) as directory:
        tls: Mapping[str, str] | None = None
        own: dict[range, list[str]] = {}
        capture = directory / f"sent-by-{WorkerIds.of(groups[0])}"
        if options.private:
            tls, known = by_certificates(directory / "certificates", groups)
            own = {**known, groups[0]: [*known[groups[0]], "--capture", str(capture)]}
        path = directory / "demo.yaml"
        config = dump_config(config_from_mapping(configuration(options, tls), "the demo"))
        path.write_text(config, encoding="utf-8")
        plan = FederationPlan(
            server=["--config", str(path), *setting("run.directory", str(directory))],
            groups=groups,
            worker=["--device", "cpu", "--give-up-after", "30s", "--journal", str(directory / "journal")],
            logs=directory,
            own=own,
        )
        ending = federate(plan, RunDisplay(console, hint="Ctrl-C ends it.", is_transient=True))
    if ending.code is not ExitCode.OK:
        print(f"afl demo: {ending.reason}", file=sys.stderr)
        return ending.code
    console.print(result_table(directory, seconds=time.monotonic() - started))
    from afl_lab.simulation.baselines import compare  # noqa: PLC0415  # PyTorch takes seconds to import

    code = compare(console, directory, "this run", alone=False)
    console.print(f"\nNext:  afl inspect {as_argument(directory)}", soft_wrap=True)
    if options.private:
        what = "was all that it has sent masked?"
        console.print(f"       afl capture {as_argument(capture)}  {what}", soft_wrap=True)
    console.print("       afl new NAME, for a model of your own")
    return code


def result_table(directory: Path, *, seconds: float) -> RenderableType:
    """What came of a run, for someone who has not seen one before."""
    summary = read_summary(directory / SUMMARY_FILE)
    entries, _ = metrics_entries(directory / METRICS_FILE)
    evaluations = of_event(entries, "evaluation")
    first, last = evaluations[0], evaluations[-1]
    sent = sum(count["wire_bytes"] for count in summary["communication"].values())
    whom = "all workers" if hidden_figures(first) else "worst worker"
    uncompressed = compared(sent, summary["uncompressed_bytes"])
    return facts(
        {
            f"{whom}, at the start": _worst(first),
            f"{whom}, at the end": _worst(last),
            "mean over the workers": f"from {first['mean_accuracy']:.3f} to {last['mean_accuracy']:.3f}",
            "time": f"{shown_seconds(seconds)} in all, most of it to start the processes",
            "on the wire": f"{shown_bytes(sent)}; uncompressed: {uncompressed}",
            "the model": str(directory / model_file("final")),
        },
        title=f"{summary['rounds']} rounds with {summary['workers']} workers",
    )


def _worst(evaluation: Mapping[str, Any]) -> str:
    """How the worst worker stood."""
    if known := hidden_figures(evaluation):
        return f"{known} (after round {evaluation['round']})"
    worst = f"(worker {evaluation['worst_worker']}, after round {evaluation['round']})"
    by = ranked(evaluation)
    return f"{by.metric} {by.shown(by.worst)} {worst}"


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """The run's directory; a temporary one goes again if a person stops the demo."""
    if keep is None:
        directory = Path(tempfile.mkdtemp(prefix="afl-demo-"))
        try:
            yield directory
        except KeyboardInterrupt:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise ConfigError(f"--keep {keep}: the directory is not empty; name a new one")
    except OSError as error:
        raise ConfigError(f"--keep {keep}: {why_unwritable(error)}; name a new directory") from error
    yield keep
