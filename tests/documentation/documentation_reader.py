"""Does what a page says, block by block, as somebody who reads it would.

Always other than on the page: ports are free ones, other machines' names are this machine, and nothing is
installed. All else that is other is in the tables of :mod:`documentation_plans`.

- ``python`` and ``yaml`` with the comment ``# NAME`` on the first line are written to that file.
- ``python`` without it is executed, with the page's names.
- ``yaml`` without it is a configuration or a part of one, and is loaded as the server does; with
  ``apiVersion`` it is a manifest, and is held against Kubernetes' schema.
- ``toml`` with entry points is installed, as far as Python can see.
- ``json`` is a log line, with its event's fields.
- ``ini`` is a unit's environment, ``dockerfile`` part of an image.
- ``sh`` is run line by line. ``afl-server`` and ``afl-worker`` have terminals of their own; the last worker
  that a run needs is started when the page does something else than to ask the server how it is, so that
  there is a server to ask.
- ``text`` is what the block before it has printed: to the letter after Python, and after commands but for
  numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from afl.config import Config, config_from_mapping, load_config
from afl.daemon.events import check_line
from afl_cli.main import make_afl_parser
from afl_server.main import make_server_parser, stored_config
from afl_worker.main import make_worker_parser, parse_ids
from support import Process
from support.pages import ROOT, Block, blocks, command_lines

COMMAND_S = 400.0
"""A command that has not ended by then hangs."""

OURS = ("afl", "afl-server", "afl-worker")

PROGRAMS = frozenset(
    {
        *OURS,
        "cat",
        "cd",
        "curl",
        "export",
        "kubectl",
        "make",
        "mkdir",
        "openssl",
        "printf",
        "prometheus",
        "python",
        "tr",
    }
)
"""What is run. Whatever else a page names must be in :data:`documentation_plans.NOT_RUN`."""

OTHER_MACHINES = {
    "server.example.org": "localhost",
    "federation.example.org": "localhost",
    "10.8.0.1": "127.0.0.1",
}

LINKED = (
    "Makefile",
    "pyproject.toml",
    "constraints.txt",
    "common",
    "lab",
    "proto",
    "server",
    "tests",
    "worker",
)
COPIED = ("README.md", "deploy", "docs")
"""A checkout: what commands may write to is a copy."""

MINIMAL: Mapping[str, Any] = {
    "workers": 2,
    "task": {"name": "synthetic"},
    "algorithm": {
        "name": "afl-com",
        "rounds": 4,
        "eta_w": 0.05,
        "eta_q": 0.1,
        "uplink": {"name": "rand-k", "ratio": 0.1},
    },
}
"""What a part of a configuration is put into."""


class PageError(AssertionError):
    """What a page shows is not so, or nobody has said what becomes of it."""


@dataclass(frozen=True)
class Replacement:
    """Words of a page that a test cannot take as they are.

    Attributes:
        old: whole lines of a block, or with ``part`` any words of one.
        new: what stands there instead; several lines are several commands.
        why: the reason.
        version: ``short`` or ``whole``, where it is only in that version of a page that has both.
        needs: a module without which it is not made.
        lacks: a module with which it is not made.
    """

    page: str
    old: str
    new: str
    why: str
    part: bool = False
    version: str = ""
    needs: str = ""
    lacks: str = ""

    @property
    def is_made(self) -> bool:
        """Whether it is, with what is installed here."""
        wanted = not self.needs or importlib.util.find_spec(self.needs) is not None
        return wanted and not (self.lacks and importlib.util.find_spec(self.lacks) is not None)

    def is_in(self, text: str) -> bool:
        """Whether the words are there."""
        return self.old in text if self.part else self.old in text.splitlines()

    def applied(self, text: str) -> str:
        """The text with the new words."""
        if self.part:
            return text.replace(self.old, self.new)
        return f"\n{text}".replace(f"\n{self.old}\n", f"\n{self.new}\n")[1:]


@dataclass(frozen=True)
class NotRun:
    """A command that cannot be run here.

    Attributes:
        words: what the command begins with.
        why: the reason.
        check: what of it can be checked: it gets the command's words, and raises for a wrong one.
        page: the page that it is on; empty for all.
    """

    words: str
    why: str
    check: Callable[[Sequence[str]], None]
    page: str = ""

    def covers(self, page: str, words: Sequence[str]) -> bool:
        """Whether this is such a command."""
        return self.page in {"", page} and " ".join(words).startswith(self.words)


@dataclass(frozen=True)
class Page:
    """How a page is followed.

    Attributes:
        path: in the repository.
        presumes: makes what the page takes for granted.
        names: what Python blocks without a file find defined.
        holds: looks at what following the page has led to.
        back_at: headings at which the reader goes back to the first folder.
        pictures: first lines of blocks that are only looked at, such as a drawing, and what checks them.
        whole_texts: how the first lines of ``text`` blocks begin that the short version does not print.
        modules: what must be installed.
        programs: what must be on this machine.
        has_whole: whether there is a version of minutes besides the short one.
    """

    path: str
    presumes: Callable[[Reader], None] = lambda reader: None
    names: Callable[[Reader], dict[str, Any]] = lambda reader: {}
    holds: Callable[[Reader], None] = lambda reader: None
    back_at: Sequence[str] = ()
    pictures: Mapping[str, Callable[[str], None]] = field(default_factory=dict)
    whole_texts: Sequence[str] = ()
    modules: Sequence[str] = ()
    programs: Sequence[str] = ()
    has_whole: bool = False


@dataclass
class Server:
    """A server that a page has started, and its workers.

    Attributes:
        host: what its configuration listens on, before it was made to listen here.
        ids: of the workers that have been named for it.
    """

    command: str
    process: Process
    config: Config
    host: str
    ids: set[int] = field(default_factory=set)
    workers: list[Process] = field(default_factory=list)
    last: Callable[[], None] | None = None

    @property
    def port(self) -> int:
        port: int = self.process.wait_for("listening")["port"]
        return port

    @property
    def http(self) -> str:
        """Its HTTP address."""
        return f"127.0.0.1:{self.process.wait_for('listening')['http_port']}"

    def finish(self) -> None:
        """Wait until the run has come to a good end; a worker that ends badly would never let it.

        Raises:
            AssertionError: with what the process that ended badly has logged.
        """
        processes = (*self.workers, self.process)
        deadline = time.monotonic() + COMMAND_S
        while any(process.is_running for process in processes) and time.monotonic() < deadline:
            for process in processes:
                if not process.is_running:
                    process.expect(0)
            time.sleep(0.05)
        for process in processes:
            process.expect(0, timeout=1.0)
            process.close()

    @property
    def is_complete(self) -> bool:
        """Whether all its workers have been named."""
        return self.ids == set(range(self.config.workers))


class Reader:
    """Follows one page in a folder.

    Args:
        page: how.
        replacements: of all pages.
        not_run: of all pages.
        is_quick: the short version.

    Attributes:
        top: the first folder; a checkout.
        folder: where its shell is.
        programs: the folder of the commands that it gives.
        said: what each command has printed, by its text on the page.
        configurations: those that were shown and not written to files.
    """

    def __init__(
        self,
        page: Page,
        folder: Path,
        *,
        replacements: Sequence[Replacement] = (),
        not_run: Sequence[NotRun] = (),
        is_quick: bool = True,
    ) -> None:
        self.page = page
        self.top = self.folder = folder / "checkout"
        self.said: dict[str, str] = {}
        self.environment: dict[str, str] = {}
        self.configurations: list[dict[str, Any]] = []
        self.is_quick = is_quick
        self.programs = folder / "bin"
        self._replacements = [
            each
            for each in replacements
            if each.page == page.path
            and each.version in {"", "short" if is_quick else "whole"}
            and each.is_made
        ]
        self._not_run = not_run
        self._servers: list[Server] = []
        self._printed, self._is_exact = "", False
        _make_checkout(self.top)
        _make_programs(self.programs)

    # The whole page.

    def follow(self, found: Sequence[Block] | None = None) -> None:
        """Follow the page's blocks in order; no process is left behind."""
        found = blocks(self.page.path) if found is None else found
        path, modules = list(sys.path), set(sys.modules)
        try:
            self.page.presumes(self)
            for block, following in zip(found, [*found[1:], None], strict=True):
                if block.section in self.page.back_at:
                    self.folder = self.top
                with _named(block):
                    self._block(block, self._is_shown(following))
            self.settle(at_end=True)
            self.page.holds(self)
        finally:
            for server in self._servers:
                for process in (*server.workers, server.process):
                    process.close()
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if _is_below(sys.modules[name], self.top.parent):
                    del sys.modules[name]

    def _is_shown(self, block: Block | None) -> bool:
        """Whether the block shows what the one before it prints."""
        return block is not None and block.language == "text" and _first_line(block) not in self.page.pictures

    def _block(self, block: Block, is_shown: bool) -> None:
        check = self.page.pictures.get(_first_line(block))
        if check is not None:
            check(block.text)
            return
        handlers: dict[str, Callable[[str], None]] = {
            "python": self._python,
            "yaml": self._yaml,
            "toml": self._toml,
            "json": self._json,
            "text": self._text,
            "dockerfile": self._dockerfile,
            "ini": self._ini,
            "sh": lambda text: self._shell(text, is_shown),
        }
        handle = handlers.get(block.language)
        if handle is None:
            raise PageError(f"a block of {block.language or 'no language'} is followed by nobody")
        text = block.text
        for replacement in self._replacements:
            text = replacement.applied(text)
        handle(text)

    # Files, code and configurations.

    def _python(self, text: str) -> None:
        if self._written(text, "py"):
            return
        printed = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(printed):
            self.settle()
            sys.path.insert(0, str(self.folder))
            exec(compile(text, self.page.path, "exec"), self.page.names(self))
        self._printed, self._is_exact = printed.getvalue(), True

    def _yaml(self, text: str) -> None:
        value = yaml.safe_load(text)
        if "apiVersion" in value:
            kubernetes_validate.validate(value, kubernetes_validate.latest_version(), strict=True)
            return
        with contextlib.chdir(self.folder):
            if self._written(text, "yaml"):
                if "task" in value:
                    load_config(_name_of(text, "yaml"))
                return
            self.configuration(value)
            self.configurations.append(value)

    def configuration(self, value: Mapping[str, Any]) -> Config:
        """What the server makes of a configuration, or of a part of one."""
        is_whole = {"workers", "task", "algorithm"} <= value.keys()
        return config_from_mapping(value if is_whole else _merged(MINIMAL, value), self.page.path)

    def _written(self, text: str, ending: str) -> bool:
        name = _name_of(text, ending)
        if name:
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(text, encoding="utf-8")
            if ending == "py":
                compile(text, name, "exec")
        return bool(name)

    def _toml(self, text: str) -> None:
        groups = tomllib.loads(text).get("project", {}).get("entry-points", {})
        if not groups:
            return
        information = self.folder / "shown-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: shown\nVersion: 1.0\n")
        lines = []
        sys.path.insert(0, str(self.folder))
        self.environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(self.folder), os.environ.get("PYTHONPATH")])
        )
        importlib.invalidate_caches()
        for group, points in groups.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
            for value in points.values():
                module, _, attribute = value.partition(":")
                getattr(importlib.import_module(module), attribute)
        (information / "entry_points.txt").write_text("\n".join(lines) + "\n")

    def _json(self, text: str) -> None:
        for line in text.splitlines():
            value = json.loads(line)
            wrong = check_line(value) if "event" in value else ""
            if wrong:
                raise PageError(wrong)
            if not {"time", "level", "logger", "message"} <= value.keys():
                raise PageError(f"no log line has only {sorted(value)}")

    def _dockerfile(self, text: str) -> None:
        known = ("FROM", "COPY", "RUN", "ENV", "ARG", "USER", "WORKDIR", "ENTRYPOINT", "CMD")
        for line in text.splitlines():
            instruction, *words = line.split()
            if instruction not in known:
                raise PageError(f"{instruction} is no instruction of a Dockerfile that is known here")
            if instruction == "COPY" and not words[0].startswith("--"):
                self._must_be_shown(words[0])

    def _ini(self, text: str) -> None:
        """Variables of a unit's environment."""
        units = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "deploy" / "systemd").iterdir())
        for line in text.splitlines():
            name, equals, _ = line.partition("=")
            if not equals or not re.search(rf"\b{re.escape(name)}\b", units):
                raise PageError(f"no unit reads {line}")

    def _must_be_shown(self, name: str) -> None:
        if not (self.folder / name).exists() and name not in _named_files():
            raise PageError(f"{name} is not here, and no page shows it")

    def _text(self, text: str) -> None:
        if not (self.is_quick and text.startswith(tuple(self.page.whole_texts))):
            compare(text, self._printed, is_exact=self._is_exact)

    # Commands.

    def _shell(self, text: str, is_shown: bool) -> None:
        lines = command_lines(text)
        for line in lines:
            self.run(line, on_terminal=is_shown and line == lines[-1])

    def run(self, line: str, *, on_terminal: bool = False) -> None:
        """Give one command, and wait for its end unless it is a daemon.

        Raises:
            PageError: if nobody has said what becomes of it, if its options are none, or if it fails.
        """
        words = shlex.split(line, comments=True)
        parse(words)
        for each in self._not_run:
            if each.covers(self.page.path, words):
                each.check(words)
                return
        program = words[0]
        if program not in PROGRAMS:
            raise PageError(f"{program} is neither run nor in NOT_RUN: {line}")
        if program == "afl-server":
            self._start_server(line, words[1:])
        elif program == "afl-worker":
            self._start_worker(line, words[1:])
        elif program == "cd":
            self.folder = self.folder / words[1]
        elif program == "prometheus":
            self._prometheus(line)
        elif program == "export":
            name, _, value = words[1].partition("=")
            self.environment[name] = value
        else:
            if not _asks_a_server(words):
                self.settle()
            self._printed = self.said[line] = self._run(self._adapted(line, words), on_terminal)
            self._is_exact = False

    def _adapted(self, line: str, words: Sequence[str]) -> str:
        line = _here(line)
        if words[:2] == ["afl", "run"]:
            line += " --set server.http=127.0.0.1:0"
        if _asks_a_server(words):
            if not self._servers:
                raise PageError(f"no server runs that this could ask: {' '.join(words)}")
            asked = self._servers[-1].http
            line = line.replace("127.0.0.1:9090", asked)
            if words[:2] == ["afl", "status"] and asked not in line:
                line += f" {asked}"
        return line

    def _run(self, line: str, on_terminal: bool) -> str:
        run = _on_terminal if on_terminal else _piped
        code, printed = run(["bash", "-euo", "pipefail", "-c", line], self.folder, self._environment())
        if code != 0:
            raise PageError(f"{line}\nended with {code} and said:\n{printed}")
        return printed

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("AFL_") and not name.lower().endswith("_proxy")
        }
        path = os.pathsep.join([str(self.programs), os.environ.get("PATH", "")])
        return {**kept, "PATH": path, "COLUMNS": "140", "LINES": "60", "TERM": "xterm", **self.environment}

    def _start_server(self, line: str, arguments: Sequence[str]) -> None:
        options = make_server_parser().parse_args(list(arguments))
        if options.help_config:
            self._printed = self.said[line] = self._run(line, on_terminal=False)
            return
        self.settle()
        with contextlib.chdir(self.folder):
            config = (
                stored_config(options.resume, options.set)
                if options.config is None
                else load_config(options.config, options.set)
            )
        free = "127.0.0.1:0" if config.server.listen.is_loopback or config.server.insecure else ":0"
        listen = ["--set", f"server.listen={free}", "--set", "server.http=127.0.0.1:0"]
        process = Process(
            line, ["-m", "afl_server", *arguments, *listen], folder=self.folder, environment=self.environment
        )
        self._servers.append(Server(line, process, config, config.server.listen.host))

    def _start_worker(self, line: str, arguments: Sequence[str]) -> None:
        self.settle()
        options = make_worker_parser().parse_args(list(arguments))
        ids = set(parse_ids(options.id))
        host = options.server.rpartition(":")[0]
        waiting = [server for server in self._servers if not server.is_complete and not server.ids & ids]
        fitting = [server for server in waiting if server.host == host] or [
            server for server in waiting if not server.config.server.listen.is_loopback
        ]
        if not fitting:
            raise PageError(f"no server runs that this could join: {line}")
        server = fitting[-1]

        def start() -> None:
            words = [_here(word).replace(":50051", f":{server.port}") for word in arguments]
            server.workers.append(
                Process(line, ["-m", "afl_worker", *words], folder=self.folder, environment=self.environment)
            )

        server.ids |= ids
        if server.is_complete:
            server.last = start
        else:
            start()

    def _prometheus(self, line: str) -> None:
        """Start it beside its data, and end it once it has read its configuration."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        listening, changed = re.subn(r"(?<=--web\.listen-address=)\S+", address, line)
        if not changed:
            raise PageError(f"where does it listen? {line}")
        command = [*shlex.split(listening), f"--storage.tsdb.path={self.folder / 'prometheus'}"]
        with (self.folder / "prometheus.log").open("w+") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
            try:
                while not _is_ready(f"http://{address}/-/ready"):
                    if process.poll() is not None:
                        log.seek(0)
                        raise PageError(f"{line}\nended and said:\n{log.read()}")
                    time.sleep(0.1)
            finally:
                process.terminate()
                process.wait()

    def settle(self, *, at_end: bool = False) -> None:
        """Let every run that has all its workers come to its end, which must be a good one.

        Raises:
            PageError: at the page's end, if a run lacks workers.
        """
        for server in list(self._servers):
            if server.is_complete:
                assert server.last is not None
                server.last()
                server.finish()
                wrong = {check_line(each) for each in server.process.events if "event" in each} - {""}
                if wrong:
                    raise PageError(f"{server.command}: {wrong}")
                self._servers.remove(server)
            elif at_end:
                lacking = sorted(set(range(server.config.workers)) - server.ids)
                raise PageError(f"{server.command}\nnobody starts its workers {lacking}")


def parse(words: Sequence[str]) -> None:
    """Hold a command of ours against its own parser.

    Raises:
        PageError: if it does not take the options.
    """
    make = _parser_of(words)
    if make is None:
        return
    arguments = words[3:] if words[0] == "python" else words[1:]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            make().parse_args(list(arguments))
    except SystemExit as end:
        if end.code != 0:
            raise PageError(f"{shlex.join(words)}: {said.getvalue()}") from end


def _parser_of(words: Sequence[str]) -> Callable[[], argparse.ArgumentParser] | None:
    """What makes the command's parser, if it is one of ours and has one that can be asked for."""
    if words[:2] == ["python", "-m"] and words[2].startswith("afl_lab."):
        found: Callable[[], argparse.ArgumentParser] | None
        found = getattr(importlib.import_module(words[2]), "_parser", None)
        return found
    return {"afl": make_afl_parser, "afl-server": make_server_parser, "afl-worker": make_worker_parser}.get(
        words[0]
    )


