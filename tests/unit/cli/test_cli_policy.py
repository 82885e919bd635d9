"""``afl policy``: a policy to begin with, what is in force, and what it says of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from afl.errors import ExitCode
from afl.site.policy import Policy, SitePolicy
from afl_cli.main import main

CONFIG = {
    "workers": 3,
    "task": {"name": "synthetic", "batch_size": 4, "options": {"dim": 50}},
    "algorithm": {"name": "afl-br", "rounds": 20, "eta_w": 0.1, "eta_q": 0.1},
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("server.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")


def test_a_new_policy_has_every_key_with_an_example_that_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "new", "site.yaml"]) == 0
    assert "afl policy show site.yaml" in capsys.readouterr().out
    path = Path("site.yaml")
    text = path.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 100
    keys = "|".join(Policy.model_fields)
    given = re.sub(rf"^# ((?:{keys}): )", r"\1", text, flags=re.MULTILINE).replace("AB:CD:...", "AB" * 32)
    path.write_text(given, encoding="utf-8")
    policy = SitePolicy.load(path)
    assert policy.limits.model_dump(exclude_defaults=True).keys() == Policy.model_fields.keys()
    assert main(["policy", "new", "site.yaml"]) == ExitCode.CONFIG
    assert "nothing is overwritten" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == given
    assert main(["policy", "new", "missing/site.yaml"]) == ExitCode.STORAGE


def test_what_is_in_force_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Path("site.yaml").write_text("max_rounds: 50\nservers: [fl.example.org:1]\n", encoding="utf-8")
    assert main(["policy", "show", "site.yaml"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"max_rounds +│ 50 +│ site.yaml:1", shown)
    assert re.search(r"metrics +│ shown ", shown)
    assert main(["policy", "show", "site.yaml", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["max_rounds"], said["servers"], said["epsilon"]) == (50, ["fl.example.org:1"], None)
    Path("site.yaml").write_text("max_round: 50\n", encoding="utf-8")
    assert main(["policy", "show", "site.yaml"]) == ExitCode.CONFIG
    assert "nearest:   max_rounds" in capsys.readouterr().err


def test_a_run_is_held_against_every_line_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("site.yaml").write_text("max_rounds: 10\nmin_batch: 4\ntasks: {synthetic: {}}\n", encoding="utf-8")
    assert main(["policy", "check", "site.yaml", "server.yaml", "--json"]) == ExitCode.POLICY
    said = json.loads(capsys.readouterr().out)
    assert not said["allowed"]
    assert {demand["key"]: demand["is_met"] for demand in said["demands"]} == {
        "tasks": True,
        "tasks.synthetic.dim": False,
        "max_rounds": False,
        "min_batch": True,
    }
    assert {demand["where"] for demand in said["demands"]} == {f"site.yaml:{line}" for line in (1, 2, 3)}
    assert main(["policy", "check", "site.yaml", "server.yaml"]) == ExitCode.POLICY
    shown = capsys.readouterr().out
    assert shown.count("REFUSED") == 2
    assert "A worker here refuses this run." in shown
    less = ("--set", "algorithm.rounds=10", "--set", "task.options={}")
    assert main(["policy", "check", "site.yaml", "server.yaml", *less]) == 0
    assert "This run may take place here." in capsys.readouterr().out


def test_options_that_are_each_machine_s_own_are_not_the_server_s(capsys: pytest.CaptureFixture[str]) -> None:
    Path("site.yaml").write_text("tasks: {fashion-mnist: }\nmin_batch: 4\n", encoding="utf-8")
    own = ("--set", "task.name=fashion-mnist", "--set", "task.options={data_dir: there}")
    assert main(["policy", "check", "site.yaml", "server.yaml", *own]) == 0
    Path("site.yaml").write_text("tasks: {mine.py:Task: }\nmin_batch: 4\n", encoding="utf-8")
    own = ("--set", "task.name=mine:Task", "--set", "task.options={}")
    assert main(["policy", "check", "site.yaml", "server.yaml", *own]) == 0


@pytest.mark.parametrize("arguments", [("check", "site.yaml"), ("show", "site.yaml", "server.yaml")])
def test_only_check_takes_a_configuration(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", *arguments]) == ExitCode.CONFIG
    assert "write afl policy check POLICY CONFIG" in capsys.readouterr().err
