"""Names of sites: wherever people read of a worker, and nowhere in what is computed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from afl.config import config_from_mapping
from afl.errors import ConfigError
from afl.names import is_name, named, with_names
from afl.terminal.view import RunView
from afl_cli.main import main
from support import Federation, RawClient

CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "digits", "batch_size": 16, "options": {"hidden": [8]}},
    "algorithm": {"name": "afl-br", "rounds": 30, "eta_w": 0.05, "eta_q": 0.1},
    "evaluation": {"every": 10},
    "run": {"seed": 7},
}


def view_of(state: dict[str, Any], width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(RunView(state))
    return file.getvalue()


def test_the_configuration_s_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sites = ["north", "Zürich 2", "south-west"]
    with Federation({**CONFIG, "sites": sites}, tmp_path / "named") as run:
        run.start("0")
        # The configuration wins.
        run.start("1", "--name", "elsewhere")
        run.wait_until(lambda status: len(status["workers_missing"]) == 1)
        assert "waiting for worker 2 (south-west)" in " ".join(view_of(run.status(), 80).split())
        assert run.status()["sites"] == sites
        ready = [line for line in run.server.events if line.get("event") == "worker_ready"]
        assert ready[0]["message"].startswith(("worker 0 (north) at ", "worker 1 (Zürich 2) at "))
        page = run.get("/data/state.json")
        assert '"sites"' not in page
        assert run.metrics()['afl_site_info{site="south-west",worker="2"}'] == 1
        run.start("2")
        run.finish()
        last = run.records("evaluation")[-1]
        worst = last["worst_worker"]
        assert last["sites"] == run.summary()["sites"] == sites
        line = next(line for line in run.server.events if line.get("event") == "evaluation")
        assert line["worst_site"] == sites[line["worst_worker"]]
        assert f"worst worker {line['worst_worker']} ({line['worst_site']}), accuracy" in line["message"]
    assert main(["inspect", str(run.directory)]) == 0
    place = f"at round 30, {last['rounds_since_restart']} after a restart of the weights"
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"worker {worst} ({sites[worst]}) {place}: accuracy" in shown
    kept = [event["message"] for event in json.loads((run.directory / "events.json").read_text())]
    assert kept[0] == "the run is complete"
    assert any(message.startswith("worker 2 (south-west) at ") for message in kept)
    with Federation(CONFIG, tmp_path / "plain") as plain:
        plain.start("0-2")
        plain.finish()
        assert "sites" not in plain.records("evaluation")[-1]
    assert plain.model_bytes() == run.model_bytes()


def test_a_worker_s_own_word_stands_in_quotes_and_in_its_own_log(tmp_path: Path) -> None:
    with Federation(CONFIG, tmp_path) as run:
        first = run.start("0-1", "--name", "north, Nord 2")
        run.start("2")
        run.finish()
        assert run.summary()["sites"] == ["'north'", "'Nord 2'", None]
        assert all(line["message"].isprintable() for line in first.events)
    told = [line for line in run.server.events if line.get("event") == "evaluation"]
    assert {line["worst_site"] for line in told} <= {"'north'", "'Nord 2'", None}


def test_a_name_of_other_letters_is_refused_where_it_is_given(tmp_path: Path) -> None:
    with Federation({**CONFIG, "workers": 1}, tmp_path) as run:
        for name, said in (
            ("a\x1b[31mb", "a name has 1 to 32"),
            ("a,b", "2 names for 1 workers"),
            ("x" * 33, "a name has 1 to 32"),
        ):
            worker = run.start("0", "--name", name)
            worker.expect(2)
            assert said in worker.text
            assert "\x1b" not in worker.text
        # Whatever program speaks for a worker.
        for sites, said in (
            (["a\x1b[31mb"], "calls its site"),
            (["a", "b"], "2 names of sites for 1 workers"),
        ):
            with RawClient(run.port) as client:
                client.send(join=client.join_message([0], sites=sites))
                assert said in client.goodbye().reason
        run.start("0")
        run.finish()
        assert "\x1b" not in run.server.text


@pytest.mark.parametrize(
    ("sites", "said"),
    [
        (["north"], "2 names, one for each of workers (2)"),
        (["north", "north"], "north appears more than once"),
        (["north", "so\nuth"], "1 to 32 Latin letters"),
        (["north", "-south"], "1 to 32 Latin letters"),
        (["north", ""], "1 to 32 Latin letters"),
    ],
)
def test_a_configuration_with_other_names_is_refused(sites: list[str], said: str) -> None:
    algorithm = {"name": "fedavg", "rounds": 1, "eta_w": 0.1}
    config = {"workers": 2, "sites": sites, "task": {"name": "digits"}, "algorithm": algorithm}
    with pytest.raises(ConfigError, match="sites") as caught:
        config_from_mapping(config)
    assert said in " ".join(str(caught.value).split())


def test_words() -> None:
    names = {2: "north", 12: "Zürich"}
    assert named(2, names) == "2 (north)"
    assert named(1, names) == "1"
    text = "worker 2, round 5; worker 12's loss; worker 1; workers 2-12; worker 22; coworker 2"
    assert with_names(text, names) == (
        "worker 2 (north), round 5; worker 12 (Zürich)'s loss; worker 1; workers 2-12; worker 22; coworker 2"
    )
    assert with_names(text, {}) == text
    assert all(map(is_name, ("a", "St. Mary's".replace("'", ""), "A" * 32, "Århus_2", "0")))
    assert not any(map(is_name, ("", " a", "a ", "A" * 33, "a\n", "\u202ea", "日本", "a'b", "<b>")))
