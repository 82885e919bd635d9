"""What README.md shows works as shown."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

import afl_server.main
import afl_worker.main
from afl import SharedRandomness, TaskContext
from afl.cli.children import Children
from afl.cli.main import make_afl_parser
from afl.config import load_config
from afl.initialization import build_vector
from afl.run_files import model_digest
from afl.tasks.base import take_batch
from afl.tasks.registry import load_task

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")

PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "afl": make_afl_parser,
    "afl-server": afl_server.main.make_server_parser,
    "afl-worker": afl_worker.main.make_worker_parser,
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def named_block(name: str) -> str:
    """The block whose first line is a comment with the name of its file."""
    found = [block for language in ("python", "yaml") for block in blocks(language)]
    (block,) = [block for block in found if block.startswith(f"# {name}\n")]
    return block


def commands() -> list[str]:
    shown = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    inline = re.findall(r"`((?:afl|afl-server|afl-worker|make) [^`]+)`", README)
    return sorted({*shown, *inline})


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.splitlines()[0])
def test_python_compiles(block: str) -> None:
    compile(block, "README.md", "exec")


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program in {"cd", "python"}:
        # Of the project that `afl new` makes; docs/first-hour.md has the same, and a test follows it.
        assert command in (ROOT / "docs" / "first-hour.md").read_text(encoding="utf-8").splitlines()
        return
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return
    try:
        PARSERS[program]().parse_args(arguments)
    except SystemExit as end:
        assert end.code == 0  # noqa: PT017  # --help ends so
        assert "--help" in arguments


def test_the_example_configuration_is_valid_as_overridden() -> None:
    (command,) = [line for line in commands() if "server.insecure=true" in line]
    overrides = afl_server.main.make_server_parser().parse_args(shlex.split(command)[1:]).set
    config = load_config(ROOT / "deploy" / "server.yaml", overrides)
    assert config.server.insecure
    assert not config.server.listen.is_loopback


def test_relative_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = document.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder as the section on one's own task leaves it."""
    for name in ("my_task.py", "my_run.yaml", "make_data.py"):
        (tmp_path / name).write_text(named_block(name), encoding="utf-8")
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AFL_DATA", raising=False)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("my_task", None)


def test_the_task_is_about_30_lines() -> None:
    lines = [line for line in named_block("my_task.py").splitlines()[1:] if line.strip()]
    assert len(lines) <= 30


def test_the_task_computes(own_task: Path) -> None:
    config = load_config("my_run.yaml")
    task = load_task(config.task.name, config.task.options, allow_path=True)
    randomness = SharedRandomness.from_int(1)
    vector = build_vector(task, randomness)
    data = task.data(1, TaskContext(config.workers, randomness))
    loss = task.loss(vector.module, take_batch(data.train, torch.arange(32)))
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert vector.collect_gradient().abs().sum() > 0
    assert 0 <= task.metrics(vector.module, take_batch(data.test, torch.arange(20)))["accuracy"] <= 1


def test_the_task_runs_as_a_federation(own_task: Path) -> None:
    """The commands of the README, with both workers in one process, and ports that are surely free."""
    ports = ["--set", "server.listen=127.0.0.1:0", "--set", "server.http=null"]
    with Children() as children:
        server = children.start(
            "server", "afl_server", ["--config", "my_run.yaml", "--no-live", *ports], own_task / "server.log"
        )
        while (event := children.next_event(timeout=60)) is not None and event.name != "listening":
            assert event.fields, server.tail
        assert event is not None
        where = f"127.0.0.1:{event.fields['port']}"
        worker = children.start(
            "workers",
            "afl_worker",
            ["--id", "0-1", "--server", where, "--task", "my_task:MyTask"],
            own_task / "worker.log",
        )
        assert worker.wait() == 0, worker.tail
        assert server.wait() == 0, server.tail
    written = {path.name for path in (own_task / "my_run").iterdir()}
    assert written == set(
        re.findall(r"^\| `([^`/]+\.(?:yaml|jsonl|json|safetensors)|state)/?` \|", README, re.MULTILINE)
    )
    task = load_task("my_task:MyTask", {}, allow_path=True)
    module = task.model()
    source = blocks("python")[0].replace("model-final", "my_run/model-final")
    exec(source, {"module": module})
    data = task.data(0, TaskContext(2, SharedRandomness.from_int(1)))
    assert task.metrics(module.eval(), data.test)["accuracy"] > 0.8
    assert len(model_digest(own_task / "my_run" / "model-final.safetensors")) == 32


def test_the_configuration_shown_is_one(own_task: Path) -> None:
    assert yaml.safe_load(named_block("my_run.yaml"))["workers"] == load_config("my_run.yaml").workers
