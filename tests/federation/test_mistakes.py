"""docs/mistakes.md: each of its mistakes is made with the real commands, which say what the page says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import Federation, Process, Proxy
from support.commands import daemon_without_rights, run_command
from support.federation import completed
from support.identities import Identities, tls

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
        if os.environ.get("SITE") == "nan":
            x = x * float("nan")
        if os.environ.get("SITE") == "labels":
            y = y + 3
        if os.environ.get("SITE") == "raising":
            x = {}["age"]
        return afl.WorkerData(train=(x, y), test=(x, y))


class Regression(Site):
    # With a loss of its own.
    def model(self):
        return nn.Linear(5, 1)

    def loss(self, model, batch):
        inputs, targets = batch
        return nn.functional.huber_loss(model(inputs), targets)

    def metrics(self, model, batch):
        return {"loss": self.loss(model, batch)}

    def data(self, worker, context):
        x, y = torch.ones(40, 5), torch.zeros(40, 1)
        if worker == 1:
            y = y.double()
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


Seen = tuple[list[str], int]
"""What is seen, as patterns, and the exit code."""


def rows() -> dict[int, Seen]:
    """Of the first table, by the mistake's number."""
    found = {}
    for line in PAGE.splitlines():
        if match := re.match(r"\| (\d+) \|", line):
            _, _, seen, code, _ = cells(line)
            found[int(match[1])] = patterns(seen), int(code)
    return found


def other_rows() -> dict[str, Seen]:
    """Of the table of others, by the mistake."""
    _, _, others = PAGE.partition("## Others that come up\n")
    found = {}
    for line in others.splitlines():
        if line.startswith("| ") and not line.startswith("| the mistake"):
            mistake, seen, code, _ = cells(line)
            found[mistake] = patterns(seen), int(code)
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def patterns(seen: str) -> list[str]:
    return [pattern(text) for text in re.findall(r"`([^`]+)`", seen)]


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
    return federation.start("0", "--no-json-logs", "--give-up-after", "1s", server=f"127.0.0.1:{port}")


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


def raw(text: str) -> Made:
    """A server whose configuration is this text."""

    def made(federation: Federation) -> Process:
        (federation.folder / "raw.yaml").write_text(text, encoding="utf-8")
        return Process(
            "server", ["-m", "afl_server", "--config", "raw.yaml", "--no-json-logs"], folder=federation.folder
        )

    return made


def in_a_closed_folder(federation: Federation) -> Process:
    closed = federation.folder / "closed"
    closed.mkdir(mode=0)
    (federation.folder / "closed.yaml").write_text(
        yaml.safe_dump(completed({**CONFIG, "task": {"name": "synthetic"}}, closed / "run")), encoding="utf-8"
    )
    options = ("--config", "closed.yaml", "--no-json-logs")
    process = Process("server", daemon_without_rights(*options), folder=federation.folder)
    process.wait()
    closed.chmod(0o700)
    return process


def second_server(federation: Federation) -> Process:
    return server("--set", f"server.listen={federation.address}")(federation)


def of_another_version(federation: Federation) -> Process:
    """A worker of a protocol that is yet to come."""
    options = ["--id", "3", "--server", federation.address, "--no-json-logs", *NAMED]
    options += ["--give-up-after", "1s"]
    code = (
        "import sys, afl.wire.frames as frames\n"
        "frames.PROTOCOL = frames.OLDEST_PROTOCOL = 99\n"
        f"import afl_worker.main\nsys.exit(afl_worker.main.main({options!r}))"
    )
    return Process("worker of another version", ["-c", code], folder=federation.folder)


def alone(site: str) -> Made:
    """The one worker of a run of its own, which its mistake ends."""

    def made(federation: Federation) -> Process:
        with Federation({**CONFIG, "workers": 1}, federation.folder / site) as own:
            (own.folder / "site_task.py").write_text(TASK, encoding="utf-8")
            process = own.start("0", "--no-json-logs", *NAMED, environment={"SITE": site})
            process.wait()
        return process

    return made


