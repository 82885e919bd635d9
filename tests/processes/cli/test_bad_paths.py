"""Paths that cannot even be asked about: each command says which, and why, in a line.

All cases run in one process without a superuser's right to look everywhere; PyTorch is imported once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from afl.errors import ExitCode
from support.commands import without_rights

PROGRAM = """
import contextlib, importlib, io, json, os, sys, tempfile, traceback

answers = {}
for name, (module, arguments, variables, has_temporary) in json.load(sys.stdin).items():
    os.environ.update(variables)
    tempfile.tempdir = None
    if not has_temporary:
        tempfile._candidate_tempdir_list = lambda: ["/nowhere"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            code = int(importlib.import_module(module).main(arguments))
        except BaseException:
            code = -1
            traceback.print_exc()
    answers[name] = code, text.getvalue()
print(json.dumps(answers))
"""

CONFIG = """
workers: 2
task: {name: synthetic, batch_size: 8}
algorithm: {name: afl-br, rounds: 2, eta_w: 0.1, eta_q: 0.1}
run: {seed: 3}
server: {listen: "127.0.0.1:0", http: null}
"""

LONG = "x" * 300


@dataclass(frozen=True)
class Case:
    """A command, how it must end, and what it must say."""

    module: str
    arguments: tuple[str, ...]
    code: ExitCode
    said: str
    variables: tuple[tuple[str, str], ...] = ()
    has_temporary: bool = True


def server(*arguments: str, said: str, code: ExitCode = ExitCode.CONFIG) -> Case:
    return Case("afl_server.main", arguments, code, said)


def worker(*arguments: str, said: str) -> Case:
    known = ("--id", "0", "--server", "127.0.0.1:1")
    return Case("afl_worker.main", (*known, *arguments), ExitCode.CONFIG, said)


def afl(*arguments: str, said: str, code: ExitCode = ExitCode.CONFIG, **more: bool) -> Case:
    return Case("afl_cli.main", arguments, code, said, **more)


def data_of(task: str, folder: str, said: str) -> Case:
    return Case("afl_cli.main", ("check", task), ExitCode.DATA, said, (("AFL_DATA", folder),))


def cases_of(path: str, why: str) -> dict[str, Case]:
    """Of a run directory, ``path``, that no command can look into."""
    named, data = f"{path}: {why}; ", f"{path}/FashionMNIST/raw/train-images-idx3-ubyte: {why}; "
    directory = f"run.directory={path}"
    return {
        "server": server(
            "--config", "c.yaml", "--set", directory, said=f"run.directory: {path}/state: {why}"
        ),
        "server without state": server(
            *("--config", "c.yaml", "--set", directory, "--set", "server.state=off"),
            said=f"run.directory: {path} cannot be written: {why}",
        ),
        "server, resumed": server("--resume", path, said=f"afl-server: --resume: {path}/state: {why}; "),
        "server, configuration": server("--config", path, said="afl-server: "),
        "server, key": server(
            *("--config", "c.yaml", "--set", f"server.tls.key={path}"),
            *("--set", f"server.tls.certificate={path}"),
            said=f"server.tls.certificate {path} cannot be read: {why}",
        ),
        "worker, authority": worker("--ca", path, said=f"--ca {path} cannot be read: {why}"),
        "worker, token": worker("--token-file", path, said=f"--token-file {path} cannot be read: {why}"),
        "inspect": afl("inspect", path, said=f"afl inspect: {named}"),
        "inspect a file": afl("inspect", f"{path}/metrics.jsonl", said=f"{path}/metrics.jsonl: {why}; "),
        "export": afl("export", path, said=f"afl export: {named}"),
        "export into": afl("export", ".", "--out", path, said=f"afl export: {named}"),
        "plot": afl("plot", path, said=f"afl plot: {named}"),
        "certs": afl("certs", path, said=f"afl certs: {path} cannot be made: {why}", code=ExitCode.STORAGE),
        "check": afl("check", "--config", path, said=f"{path} cannot be used"),
        "check data": data_of("fashion-mnist", path, data),
        "check more data": data_of("femnist", path, f": {why}; "),
        "simulate": afl("simulate", path, said=f"{path} cannot be used"),
        "simulate into": afl(
            "simulate", "c.yaml", "--out", path, said=f"afl simulate: {path}/c/seed-3/config.yaml: {why}; "
        ),
        "run": afl("run", "c.yaml", "--set", directory, said=f"afl run: {path}/state: {why}"),
        "demo": afl("demo", "--keep", path, said=f"afl demo: --keep {path}: {why}"),
        "theory": afl("theory", "--config", path, said=f"{path} cannot be used"),
    }


NO_TEMPORARY = "No usable temporary directory found in ['/nowhere']; let TMPDIR name a folder that can be"

CASES = {
    **{f"closed: {name}": case for name, case in cases_of("closed/run", "Permission denied").items()},
    **{f"too long: {name}": case for name, case in cases_of(LONG, "File name too long").items()},
    "too long: new": afl(
        "new", LONG, said="cannot be written here: File name too long", code=ExitCode.STORAGE
    ),
    "a home of nobody's": data_of("fashion-mnist", "~no-such-user/data", "looked for train-images"),
    "NUL: server": server(
        "--config", "c.yaml", "--set", r'run.directory="a\0b"', said=r'found:     "a\u0000b"'
    ),
    "NUL: task": afl(
        *("check", "--config", "c.yaml", "--set", "task.name=fashion-mnist"),
        *("--set", r'task.options={data_dir: "a\0b"}'),
        said="task.options.data_dir: 'a\\x00b' is not accepted: no file or setting has a NUL",
    ),
    "no temporary folder: check": afl(
        "check", "synthetic", said=f"afl check: {NO_TEMPORARY}", code=ExitCode.CONFIG, has_temporary=False
    ),
    "no temporary folder: demo": afl("demo", said=f"afl demo: {NO_TEMPORARY}", has_temporary=False),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Of each case the exit code, -1 for an exception that nothing caught, and all that was said."""
    folder = tmp_path_factory.mktemp("paths")
    (folder / "c.yaml").write_text(CONFIG, encoding="utf-8")
    closed = folder / "closed"
    (closed / "run" / "state").mkdir(parents=True)
    closed.chmod(0)
    given = {
        name: (case.module, case.arguments, dict(case.variables), case.has_temporary)
        for name, case in CASES.items()
    }
    done = subprocess.run(
        [*without_rights(), sys.executable, "-c", PROGRAM],
        cwd=folder,
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    closed.chmod(0o700)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_path_that_cannot_be_asked_about(name: str, answers: dict[str, tuple[int, str]]) -> None:
    code, text = answers[name]
    assert "Traceback" not in text
    assert CASES[name].said in text
    assert code == CASES[name].code, text


@pytest.mark.parametrize(
    "command",
    [
        ["afl_server", "--config", b"b\xff.yaml"],
        ["afl_server", "--config", "c.yaml", "--set", b"run.directory=b\xff"],
        ["afl_worker", "--id", "0", "--server", "127.0.0.1:1", "--journal", b"b\xff"],
        *(["afl_cli", name, b"b\xff"] for name in ("inspect", "export", "plot", "new", "certs", "check")),
        *(["afl_cli", name, b"b\xff"] for name in ("simulate", "run", "status", "demo", "theory", b"\xff")),
    ],
    ids=repr,
)
def test_an_argument_that_is_not_utf_8_is_refused(command: list[str | bytes]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.CONFIG
    assert done.stdout == ""
    assert r"\udcff" in done.stderr
    assert done.stderr.endswith("' is not UTF-8; rename what it names\n"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_whose_name_is_not_utf_8_is_shown_escaped(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/b\xff"
    os.mkdir(folder)  # noqa: PTH102  # pathlib takes no bytes
    command = [sys.executable, "-m", "afl_cli", "check", "fashion-mnist"]
    inherited = {key: value for key, value in os.environ.items() if key != "AFL_DATA"}
    done = subprocess.run(
        command, cwd=folder, env=inherited, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == ExitCode.DATA, done.stderr
    assert f"{tmp_path}/b\\udcff/data" in done.stdout.replace("\n", "")
    assert done.stderr == ""


def test_a_folder_that_has_gone_from_under_a_command(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"rmdir {gone} && exec {sys.executable} -m afl_cli check task.py:Mine"
    done = subprocess.run(["bash", "-c", program], cwd=gone, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.CONFIG
    assert done.stderr == "afl: the folder that it was started in is gone; start it in another\n"
