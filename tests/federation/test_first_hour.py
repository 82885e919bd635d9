"""docs/first-hour.md, followed word for word in a fresh folder.

What is other than on the page: ports are free ones, the server is this machine, and nothing is installed.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from afl.cli.main import make_afl_parser
from support import Process

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8")

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

LISTEN = ["--set", "server.listen=127.0.0.1:0"]
HTTP = ["--set", "server.http=127.0.0.1:0"]

MODULES = {"afl": "afl.cli", "afl-server": "afl_server", "afl-worker": "afl_worker"}


class Reader:
    """Does what the page says, block by block.

    Attributes:
        folder: where its shell is.
        said: standard output of each command, by its text.
        seen: the commands in order.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: dict[str, str] = {}
        self.seen: list[str] = []

    def follow(self, language: str, text: str) -> None:
        """One block: a file to write, or commands to give."""
        if language in {"python", "yaml"}:
            name = text.partition("\n")[0].removeprefix("# ")
            (self.folder / name).write_text(text, encoding="utf-8")
        elif language == "sh":
            lines = [shlex.split(line) for line in text.splitlines() if line]
            self.seen += [line for line in text.splitlines() if line]
            if any(line[0] in {"afl-server", "afl-worker"} for line in lines):
                self._run_together(lines)
            else:
                for line in lines:
                    if line[:2] != ["afl", "status"]:
                        self._run(line)

    def _run(self, command: list[str]) -> None:
        program, *arguments = command
        if program == "cd":
            self.folder = self.folder / arguments[0]
            return
        if program == "pip":
            extras = re.fullmatch(r"\.\[(\w+)\]", arguments[-1])
            assert extras is not None
            assert f"\n{extras[1]} = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
            return
        if program != "python":
            arguments = ["-m", MODULES[program], *map(_here, arguments)]
        if command[:2] == ["afl", "run"]:
            arguments += HTTP
        answer = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, f"{shlex.join(command)}\n{answer.stdout}\n{answer.stderr}"
        self.said[shlex.join(command)] = answer.stdout

    def _run_together(self, lines: list[list[str]]) -> None:
        """The commands of a block that stand for terminals beside each other."""
        for line in lines:
            if line[0] == "afl":
                self._run(line)
        with contextlib.ExitStack() as stack:
            processes = []
            for line in lines:
                if line[0] == "afl-server":
                    listen = [] if "server.listen" in shlex.join(line) else LISTEN
                    arguments = ["-m", "afl_server", *map(_here, line[1:]), *listen, *HTTP]
                    server = Process("server", arguments, folder=self.folder)
                    processes.append(server)
                    stack.callback(server.close)
            listening = server.wait_for("listening")
            for line in lines:
                if line[0] == "afl-worker":
                    arguments = [_here(word, listening["port"]) for word in line[1:]]
                    worker = Process(
                        f"worker {arguments[1]}", ["-m", "afl_worker", *arguments], folder=self.folder
                    )
                    processes.append(worker)
                    stack.callback(worker.close)
            for process in processes:
                process.expect(0)


def _here(word: str, port: int = 0) -> str:
    """A word of a command for this machine alone."""
    return word.replace("server.example.org", "localhost").replace(":50051", f":{port}")


def blocks() -> Iterator[tuple[str, str]]:
    """The page's blocks; where a server's terminal and its workers' are blocks apart they are one here."""
    pending = ""
    for language, text in BLOCK.findall(PAGE):
        if language == "sh" and "afl-server" in text and "afl-worker" not in text:
            pending = text
        elif language == "sh" and pending and "afl-worker" in text:
            yield language, pending + text
            pending = ""
        else:
            yield language, text
    assert not pending


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="the last section makes certificates")
    monkeypatch.delenv("AFL_DATA", raising=False)
    reader = Reader(tmp_path)
    for language, text in blocks():
        reader.follow(language, text)
    folder = tmp_path / "hospital"
    for run in ("first", "top-k", "own", "separate", "machines"):
        summary = json.loads((folder / "runs" / run / "summary.json").read_text(encoding="utf-8"))
        assert summary["result"] == "ok", run
        assert summary["rounds"] == 300
        assert summary["last"]["worst_accuracy"] > 0.5
    checked = reader.said["afl check task.py:Hospital --config server.yaml"]
    assert "task:Hospital" in checked
    assert "720 to train on, 180 to test on" in " ".join(checked.split())
    assert "LayerNorm" in reader.said["python use.py"]
    # Separate processes of the same seed have made what afl run has.
    models = [(folder / "runs" / run / "model-final.safetensors").read_bytes() for run in ("own", "separate")]
    assert _tensors(models[0]) == _tensors(models[1])


def _tensors(model: bytes) -> bytes:
    """What follows the header, which names the run."""
    length = int.from_bytes(model[:8], "little")
    return model[8 + length :]


def test_every_option_that_the_page_names_is_one() -> None:
    parser = make_afl_parser()
    for command in re.findall(r"`(afl (?!-)[^`]+)`", PAGE):
        if command != "afl run":
            parser.parse_args(shlex.split(command)[1:] or ["--help"])