def compare(shown: str, printed: str, *, is_exact: bool = False) -> None:
    """Each line that is shown must have been printed, in this order; where it is not exact, but for numbers.

    Raises:
        PageError: for the first line that was not.
    """
    lines = iter([line.strip() for line in _plain(printed).splitlines()])
    for line in filter(None, map(str.strip, shown.splitlines())):
        pattern = re.compile(re.escape(line) if is_exact else _pattern(line))
        if not any(pattern.fullmatch(each) for each in lines):
            raise PageError(
                f"this is shown and was not printed:\n{line}\nprinted was:\n{_plain(printed)[-4000:]}"
            )


def _pattern(line: str) -> str:
    """A regular expression for a line in which numbers, bars and what depends on them may be other."""
    kinds = {
        r"\d{8}-\d{6}-[0-9a-f]{6}": r"\d{8}-\d{6}-[0-9a-f]{6}",
        r"\d[\d.,]*(?:e[+-]\d+)? [kMG]?B": r"\d[\d.,]* [kMG]?B",
        r"-?\d[\d.,]*(?:e[+-]?\d+)?": r"-?\d[\d.,]*(?:e[+-]?\d+)?",
        r"[▁▂▃▄▅▆▇█]+": r"[▁▂▃▄▅▆▇█]+",
        r"[━╸╺─]+": r"[━╸╺─]+",
        r"[ ^]*\^[ ^]*": r"[ ^]+",
        r" +": " +",
    }
    parts = []
    position = 0
    for found in re.finditer("|".join(f"({kind})" for kind in kinds), line):
        parts.append(re.escape(line[position : found.start()]))
        assert found.lastindex is not None
        parts.append(list(kinds.values())[found.lastindex - 1])
        position = found.end()
    return "".join([*parts, re.escape(line[position:])])