def under_tls(*options: str) -> Made:
    """A worker of a server with TLS; ``OTHER`` among its options is another authority's file."""

    def made(federation: Federation) -> Process:
        folder = federation.folder / "tls"
        ours, others = Identities(folder / "ours"), Identities(folder / "others", "other-ca")
        given = [str(others.ca) if option == "OTHER" else option for option in options]
        config = {**CONFIG, "task": {"name": "synthetic"}, "server": {"tls": tls(ours.server())}}
        with Federation(config, folder) as own:
            process = own.start("0", "--no-json-logs", "--give-up-after", "1s", *given)
            process.wait()
        return process

    return made


def tls_to_plaintext(federation: Federation) -> Process:
    ca = Identities(federation.folder / "nobody").ca
    return worker("3", "--give-up-after", "1s", "--ca", str(ca))(federation)


OTHERS: dict[str, Made] = {
    "The step size is too large, or the data holds NaN": alone("nan"),
    "Labels are counted from 1, or the model has too few outputs": worker("3", *NAMED, site="labels"),
    "The server's port is taken, usually by an earlier server": second_server,
    "The run directory is below a folder of another user": in_a_closed_folder,
    "A worker is started twice": worker("0", "--journal", "another", *NAMED),
    "Server and worker have versions that are too far apart": of_another_version,
    "The server has TLS, the worker does not": under_tls(),
    "The worker has TLS, the server does not": tls_to_plaintext,
    "The worker trusts another authority than the server's": under_tls("--ca", "OTHER"),
    "A variable between brackets is not in quotes, as in `{data_dir: ${DATA}}`": raw(
        "workers: 4\ntask: {name: digits, options: {data_dir: ${DATA}}}\n"
    ),
    "Text that contains a colon is not in quotes": raw("workers: 4\nrun:\n  description: wards: all\n"),
}


def test_the_page_has_ten_mistakes_and_others() -> None:
    assert list(rows()) == list(MISTAKES) == list(range(1, 11))
    assert list(other_rows()) == list(OTHERS)
    assert all(seen for seen, _ in [*rows().values(), *other_rows().values()])


@pytest.mark.parametrize("number", MISTAKES)
def test_the_page_says_what_the_command_says(number: int, federation: Federation) -> None:
    expect(rows()[number], MISTAKES[number](federation))


@pytest.mark.parametrize("mistake", OTHERS)
def test_the_page_says_what_is_said_of_others(mistake: str, federation: Federation) -> None:
    expect(other_rows()[mistake], OTHERS[mistake](federation))


def expect(row: Seen, process: Process) -> None:
    seen, code = row
    try:
        process.expect(code)
    finally:
        process.close()
    for wanted in seen:
        assert re.search(wanted, process.text), f"{wanted!r} is not in\n{process.text}"
    assert "Traceback" not in process.text


def test_with_a_loss_of_one_s_own_too_the_numbers_of_another_type_are_named(tmp_path: Path) -> None:
    """What torch raises in the gradient's computation has no line of the user's."""
    (tmp_path / "site_task.py").write_text(TASK, encoding="utf-8")
    config = {**CONFIG, "workers": 2, "task": {"name": "site_task:Regression", "batch_size": 8}}
    named = ("--task", "site_task:Regression")
    said = (
        "the targets of a batch are torch.float64 and the model is torch.float32; convert them in data() with"
        ' .float(), or .astype("float32") in numpy (RuntimeError: Found dtype Double but expected Float)'
    )
    with Federation(config, tmp_path) as federation:
        federation.start("0", *named)
        worker = federation.start("1", "--no-json-logs", *named)
        worker.expect(7)
        assert f"worker 1, round 1: {said}" in worker.text
        assert "Traceback" not in worker.text
        told = federation.server.wait_for("worker_failed")
        assert told["message"].startswith(f"worker 1, round 1 failed: {said}")
    answer = run_command("-m", "afl_cli", "check", "--config", "server.yaml", folder=tmp_path)
    assert answer.returncode == 7
    assert f"error: loss of worker 1's first batch: {said}\n" in answer.stdout


def test_what_a_task_s_code_raises_names_its_line_at_both_ends(federation: Federation) -> None:
    process = worker("3", *NAMED, site="raising")(federation)
    for end in (process, federation.server):
        end.expect_traceback("KeyError: 'age'")
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
