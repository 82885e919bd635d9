"""``afl run``: a whole federation on this machine, with one command."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path, PurePath

from rich.console import Console

from afl.config import Config, load_config
from afl.errors import ConfigError, ExitCode, RunCompleteError, StorageError, cannot_begin, why_unwritten
from afl.paths import as_argument, expanded, kind_of
from afl.runs.durable import own_folder
from afl.runs.files import STATE_FOLDER
from afl.runs.sites import sites_of
from afl.terminal.by_site import BySite
from afl.terminal.display import RunDisplay
from afl.terminal.parser import set_option
from afl.terminal.view import make_console, summary_table
from afl.user_code import SUFFIX, as_module_path
from afl_cli.federation.local import Ending, federate
from afl_cli.federation.peers import by_key
from afl_cli.federation.plan import (
    MOST_RESTARTS,
    FederationPlan,
    groups_of,
    processes_option,
    reachable,
    setting,
)

HELP = "run a server and its workers on this machine"

FREE_PORT = "127.0.0.1:0"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("config", type=expanded, metavar="CONFIG", help="the run's configuration (YAML)")
    workers = "the number of workers, instead of the configuration's (as --set workers=N)"
    parser.add_argument("--workers", type=int, metavar="N", help=workers)
    processes_option(parser)
    task = (
        "package.module:Class, file.py:Class or an installed name, instead of the configuration's task.name"
    )
    parser.add_argument("--task", metavar="TASK", help=task)
    set_option(parser)
    parser.add_argument("--device", default="auto", help="the workers': auto, cpu, cuda or cuda:N")
    parser.add_argument("--data-dir", metavar="DIR", help="where the task looks for data (sets AFL_DATA)")
    option = "an option of the task for this machine only; may be repeated"
    parser.add_argument("--task-option", action="append", default=[], metavar="KEY=VALUE", help=option)
    policy = "the policy that each worker goes by; without servers, since the port here is any free one"
    parser.add_argument("--policy", type=expanded, metavar="FILE", help=policy)
    restarts = (
        "how often in a row a dead worker process is restarted without a closed round in between"
        f" (default: {MOST_RESTARTS})"
    )
    parser.add_argument("--restarts", type=int, default=MOST_RESTARTS, metavar="N", help=restarts)
    compare = "then show what plain averaging, and each worker alone, make of the same data: simulated here"
    parser.add_argument("--compare", action="store_true", help=compare)


def run(options: argparse.Namespace) -> ExitCode:
    """Run the federation; the server's exit code, or that of a worker that could not go on."""
    overrides = list(options.set)
    if options.workers is not None:
        overrides.append(f"workers={options.workers}")
    name = options.task or load_config(options.config, overrides).task.name
    here, beside = Path.cwd(), options.config.resolve().parent
    if _holds(here, name) or not _holds(beside, name):
        return _run(options, overrides, Path())
    make_console().print(f"Working in {beside}: the task is there, beside the configuration.", soft_wrap=True)
    options.config = here / options.config
    options.policy = options.policy and here / options.policy
    options.data_dir = options.data_dir and str(here / expanded(options.data_dir))
    with contextlib.chdir(beside):
        return _run(options, overrides, beside)


def _holds(folder: Path, task: str) -> bool:
    """Whether a task is in a folder, by the file or module that names it."""
    module, _, _ = task.rpartition(":")
    path = PurePath(module.removesuffix(SUFFIX) if module.endswith(SUFFIX) else module.replace(".", "/"))
    files = (path.with_name(path.name + SUFFIX), path / "__init__.py") if module else ()
    return any(kind_of(folder / file) for file in files)