def _plain(printed: str) -> str:
    """Without what moves a terminal's cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed).replace("\r", "\n")


def _piped(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    with _started(command, folder, environment, subprocess.PIPE) as process:
        printed, _ = process.communicate(timeout=COMMAND_S)
        return process.returncode, printed.decode(errors="replace")


def _on_terminal(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    ours, its = pty.openpty()
    printed = bytearray()
    deadline = time.monotonic() + COMMAND_S
    try:
        with _started(command, folder, environment, its) as process:
            while process.poll() is None or select.select([ours], [], [], 0)[0]:
                if select.select([ours], [], [], 0.1)[0]:
                    printed += os.read(ours, 1 << 16)
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(command, COMMAND_S)
            return process.returncode, printed.decode(errors="replace")
    finally:
        os.close(its)
        os.close(ours)


@contextlib.contextmanager
def _started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], output: int
) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process group of its own, of which nothing is left."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output == subprocess.PIPE else output,
        start_new_session=True,
    ) as process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return bool(answer.status == 200)
    return False


def _make_checkout(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        else:
            shutil.copy(source, folder / name)


def _make_programs(folder: Path) -> None:
    """The commands as an installation has them, of this checkout."""
    folder.mkdir()
    modules = {"afl": "afl_cli", "afl-server": "afl_server", "afl-worker": "afl_worker"}
    starts = {name: f"-P -m {module} " for name, module in modules.items()} | {"python": "", "python3": ""}
    for name, start in starts.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {start}"$@"\n', encoding="utf-8")
        script.chmod(0o755)


def _here(text: str) -> str:
    """For this machine alone."""
    for name, here in OTHER_MACHINES.items():
        text = text.replace(name, here)
    return text


def _asks_a_server(words: Sequence[str]) -> bool:
    return list(words[:2]) == ["afl", "status"] or words[0] == "curl"


def _first_line(block: Block) -> str:
    return block.text.partition("\n")[0].strip()


def _name_of(text: str, ending: str) -> str:
    named = re.match(rf"# ([\w./-]+\.{ending})\n", text)
    return named[1] if named else ""


def _named_files() -> set[str]:
    return {_name_of(block.text, "py") for block in blocks("README.md", "python")}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping) and "name" not in value
        merged[key] = _merged(old, value) if both and old is not None else value
    return merged


def _is_below(module: object, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_relative_to(folder)


@contextlib.contextmanager
def _named(block: Block) -> Iterator[None]:
    """What goes wrong says where on the page."""
    try:
        yield
    except Exception as error:
        error.add_note(f"at {block.where}, in the section {block.section!r}")
        raise
