"""``afl-worker``: take part in a federation."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import yaml

from afl import names
from afl.config.address import Address, parse_listen, parse_target
from afl.config.quantities import Duration
from afl.daemon.logs import add_to_every_line, set_up_logs
from afl.errors import AddressError, AflError, ConfigError
from afl.outside import printable
from afl.paths import expanded, from_start, naming_paths
from afl.security.identity import LARGEST_WORKER_ID, MOST_WORKERS_A_SESSION, WorkerIds, checked_token
from afl.site.policy import DEFAULT_MIN_BATCH, SitePolicy
from afl.terminal.entry import failed, leave_at_once
from afl.terminal.parser import daemon_options, make_parser
from afl_worker.network.credentials import TOKEN_VARIABLE, CredentialFiles, PeerFiles
from afl_worker.options import (
    DEFAULT_JOURNAL,
    DEFAULT_MIN_WORKERS,
    LEAST_MIN_WORKERS,
    STOP_SIGNALS,
    WorkerOptions,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``afl-worker``; returns the exit code."""
    parsed = make_worker_parser().parse_args(arguments)
    set_up_logs(level=parsed.log_level, as_json=parsed.json_logs)
    try:
        add_to_every_line(ids=str(WorkerIds.of(parse_ids(parsed.id))), run_id=None)
        options = worker_options(parsed)
        http = None if parsed.http is None else _address("--http", parsed.http, parse_listen)
        for number in STOP_SIGNALS:
            signal.signal(number, _leave_at_once)
        # PyTorch takes seconds to import: what is wrong with the command line is said before.
        from afl_worker.process import take_part  # noqa: PLC0415

        with naming_paths():
            return take_part(options, http, stays=parsed.stay)
    except AflError as error:
        return failed("afl-worker", error)


def parse_ids(text: str) -> tuple[int, ...]:
    """``3``, ``0-9`` or ``3,7,10-12`` as ascending worker ids. Raises ConfigError if it is not of that form,
    or names an id twice, or too many."""
    ids: list[int] = []
    for part in map(str.strip, text.split(",")):
        try:
            ((first, last),) = WorkerIds.parse(part).ranges
        except ValueError:
            raise ConfigError(f"--id {text}: {part!r} is no worker id; write 3, 0-9 or 3,7") from None
        if last > LARGEST_WORKER_ID or len(ids) + last - first >= MOST_WORKERS_A_SESSION:
            raise ConfigError(
                f"--id {text}: ids are 0 to {LARGEST_WORKER_ID}, and one process hosts at most "
                f"{MOST_WORKERS_A_SESSION} of them; start several processes for more"
            )
        ids.extend(range(first, last + 1))
    if len(set(ids)) < len(ids):
        twice = next(one for one in sorted(ids) if ids.count(one) > 1)
        raise ConfigError(f"--id {text}: worker {twice} is named twice; name each once")
    return tuple(sorted(ids))