def _run(options: argparse.Namespace, overrides: list[str], folder: Path) -> ExitCode:
    """In the working directory, which is ``folder`` where that is not the user's own."""
    if options.task is not None:
        overrides += setting("task.name", as_module_path(options.task))[1:]
    config = load_config(options.config, overrides)
    if options.restarts < 0:
        raise ConfigError(f"--restarts {options.restarts}: a whole number, at least 0")
    directory = folder / (config.run.directory or Path("runs") / options.config.stem)
    plan = _plan(options, config, overrides, directory)
    console = make_console()
    processes = f"{len(plan.groups)} worker process{'es' * (len(plan.groups) != 1)}"
    workers = f"{config.workers} worker{'s' * (config.workers != 1)}"
    starting = f"Starting a server and {processes} for {workers}; their logs: {plan.logs}"
    console.print(starting, soft_wrap=True)
    try:
        own_folder(plan.logs.parent)
        own_folder(plan.logs)
    except OSError as error:
        if kind_of(directory / STATE_FOLDER):
            raise StorageError(f"{plan.logs.parent} cannot be written: {why_unwritten(error)}") from error
        raise cannot_begin(directory, error) from error
    if config.privacy.secure_aggregation:
        keys = directory / "peers"
        plan = replace(plan, worker=[*plan.worker, *by_key(keys, config.workers)])
        told = f"Messages are masked; the workers know each other by a key of this command's, in {keys}"
        console.print(told, soft_wrap=True)
    try:
        ending = federate(plan, RunDisplay(console, hint="Ctrl-C stops it; the same command resumes it."))
    except RunCompleteError:
        if not options.compare:
            raise
    else:
        _report(console, ending, directory)
        if not options.compare or ending.code is not ExitCode.OK:
            return ending.code
    # PyTorch takes seconds to import.
    from afl_lab.simulation.baselines import compare  # noqa: PLC0415
    from afl_worker.main import task_option  # noqa: PLC0415

    if options.data_dir:
        os.environ["AFL_DATA"] = options.data_dir
    own = dict(task_option(text) for text in options.task_option)
    return compare(console, directory, config.algorithm.name, alone=True, options=own)


def _report(console: Console, ending: Ending, directory: Path) -> None:
    """Print how the run ended, and what to do next."""
    summary, code = ending.summary, ending.code
    if summary is not None and summary["rounds"]:
        reason = summary["reason"] if code is ExitCode.OK else "not complete"
        console.print(summary_table({**summary, "reason": reason}, directory))
        console.print(BySite(sites_of(directory)))
    if code is ExitCode.OK:
        console.print(f"\nNext:  afl inspect {as_argument(directory)}", soft_wrap=True)
        return
    print(f"afl run: {ending.reason}", file=sys.stderr)
    if code is ExitCode.DIVERGED:
        console.print("Another algorithm.eta_w makes another run: name a new run.directory with it.")
    elif ending.can_go_on and code is ExitCode.INTERRUPTED:
        console.print("The same command resumes the run.")
    elif ending.can_go_on:
        another = "If it needs another configuration, that is another run: name a new run.directory."
        console.print(f"Once that is fixed, the same command resumes the run. {another}", soft_wrap=True)


def _plan(
    options: argparse.Namespace, config: Config, overrides: list[str], directory: Path
) -> FederationPlan:
    groups = groups_of(config.workers, options.processes)
    server = ["--config", str(options.config)]
    server += [argument for override in overrides for argument in ("--set", override)]
    server += setting("run.directory", str(directory))
    # All of it stays on this machine: any free port will do, and nobody is kept out.
    for key, value in {"listen": FREE_PORT, "tls": None, "tokens": None, "insecure": False}.items():
        server += setting(f"server.{key}", value)
    http = config.server.http
    if http is None:
        server += setting("server.http", FREE_PORT)
    name = config.task.name
    worker = ["--device", options.device, "--journal", str(directory / "journal")]
    # Nobody else gets what these workers send, so small minibatches do no harm.
    worker += ["--min-batch", "1"] if options.policy is None else ["--policy", str(options.policy)]
    worker += ["--task", name] if ":" in name else []
    worker += ["--data-dir", options.data_dir] if options.data_dir else []
    worker += [argument for option in options.task_option for argument in ("--task-option", option)]
    return FederationPlan(
        server=server,
        groups=groups,
        worker=worker,
        logs=directory / "logs",
        http_host="127.0.0.1" if http is None else reachable(http.host),
        http_certificate=config.server.http_certificate,
        restarts=options.restarts,
        stops_softly=True,
    )
