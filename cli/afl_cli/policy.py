"""``afl policy``: a site's policy, shown, and held against a run before the run is."""

from __future__ import annotations

import argparse
import json
import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from afl.config import Config, load_config
from afl.config.document import all_keys
from afl.config.problems import dotted
from afl.errors import ConfigError, ExitCode, StorageError
from afl.paths import as_argument, expanded
from afl.site.policy import Demand, Policy, SitePolicy
from afl.terminal.parser import set_option
from afl.terminal.view import make_console, table

if TYPE_CHECKING:
    from afl.wire.settings import RunSettings

HELP = "write, show and try the policy of a site"

_DOES: Final = (
    "new writes one to fill in; show lists what is allowed; check holds a run's configuration against it"
)

_EXAMPLE: Final = {
    "servers": "[federation.example.org:50051]",
    "authorities": "[AB:CD:...]",
    "tasks": "{hospital_task:Heart: {split: [train]}, digits: any}",
    "algorithms": "[afl-br, afl-com]",
    "min_workers": "5",
    "max_rounds": "10000",
    "min_batch": "16",
    "secure_aggregation": "required",
    "losses": "hidden",
    "metrics": "hidden",
    "epsilon": "8.0",
    "delta": "1e-5",
    "audit": "/var/lib/afl/audit.jsonl",
}
"""What the new policy has as an example, by key."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = "The exit code of check is 13 if the policy forbids the run."
    parser.add_argument("action", choices=["new", "show", "check"], help=_DOES)
    parser.add_argument("policy", type=expanded, metavar="POLICY", help="the policy's file (YAML)")
    config = "the run's configuration (YAML), for check"
    parser.add_argument("config", nargs="?", type=expanded, metavar="CONFIG", help=config)
    set_option(parser)
    parser.add_argument("--json", action="store_true", help="print what is found as JSON")


def run(options: argparse.Namespace) -> ExitCode:
    """Write, show or check."""
    if (options.config is not None) != (options.action == "check"):
        right = "afl policy check POLICY CONFIG; new and show take a policy alone"
        raise ConfigError(f"{options.action}: {'no ' * (options.config is None)}CONFIG; write {right}")
    if options.action == "new":
        return _new(options.policy)
    policy = SitePolicy.load(options.policy)
    if options.action == "show":
        return _show(policy, as_json=options.json)
    config = load_config(options.config, options.set)
    found = policy.demands(_settings(config), config.task.name)
    return _check(options, found)


def _new(path: Path) -> ExitCode:
    wrapped = partial(textwrap.fill, width=100, break_long_words=False, break_on_hyphens=False)
    blocks = [
        f"{wrapped(key.description, initial_indent='# ', subsequent_indent='# ')}\n"
        f"{wrapped(key.accepts, initial_indent='#   ', subsequent_indent='#   ')}\n"
        f"# {key.name}: {_EXAMPLE[key.name]}\n"
        for key in all_keys(Policy)
    ]
    head = "# What this site allows, whatever a server asks for; a key that is left out limits nothing.\n"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write("\n".join([head, *blocks]))
    except FileExistsError as error:
        raise ConfigError(f"{path} exists, and nothing is overwritten; name another file") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    named = as_argument(path)
    print(f"Written: {path}. Take the # from what you want, then:  afl policy show {named}")
    return ExitCode.OK


def _show(policy: SitePolicy, *, as_json: bool) -> ExitCode:
    values = policy.limits.model_dump(mode="json")
    if as_json:
        print(json.dumps(values, indent=2))
        return ExitCode.OK
    rows = table("key", "value", "line", "meaning", title="Policy")
    for key in all_keys(Policy):
        value = values[key.name]
        limit = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
        rows.add_row(key.name, limit, policy.places.get((key.name,), ""), key.description)
    make_console().print(rows)
    return ExitCode.OK


def _check(options: argparse.Namespace, found: list[Demand]) -> ExitCode:
    code = ExitCode.OK if all(demand.is_met for demand in found) else ExitCode.POLICY
    if options.json:
        lines = [{**vars(demand), "key": dotted(demand.key)} for demand in found]
        print(json.dumps({"allowed": code is ExitCode.OK, "demands": lines}, indent=2))
        return code
    title = f"{options.config} at this site"
    rows = table("", "key", "the policy allows", "the run has", "line", title=title)
    for demand in found:
        mark = "ok" if demand.is_met else "REFUSED"
        rows.add_row(mark, dotted(demand.key), demand.allowed, demand.found, demand.where)
    console = make_console()
    console.print(rows)
    verdict = "This run may take place here." if code is ExitCode.OK else "A worker here refuses this run."
    console.print(f"{verdict} The server's address and authority are checked as a worker connects.")
    return code


def _settings(config: Config) -> RunSettings:
    """What a server with this configuration sends."""
    from afl.tasks.registry import local_options  # noqa: PLC0415  # with PyTorch
    from afl.wire.settings import RunSettings  # noqa: PLC0415

    return RunSettings.of_config(config, local_options(config.task.name))