def make_worker_parser() -> argparse.ArgumentParser:
    """The parser of its command line."""
    parser = make_parser(
        "afl-worker",
        "Take part in a federation as one or several workers, over one connection. "
        "The server names the task; the data stays here.",
    )
    option = parser.add_argument
    option("--id", required=True, metavar="IDS", help="worker ids: 3, or 0-9, or 3,7")
    option(
        "--name",
        metavar="NAME",
        help="what to call this site where people read of it, unless the server names it (sites); "
        "of several workers one each, by ascending id: north,south",
    )
    option("--server", required=True, metavar="HOST:PORT", help="where the server listens")
    option(
        "--task",
        metavar="NAME",
        help="the task to run: an installed name the server must agree with, or package.module:Class; "
        "default: the one the server names, if it is installed here",
    )
    option("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    option("--data-dir", metavar="DIR", help="where the task looks for data (sets AFL_DATA; default: ./data)")
    option(
        "--task-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the task for this machine only, such as file=writers.npz; may be repeated",
    )
    option(
        "--journal",
        type=expanded,
        default=DEFAULT_JOURNAL,
        metavar="DIR",
        help="where this process writes what it is about to send, so that it can resume after a crash "
        "(default: afl-journal)",
    )
    option(
        "--http",
        metavar="HOST:PORT",
        help="serve /healthz (this process answers), /readyz (it has a session with the server) and /metrics "
        "there; :9091 is all addresses (default: off)",
    )
    option(
        "--policy",
        type=expanded,
        metavar="FILE",
        help="what no server can override (YAML; afl policy new FILE writes one to begin with)",
    )
    option(
        "--min-batch",
        type=int,
        metavar="N",
        help="refuse a run with smaller minibatches or, for a worker with fewer examples than N, with less "
        "than all of them: a server can compute examples from the gradient of a few (default: "
        f"{DEFAULT_MIN_BATCH}, or the policy's)",
    )
    option(
        "--give-up-after",
        default="10m",
        metavar="TIME",
        help="end after this long without a server: 30s, 10m, 2h, or never (default: 10m)",
    )
    option(
        "--again",
        action="store_true",
        help="when a run is over, take part in the next one at this server, with the same process (as for "
        "afl tune --federation), until there is no server for as long as --give-up-after says",
    )
    for name, content in {
        "--ca": "use TLS, with a server whose certificate an authority in this file has signed (PEM)",
        "--certificate": "this worker's own certificate (PEM), for a server that asks for one",
        "--key": "its private key (PEM, not encrypted)",
        "--token-file": "this worker's token, for a server that asks for one (or put the token into "
        f"{TOKEN_VARIABLE})",
    }.items():
        option(name, type=expanded, metavar="FILE", help=content)
    option(
        "--server-name",
        metavar="NAME",
        help="the name that the server's certificate must have (default: the host of --server)",
    )
    option(
        "--insecure",
        action="store_true",
        help="connect in plaintext to a server on another machine (for a network that you trust)",
    )
    option(
        "--no-proxy", action="store_true", help="ignore proxy environment variables (loopback always does)"
    )
    _peer_options(parser)
    daemon_options(parser)
    return parser


def _peer_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "secure aggregation",
        "How this worker knows the others, whatever the server says of them.\n"
        "Runs without secure aggregation need none of this.",
    )
    known_by = group.add_mutually_exclusive_group()
    known_by.add_argument(
        "--peer-ca",
        type=expanded,
        metavar="FILE",
        help="believe workers whose certificate an authority in this file has signed (PEM); it need not be "
        "the server's",
    )
    known_by.add_argument(
        "--peer-keys",
        type=expanded,
        metavar="FILE",
        help="believe workers whose key's fingerprint is in this file: lines of IDS sha256:HASH, as "
        "`afl certs --fingerprint FILE` prints the hash",
    )
    known_by.add_argument(
        "--trust-server-keys",
        action="store_true",
        help="believe any key that the server hands out: it could then read what this worker sends "
        "(for tests)",
    )
    group.add_argument(
        "--signing-key",
        type=expanded,
        metavar="FILE",
        help="show the others who this worker is by this private key (PEM, not encrypted), whose fingerprint "
        "they know; default: by --certificate and --key",
    )
    group.add_argument(
        "--min-workers",
        type=int,
        default=DEFAULT_MIN_WORKERS,
        metavar="N",
        help="take part only if the sum that the server learns is of at least N workers "
        f"(default: {DEFAULT_MIN_WORKERS})",
    )
    group.add_argument(
        "--capture",
        type=expanded,
        metavar="FILE",
        help="keep a copy of every byte that this process sends there, for `afl capture`; of a file that is "
        "there, go on at its end",
    )


def worker_options(parsed: argparse.Namespace) -> WorkerOptions:
    """What a parsed command line and the environment say. Raises ConfigError if something of it cannot be
    used."""
    give_up_after: float | None = None
    if parsed.give_up_after != "never":
        try:
            give_up_after = Duration(parsed.give_up_after)
        except ValueError as error:
            raise ConfigError(f"--give-up-after: {error}; write for example 30s, 10m, 2h or never") from error
    if parsed.data_dir:
        os.environ["AFL_DATA"] = str(from_start(expanded(parsed.data_dir)))
    server = _address("--server", parsed.server, parse_target)
    credentials = _credentials(parsed, server)
    if parsed.min_workers < LEAST_MIN_WORKERS:
        raise ConfigError(
            f"--min-workers {parsed.min_workers}: the sum of one worker is its message; name at least "
            f"{LEAST_MIN_WORKERS}"
        )
    workers = parse_ids(parsed.id)
    policy = _policy(parsed)
    policy.check_server(server, credentials.read().authorities)
    return WorkerOptions(
        workers=workers,
        sites=_sites(parsed.name, len(workers)),
        server=server,
        task=parsed.task,
        device=parsed.device,
        give_up_after=give_up_after,
        use_proxy=not parsed.no_proxy,
        journal=parsed.journal,
        task_options=dict(task_option(text) for text in parsed.task_option),
        credentials=credentials,
        peers=_peers(parsed),
        min_workers=parsed.min_workers,
        capture=parsed.capture,
        policy=policy,
        again=parsed.again,
    )


