"""``afl status``: a running server at a glance, once or as it goes on."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from afl.config.address import is_loopback, parse_target
from afl.errors import AddressError, ConfigError, ExitCode, LostServerError
from afl.outside import plain
from afl.paths import expanded
from afl.security.certificates import read_authorities, read_file
from afl.security.identity import checked_token
from afl.terminal.display import RunDisplay
from afl.terminal.view import RunView, make_console, sessions_table
from afl.user_code import described

HELP = "show how a running server is doing"

DEFAULT_PORT = 9090
DEFAULT_SERVER = f"127.0.0.1:{DEFAULT_PORT}"

WATCH_S = 1.0
"""Between two questions of ``--watch``: the server may be far away."""

TIMEOUT_S = 10.0
"""How long the server may take to answer; it answers from memory, in milliseconds."""

LARGEST_ANSWER = 64 * 1024 * 1024
"""Bytes read at most: beyond what 10^6 workers' states take."""

_KEYS = frozenset({"run_id", "state", "round", "rounds", "workers", "last", "best", "dual_weights"})
"""What tells a server of ours from whatever else answers HTTP."""

NEARLY_OVER_S = 5 * WATCH_S
"""A server with so little left to do that is gone has done it: nobody asked just before it ended."""

_HAS_NO_PORT = re.compile(r"[^:\[\]]*[^:\[\]0-9][^:\[\]]*|\[.*\]")
"""A name or an address without a port; digits alone are a port without a host."""

_SCHEME_PORTS = {"": DEFAULT_PORT, "http": 80, "https": 443}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    default = f"default port {DEFAULT_PORT} (default: {DEFAULT_SERVER})"
    server = f"the server's http address (server.http), or the status page's URL; {default}"
    parser.add_argument("server", nargs="?", default=DEFAULT_SERVER, metavar="HOST[:PORT]", help=server)
    parser.add_argument(
        "--token-file", type=expanded, metavar="FILE", help="the server's token (server.http_token)"
    )
    parser.add_argument(
        "--ca", type=expanded, metavar="FILE", help="the authority of the page's certificate, with https://"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--json", action="store_true", help="print the whole state as JSON")
    choice.add_argument("--watch", action="store_true", help="keep showing it until the run is over")


def run(options: argparse.Namespace) -> ExitCode:
    """Ask the server for its state and print it: once, or with ``--watch`` until the run is over."""
    token = ""
    if options.token_file is not None:
        text = read_file(options.token_file, "--token-file").decode(errors="replace")
        token = checked_token(text, f"--token-file {options.token_file}")
    context = None
    if options.ca is not None:
        authorities = read_authorities(options.ca, "--ca").decode("ascii", "replace")
        context = ssl.create_default_context(cadata=authorities)
    state = fetch_status(options.server, token, context)
    if options.json:
        print(json.dumps(state, indent=2))
        return ExitCode.OK
    with _of_another(options.server):
        if options.watch:
            _watch(state, lambda: fetch_status(options.server, token, context))
        else:
            console = make_console()
            console.print(RunView(state))
            if (sessions := sessions_table(state)) is not None:
                console.print(sessions)
    return ExitCode.OK


@contextlib.contextmanager
def _of_another(server: str) -> Iterator[None]:
    """A state of other values than ours is no fault of this command: LostServerError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise LostServerError(
            f"{server} answers with a state that cannot be shown ({described(error)}): it is no afl server, "
            "or of another version; --json prints what it says"
        ) from error


def _watch(state: dict[str, Any], ask: Callable[[], dict[str, Any]]) -> None:
    """Show the run until it is over; raises LostServerError if its server goes before."""
    console = make_console()
    with RunDisplay(console, hint="Ctrl-C ends the watching, not the run.") as display:
        display.show(state)
        while state["state"] != "over":
            time.sleep(WATCH_S)
            try:
                state = ask()
            except LostServerError as error:
                left = state["seconds_left"]
                if state["round"] < state["rounds"] and (left is None or left > NEARLY_OVER_S):
                    gone = f"the server is gone, after round {state['round']} of {state['rounds']}"
                    raise LostServerError(f"{gone}: {error}") from error
                break
            display.show(state)
    console.print("The run is over.")


def fetch_status(server: str, token: str = "", context: ssl.SSLContext | None = None) -> dict[str, Any]:
    """The state of the run at ``server``, a URL or ``host:port``.

    Args:
        token: that the server asks for, if it does.
        context: what is believed of its certificate; ``None`` for what this system believes.

    Raises:
        ConfigError: if ``server`` is not an address.
        LostServerError: if nothing answers there, or something that is not our server.
    """
    url = status_url(server)
    try:
        request = urllib.request.Request(url)  # noqa: S310  # http or https
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with _opener(url, context).open(request, timeout=TIMEOUT_S) as answer:
            state = json.loads(answer.read(LARGEST_ANSWER))
    except urllib.error.HTTPError as error:
        what = f"{url} answers {error.code} ({error.reason})"
        if error.code in {502, 503, 504}:
            behind = "a proxy answers, the server behind it does not; is the server running?"
            raise LostServerError(f"{what}: {behind}") from error
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise LostServerError(f"{what}: give the token of server.http_token with --token-file") from error
        if error.code == HTTPStatus.FORBIDDEN:
            right = "if it is an afl server, ask it by its address, or list the name under server.http_hosts"
            raise LostServerError(f"{what}: {right}") from error
        right = "give the address that the server's configuration has under server.http"
        raise LostServerError(f"{what}: it is not an afl server; {right}") from error
    except (ValueError, RecursionError, http.client.HTTPException) as error:
        what = "does not answer as an afl server does; is it the gRPC port (server.listen)?"
        right = "Give the one under server.http, with https:// if server.http_certificate is set"
        raise LostServerError(f"{url} {what} {right}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            right = "http:// is without TLS; --ca FILE, or SSL_CERT_FILE, names an authority of your own"
            raise LostServerError(f"no TLS with {url}: {reason}; {right}") from error
        what = f"nothing answers at {url} ({reason}); is the server running, and is this its server.http?"
        raise LostServerError(f"{what} afl inspect shows what a finished run wrote") from error
    if not isinstance(state, dict) or not state.keys() >= _KEYS:
        raise LostServerError(f"{url} answers, but not with the state of a run: it is not an afl server")
    shown: dict[str, Any] = plain(state)
    return shown


def status_url(server: str) -> str:
    """The URL of ``/status`` at ``server``: ``host``, ``host:port``, or an http URL of the status page."""
    scheme, _, rest = server.rpartition("://")
    if scheme not in _SCHEME_PORTS:
        unknown = f"{scheme} is not a scheme that afl status speaks"
        raise ConfigError(f"{server}: {unknown}; write http://host:port")
    host, _, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    if _HAS_NO_PORT.fullmatch(host):
        host = f"{host}:{_SCHEME_PORTS[scheme]}"
    try:
        address = parse_target(host)
    except AddressError as error:
        raise ConfigError(f"{server}: {error}") from error
    # Before it comes what a reverse proxy serves the page under.
    prefix = path.strip("/").removesuffix("status").rstrip("/")
    return "/".join(filter(None, (f"{scheme or 'http'}://{address}", prefix, "status")))


def _opener(url: str, context: ssl.SSLContext | None) -> urllib.request.OpenerDirector:
    """Without the environment's proxies for this machine, which they cannot reach."""
    is_here = is_loopback(urllib.parse.urlsplit(url).hostname or "")
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    return urllib.request.build_opener(*handlers, *([urllib.request.ProxyHandler({})] if is_here else []))
