"""docs/mistakes.md: each of its ten mistakes is made with the real commands, which say what the page says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import Federation, Process, Proxy
from support.federation import completed

NAMED = ("--task", "site_task:Site")

PAGE = (Path(__file__).parents[2] / "docs" / "mistakes.md").read_text(encoding="utf-8")

TASK = """
import os

import afl
import torch
from torch import nn


class Site(afl.Classification):
    def model(self):
        return nn.Linear(5, 3)

    def data(self, worker, context):
        count = 4 if os.environ.get("SITE") == "small" else 40
        x, y = torch.ones(count, 5), torch.zeros(count, dtype=torch.int64)
        if os.environ.get("SITE") == "float64":
            x = x.double()
        if os.environ.get("SITE") == "raising":
            x = {}["age"]
        return afl.WorkerData(train=(x, y), test=(x, y))


class Normalized(Site):
    def model(self):
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
"""

CONFIG: dict[str, Any] = {
    "workers": 4,
    "task": {"name": "site_task:Site", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": 10,
        "eta_w": 0.1,
        "eta_q": 0.1,
        "uplink": {"name": "rand-k", "ratio": 0.5},
    },
    "evaluation": {"every": 5},
}


def rows() -> dict[int, tuple[list[str], int]]:
    """By the mistake's number: what is seen, as patterns, and the exit code."""
    found = {}
    for line in PAGE.splitlines():
        if match := re.match(r"\| (\d+) \|", line):
            _, _, seen, code, _ = (cell.strip() for cell in line.strip("|").split(" | "))
            found[int(match[1])] = ([pattern(text) for text in re.findall(r"`([^`]+)`", seen)], int(code))
    return found


def pattern(text: str) -> str:
    """Any text of one line in place of what is in ``<>``; the page wraps and indents as it likes."""
    parts = re.split(r"<[^>]+>", text)
    return r".+?".join(r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "site_task.py").write_text(TASK, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def federation(folder: Path) -> Iterator[Federation]:
    """One whose worker 3 is missing."""
    with Federation(CONFIG, folder) as federation:
        federation.start("0-2", *NAMED)
        yield federation


Made = Callable[[Federation], Process]


def server(*options: str, **changes: Any) -> Made:
    """A server with a configuration of its own beside the federation's, which is not disturbed."""

    def made(federation: Federation) -> Process:
        path = federation.folder / "mistaken.yaml"
        config = completed({**CONFIG, **changes}, federation.folder / "never")
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        arguments = ["-m", "afl_server", "--config", path.name, "--no-json-logs", "--no-live", *options]
        return Process("server", arguments, folder=federation.folder)

    return made


def worker(ids: str, *options: str, site: str = "") -> Made:
    def made(federation: Federation) -> Process:
        return federation.start(ids, "--no-json-logs", *options, environment={"SITE": site})

    return made


def worker_of_nobody(federation: Federation) -> Process:
    with Proxy() as nobody:
        port = nobody.port
    return federation.start("0", "--no-json-logs", "--give-up-after", "200ms", server=f"127.0.0.1:{port}")


def another_configuration(federation: Federation) -> Process:
    """The run directory of a server that was stopped."""
    stopped = Federation({**CONFIG, "task": {"name": "synthetic"}}, federation.folder / "stopped")
    with stopped:
        stopped.server.wait_for("listening")
        stopped.server.terminate()
        stopped.server.wait()
    arguments = ["--set", f"run.directory={stopped.directory}", "--set", "algorithm.eta_w=0.2"]
    return server(*arguments, task={"name": "synthetic"})(federation)


MISTAKES: dict[int, Made] = {
    1: server(evaluation={"evry": 5}),
    2: server("--set", "task.name=site_tsk:Site"),
    3: worker("3"),
    4: server("--set", "task.name=site_task:Normalized"),
    5: worker("3", *NAMED, site="float64"),
    6: worker("3", *NAMED, site="small"),
    7: another_configuration,
    8: worker_of_nobody,
    9: worker("4", *NAMED),
    10: server("--set", "server.listen=0.0.0.0:50051"),
}


def test_the_page_has_ten_mistakes() -> None:
    assert list(rows()) == list(MISTAKES) == list(range(1, 11))
    assert all(seen for seen, _ in rows().values())


@pytest.mark.parametrize("number", MISTAKES)
def test_the_page_says_what_the_command_says(number: int, federation: Federation) -> None:
    seen, code = rows()[number]
    process = MISTAKES[number](federation)
    try:
        process.expect(code)
    finally:
        process.close()
    for wanted in seen:
        assert re.search(wanted, process.text), f"{wanted!r} is not in\n{process.text}"
    assert "Traceback" not in process.text


def test_what_a_task_s_code_raises_names_its_line_at_both_ends(federation: Federation) -> None:
    process = worker("3", *NAMED, site="raising")(federation)
    process.expect(2)
    line = TASK.splitlines().index('            x = {}["age"]') + 1
    said = (
        "worker 3, before its first round: Site.data(3) raised KeyError: 'age' "
        f"(site_task.py:{line}, in data)"
    )
    assert said in process.text
    assert f'site_task.py", line {line}, in data' in process.text.splitlines()[2], (
        "the traceback begins there"
    )
    told = federation.server.wait_for("worker_failed", saying="KeyError")["message"]
    assert told.startswith(said.replace(": Site", " failed: Site"))
    assert told.splitlines()[1] == "Traceback (most recent call last):"


def test_a_device_that_is_not_there_is_said_before_any_server_is_looked_for(federation: Federation) -> None:
    process = worker("3", "--device", "gpu")(federation)
    process.expect(2)
    assert process.text == "afl-worker: --device gpu: no such device; write auto, cpu, cuda or cuda:N\n"