def _sites(text: str | None, workers: int) -> tuple[str, ...]:
    if text is None:
        return ()
    sites = tuple(map(str.strip, text.split(",")))
    wrong = next((name for name in sites if not names.is_name(name)), None)
    if wrong is not None:
        raise ConfigError(
            f"--name {printable(text)}: {printable(wrong)!r} is no name; a name has {names.ACCEPTED}"
        )
    if len(sites) != workers:
        raise ConfigError(f"--name {text}: {len(sites)} names for {workers} workers; give one for each")
    return sites


def _policy(parsed: argparse.Namespace) -> SitePolicy:
    fewest = DEFAULT_MIN_BATCH if parsed.min_batch is None else parsed.min_batch
    if fewest < 1:
        raise ConfigError(f"--min-batch {fewest}: a whole number of examples, at least 1")
    if parsed.policy is None:
        return SitePolicy(min_batch=fewest)
    policy = SitePolicy.load(parsed.policy, fewest)
    if policy.limits.min_batch is not None and parsed.min_batch is not None:
        raise ConfigError(
            f"--min-batch {fewest}: the policy says it ({policy.places[('min_batch',)]}); leave one out"
        )
    return policy


def _address(option: str, text: str, parse: Callable[[str], Address]) -> Address:
    try:
        return parse(text)
    except AddressError as error:
        raise ConfigError(f"{option}: {error}") from error


def _credentials(parsed: argparse.Namespace, server: Address) -> CredentialFiles:
    """What the command line and the environment say of TLS and tokens."""
    # What this process starts, such as a task's loaders of data, has no use for it.
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if token and parsed.token_file is None:
        token = checked_token(token, f"the environment's {TOKEN_VARIABLE}")
    files = CredentialFiles(
        parsed.ca, parsed.certificate, parsed.key, parsed.token_file, token, parsed.server_name or ""
    )
    if (files.certificate is None) != (files.key is None):
        raise ConfigError("--certificate and --key belong together; give both")
    if files.authorities is not None:
        if parsed.insecure:
            raise ConfigError("--insecure is plaintext, --ca is TLS; leave one out")
    else:
        for option, value in (("--certificate", files.certificate), ("--server-name", parsed.server_name)):
            if value is not None:
                raise ConfigError(
                    f"{option} is for TLS; give the authority of the server's certificate too: --ca FILE"
                )
        anyone = f"--server {server} is another machine, and without TLS anyone in between could read"
        if not server.is_loopback and not parsed.insecure:
            raise ConfigError(
                f"{anyone} and alter the model and the updates; use TLS with --ca FILE, or the near end of "
                "an SSH tunnel or VPN on this machine, or add --insecure if the network itself is trusted"
            )
        if not server.is_loopback and files.has_token:
            raise ConfigError(f"{anyone} the token; use TLS with --ca FILE")
    files.read()
    files.warn()
    return files


def _peers(parsed: argparse.Namespace) -> PeerFiles:
    """What the command line says of the other workers."""
    files = PeerFiles(
        parsed.peer_ca,
        parsed.peer_keys,
        parsed.trust_server_keys,
        parsed.signing_key,
        parsed.certificate,
        parsed.key,
    )
    if files.says_whom_to_trust:
        files.read()
        files.warn()
    elif files.signing_key is not None:
        raise ConfigError(
            "--signing-key shows the other workers who this one is; say how it knows them too: "
            "--peer-keys FILE or --peer-ca FILE"
        )
    return files


def task_option(text: str) -> tuple[str, Any]:
    """A ``--task-option KEY=VALUE``; ConfigError for another text."""
    key, sign, value = text.partition("=")
    if not key or not sign:
        raise ConfigError(f"--task-option {text}: write KEY=VALUE")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"--task-option {text}: the value is not YAML; put it in quotes, as in '{key}=\"...\"'"
        ) from error


def _leave_at_once(number: int, _frame: FrameType | None) -> None:
    # Nothing has begun, and an exception could be lost in whatever is being imported.
    leave_at_once(f"afl-worker: stopped by {signal.Signals(number).name}")
