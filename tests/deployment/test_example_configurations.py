"""deploy/server.yaml and the configurations of the chart's values: as a server loads them, and commented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from deployment_manifests import EXAMPLES, ROOT, example_values

from afl.config import load_config

FROM_VALUES = [name for name in ("default", *EXAMPLES) if "config" in example_values(name).get("server", {})]


def check_is_commented(text: str) -> None:
    assert text.startswith("# A run of AFL-Com ")
    sections = re.findall(r"^(\w+):", text, re.MULTILINE)
    assert sections == sorted(set(sections), key=sections.index)
    assert text.count("# ") >= 10, "an example is commented"


def test_the_example_is_a_configuration() -> None:
    path = ROOT / "deploy" / "server.yaml"
    load_config(path, [])
    text = path.read_text(encoding="utf-8")
    check_is_commented(text)
    assert text.count("# ") >= 15


@pytest.mark.parametrize("name", FROM_VALUES)
def test_the_values_hold_a_configuration(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: Any = example_values(name)
    server = values["server"]
    monkeypatch.setenv("AFL_WORKERS", str(server["workers"]))
    monkeypatch.setenv("AFL_TASK", values["task"])
    monkeypatch.setenv("AFL_RUN", server["run"])
    path = tmp_path / "server.yaml"
    path.write_text(server["config"], encoding="utf-8")
    config = load_config(path, [])
    assert set(re.findall(r"\$\{(AFL_[A-Z]+)\}", server["config"])) == {"AFL_WORKERS", "AFL_TASK", "AFL_RUN"}
    assert config.workers == server["workers"]
    assert config.task.name == values["task"]
    assert Path(str(config.run.directory)).name == server["run"]
    check_is_commented(server["config"])


def test_three_of_the_values_have_one_of_their_own() -> None:
    assert FROM_VALUES == ["default", "cluster", "laptop"]
