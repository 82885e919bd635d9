"""Follows the commands of a page in a fresh checkout, as somebody who reads it would.

Other than on the page: ports are free ones, other machines are this one, runs are short, and nothing is
installed. A run's workers start when the page goes on to something else than asking the server how it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from commands import check

from afl.config import Config, load_config
from afl_server.main import make_server_parser
from support import Process
from support.pages import ROOT, blocks, command_lines

COMMAND_S = 400.0
"""A command that has not ended by then hangs."""

HERE = {"server.example.org": "localhost", "federation.example.org": "localhost"}

NOT_RUN = {
    "docker",
    "helm",
    "journalctl",
    "kind",
    "kubectl",
    "pip",
    "podman",
    "prometheus",
    "ssh",
    "systemctl",
    "useradd",
}
"""They would change the machine, or want one that is not here."""


@dataclass
class Run:
    """A server that a page has started, and the arguments of its workers."""

    server: Process
    directory: Path
    workers: list[list[str]] = field(default_factory=list)


class Shell:
    """One reader in one folder.

    Args:
        folder: an empty one.
        rounds: of every run; ``None`` for as many as the page has.
    """

    def __init__(self, folder: Path, rounds: int | None) -> None:
        self.top = self.folder = folder / "checkout"
        self.runs: list[Path] = []
        self._rounds = [] if rounds is None else ["--set", f"algorithm.rounds={rounds}"]
        self._open: Run | None = None
        self._programs = folder / "venv" / "bin"
        self._programs.mkdir(parents=True)
        for stamp in (".tasks", ".dev"):
            (folder / "venv" / stamp).touch()
        modules = {"afl": "-P -m afl_cli", "afl-server": "-P -m afl_server", "afl-worker": "-P -m afl_worker"}
        for name, start in {**modules, "python": "", "python3": ""}.items():
            (self._programs / name).write_text(
                f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {start} "$@"\n'
            )
            (self._programs / name).chmod(0o755)
        self.top.mkdir()
        for name in ("Makefile", "constraints.txt", "pyproject.toml"):
            (self.top / name).symlink_to(ROOT / name)

    def follow(self, page: str) -> None:
        """Write the page's files and give its commands, in order; every run comes to a good end."""
        try:
            for block in blocks(page):
                lines = command_lines(block.text) if block.language == "sh" else []
                if block.file:
                    (self.folder / block.file).write_text(block.text, encoding="utf-8")
                for line in lines:
                    try:
                        self.give(line)
                    except Exception as error:
                        error.add_note(f"at {block.where}: {line}")
                        raise
            self.settle()
        finally:
            if self._open is not None:
                self._open.server.close()
        for run in self.runs:
            assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["result"] == "ok", run

    def give(self, line: str) -> None:
        """Give one command, and wait for its end unless it is a daemon."""
        check(line)
        for there, here in HERE.items():
            line = line.replace(there, here)
        words = shlex.split(line, comments=True)
        if words[0] in NOT_RUN or re.search(r"(?:^|\s)/(?:opt|etc|var)/", line):
            return
        if words[0] == "cd":
            self.folder /= words[1]
        elif words[0] == "afl-server" and "--help-config" not in words:
            self.settle()
            self._open = self._serve(words[1:])
        elif words[0] == "afl-worker":
            assert self._open is not None, "no server runs that this worker could join"
            self._open.workers.append(words[1:])
        elif words[:2] == ["afl", "status"]:
            if self._open is not None:
                port = self._open.server.wait_for("listening")["http_port"]
                self._bash(shlex.join([*words, f"127.0.0.1:{port}"]))
        else:
            self.settle()
            self._bash(self._shortened(line, words))

    def _shortened(self, line: str, words: list[str]) -> str:
        if words[:2] == ["make", "demo"]:
            return f'make demo VENV={self._programs.parent} ARGS="--workers 3 --rounds 6 --processes 1"'
        if words[0] == "make":
            return f"make --dry-run VENV={self._programs.parent} {words[1]}"
        if words[:2] == ["afl", "run"]:
            self.runs.append(self.folder / str(self._config(words[2], words[4::2]).run.directory))
            return shlex.join([*words, *self._rounds, "--processes", "1", "--set", "server.http=127.0.0.1:0"])
        return line

    def settle(self) -> None:
        """Start the workers of the run that is open, and see it end well."""
        run, self._open = self._open, None
        if run is None:
            return
        port = run.server.wait_for("listening")["port"]
        processes = [run.server]
        for words in run.workers:
            arguments = [word.replace(":50051", f":{port}") for word in words]
            processes.append(Process(shlex.join(words), ["-m", "afl_worker", *arguments], folder=self.folder))
        try:
            for process in reversed(processes):
                process.expect(0, COMMAND_S)
        finally:
            for process in processes:
                process.close()
        self.runs.append(run.directory)

    def _serve(self, arguments: list[str]) -> Run:
        options = make_server_parser().parse_args(arguments)
        config = self._config(options.config, options.set)
        listens = "127.0.0.1:0" if config.server.listen.is_loopback else ":0"
        here = ["--set", f"server.listen={listens}", "--set", "server.http=127.0.0.1:0"]
        server = Process("server", ["-m", "afl_server", *arguments, *self._rounds, *here], folder=self.folder)
        return Run(server, self.folder / str(config.run.directory))

    def _config(self, path: str, overrides: list[str]) -> Config:
        with contextlib.chdir(self.folder):
            return load_config(path, overrides)

    def _bash(self, line: str) -> None:
        environment = {**os.environ, "PATH": os.pathsep.join([str(self._programs), os.environ["PATH"]])}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{line}\nended with {done.returncode} and said:\n{done.stdout}"
