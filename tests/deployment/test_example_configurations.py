"""deploy/server.yaml and each overlay's own: loaded as a server loads them, and commented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from deployment_manifests import FOLDER, OVERLAYS, ROOT

from afl.config import load_config

EXAMPLES = [
    ROOT / "deploy" / "server.yaml",
    *(FOLDER / "overlays" / name / "server.yaml" for name in OVERLAYS),
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT / "deploy")))
def test_an_example_is_a_configuration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {}
    if path.parent.name in OVERLAYS:
        settings = yaml.safe_load(path.with_name("settings.yaml").read_text(encoding="utf-8"))["data"]
        for name in ("workers", "task", "run"):
            monkeypatch.setenv(f"AFL_{name.upper()}", settings[name])
    text = path.read_text(encoding="utf-8")
    config = load_config(path, [])
    assert set(re.findall(r"\$\{(AFL_[A-Z]+)\}", text)) == {
        f"AFL_{name.upper()}" for name in ("workers", "task", "run") if name in settings
    }
    if settings:
        assert str(config.workers) == settings["workers"]
        assert config.task.name == settings["task"]
        assert Path(str(config.run.directory)).name == settings["run"]
    assert text.startswith("# A run of AFL-Com ")
    sections = re.findall(r"^(\w+):", text, re.MULTILINE)
    assert sections == sorted(set(sections), key=sections.index)
    assert text.count("# ") >= 15, "an example is commented"
