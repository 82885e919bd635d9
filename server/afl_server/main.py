"""``afl-server``: run one federation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from afl.config import Config, load_config
from afl.config.address import check_plaintext
from afl.config.document import help_text
from afl.daemon.logs import add_to_every_line, set_up_logs
from afl.errors import AflError, ConfigError, ExitCode
from afl.paths import expanded, kind_of, naming_paths
from afl.runs.files import CONFIG_FILE, STATE_FOLDER
from afl.terminal.display import can_redraw
from afl.terminal.entry import failed
from afl.terminal.parser import daemon_options, make_parser
from afl_server.network.authentication import Authentication


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = make_server_parser()
    options = parser.parse_args(arguments)
    if options.help_config:
        print(help_text())  # noqa: T201
        return ExitCode.OK
    if options.config is None and options.resume is None:
        parser.error(
            "--config FILE is needed (deploy/server.yaml is an example; --help-config has every key), or "
            "--resume DIR to resume a run"
        )
    if options.config is not None and options.resume is not None:
        parser.error("--resume uses the run's own configuration; leave out --config")
    set_up_logs(level=options.log_level, as_json=options.json_logs)
    add_to_every_line(run_id=None)
    try:
        with naming_paths():
            if options.resume is None:
                config = load_config(options.config, options.set)
            else:
                config = stored_config(options.resume, options.set)
            if config.server.tls is None:
                check_plaintext(config.server.listen, insecure=config.server.insecure)
            authentication = Authentication(config.server)
            # PyTorch takes seconds to import: what is wrong with the configuration is said before.
            from afl_server.runner.run import run  # noqa: PLC0415

            return run(config, authentication, live=options.live, stays=options.stay)
    except AflError as error:
        return failed("afl-server", error)
    except KeyboardInterrupt:
        # The run itself takes the signal; this one came before it had begun.
        print("afl-server: interrupted before the run began", file=sys.stderr)  # noqa: T201
        return ExitCode.INTERRUPTED


def make_server_parser() -> argparse.ArgumentParser:
    """The parser of its command line."""
    parser = make_parser(
        "afl-server",
        "Run one federation: wait for the workers, train the model for its worst worker, write the results.",
    )
    parser.add_argument("--config", type=expanded, metavar="FILE", help="the run's configuration (YAML)")
    parser.add_argument(
        "--resume",
        type=expanded,
        metavar="DIR",
        help="resume the run in this directory, with its own configuration",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, for example --set algorithm.rounds=500; may be repeated",
    )
    parser.add_argument("--help-config", action="store_true", help="describe every key and exit")
    parser.add_argument(
        "--live",
        action=argparse.BooleanOptionalAction,
        default=can_redraw(),
        help="show live progress (default: where standard output is a terminal)",
    )
    daemon_options(parser)
    return parser


def stored_config(directory: Path, overrides: list[str]) -> Config:
    """The configuration of the run in a directory, to resume it.

    Raises:
        ConfigError: if there is no run to resume.
    """
    with naming_paths(option="--resume"):
        has_state = kind_of(directory / STATE_FOLDER) == "folder"
    if not has_state:
        raise ConfigError(
            f"--resume {directory}: there is no run to resume (no folder "
            f"{directory / STATE_FOLDER}); give the run.directory of one that was stopped"
        )
    config = load_config(directory / CONFIG_FILE, overrides)
    return config.model_copy(update={"run": config.run.model_copy(update={"directory": directory})})
