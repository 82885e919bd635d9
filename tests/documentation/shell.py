"""Follows the commands of a page in a fresh checkout, as somebody who reads it would.

Other than on the page: ports are free ones, other machines are this one, runs are short, deploy/server.yaml
trains on synthetic data, and nothing is installed. A run's workers start when the page goes on to something
else than asking the server how it is, and those that the page leaves to the reader start too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from commands import check

from afl.config import Config, load_config
from afl_server.main import make_server_parser
from afl_worker.main import make_worker_parser, parse_ids
from support import Process
from support.pages import ROOT, blocks, command_lines, commands

COMMAND_S = 400.0
"""A command that has not ended by then hangs."""

HERE = {"server.example.org": "localhost", "federation.example.org": "localhost", "10.8.0.1": "127.0.0.1"}

NOT_RUN = {"docker", "journalctl", "kind", "kubectl", "pip", "prometheus", "ssh", "systemctl", "useradd"}
"""They would change the machine, or want one that is not here."""

SMALL = ["--set", "task.name=synthetic", "--set", "workers=4", "--set", "evaluation.every=3"]


@dataclass
class Run:
    """A server that a page has started, and the command lines of its workers."""

    server: Process
    config: Config
    directory: Path
    workers: list[list[str]] = field(default_factory=list)

    @property
    def named(self) -> set[int]:
        return {n for words in self.workers for n in parse_ids(make_worker_parser().parse_args(words).id)}


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
        self._stands_for: dict[str, Path] = {}
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
        shutil.copytree(ROOT / "deploy", self.top / "deploy")

    def follow(self, page: str) -> None:
        """Write the page's files and give its commands, in order; every run comes to a good end."""
        try:
            for block in blocks(page):
                lines = command_lines(block.text) if block.language == "sh" else []
                if block.file:
                    (self.folder / block.file).write_text(block.text, encoding="utf-8")
                if block.file == "make_data.py" and "python make_data.py" not in commands(page):
                    lines = ["python make_data.py"]  # The page says so in a sentence.
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
        words = [self._here(word) for word in check(line)]
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
            config = self._config(words[2], [*words[4::2], *self._rounds[1:]])
            self.runs.append(self.folder / config.run.directory)
            return shlex.join([*words, *self._rounds, "--processes", "1", "--set", "server.http=127.0.0.1:0"])
        return shlex.join(words) if words[0] in {"afl", "python"} else line

    def settle(self) -> None:
        """Start the workers of the run that is open, named or not, and see it end well."""
        run, self._open = self._open, None
        if run is None:
            return
        port = run.server.wait_for("listening")["port"]
        insecure = ["--insecure"] if run.config.server.insecure else []
        last = run.workers[-1] if run.workers else ["--id", "0", "--server", "127.0.0.1:50051", *insecure]
        own = make_worker_parser().parse_args(last).id
        lacking = sorted(set(range(run.config.workers)) - run.named)
        others = [[re.sub(rf"^{own}$|(?<=-){own}(?=\.)", str(n), word) for word in last] for n in lacking]
        processes = [run.server]
        for words in (*run.workers, *others):
            arguments = [word.replace(":50051", f":{port}") for word in map(self._here, words)]
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
        more = [*self._rounds, *(SMALL if "deploy/server.yaml" in arguments else [])]
        config = self._config(options.config, [*options.set, *more[1::2]])
        directory = self.folder / (config.run.directory or "run")
        if directory in self.runs:
            directory = directory.with_name(f"{directory.name}-{len(self.runs)}")
            more += ["--set", f"run.directory={directory}"]
        listens = "127.0.0.1:0" if config.server.listen.is_loopback or config.server.insecure else ":0"
        more += ["--set", f"server.listen={listens}", "--set", "server.http=127.0.0.1:0"]
        server = Process("server", ["-m", "afl_server", *arguments, *more], folder=self.folder)
        return Run(server, config, directory)

    def _config(self, path: str, overrides: list[str]) -> Config:
        with contextlib.chdir(self.folder):
            return load_config(path, overrides)

    def _here(self, word: str) -> str:
        """What a word of the page is called on this machine: a host, a file or a run."""
        for there, here in HERE.items():
            word = word.replace(there, here)
        if word.startswith("deploy/"):
            self.folder = self.top
        if word.endswith((".pem", ".key")) and not (self.folder / word).exists():
            return f"certs/{word}" if (self.folder / "certs" / word).exists() else word
        if re.fullmatch(r"runs/[\w-]+", word) and not (self.folder / word).exists() and self.runs:
            return str(
                self._stands_for.setdefault(word, self.runs[-1 - len(self._stands_for) % len(self.runs)])
            )
        return word

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
