"""What docs/models.md and docs/tracking.md show is accepted, and works as shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from afl.cli.main import make_afl_parser
from afl.config import config_from_mapping, load_config
from afl.tracking.following import Following

ROOT = Path(__file__).resolve().parents[3]
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("models.md", "tracking.md")}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_commands_parse(page: str) -> None:
    shown = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert shown
    for line in shown:
        program, *arguments = shlex.split(line)
        assert program == "afl"
        make_afl_parser().parse_args(arguments)


def test_the_configuration_shown_is_one(tmp_path: Path) -> None:
    (block,) = blocks("tracking.md", "yaml")
    base = "workers: 1\ntask: {name: digits}\nalgorithm: {name: afl-br, rounds: 1, eta_w: 1.0, eta_q: 0.0}\n"
    (tmp_path / "run.yaml").write_text(base + block, encoding="utf-8")
    assert load_config(tmp_path / "run.yaml").run.trackers == ["tensorboard", "mlflow"]


def test_the_tracker_shown_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("tracking.md", "python")
    found: dict[str, Any] = {}
    exec(block, found)
    algorithm = {"name": "afl-br", "rounds": 1, "eta_w": 1.0, "eta_q": 0.0}
    config = config_from_mapping({"workers": 1, "task": {"name": "digits"}, "algorithm": algorithm})
    (tmp_path / "metrics.jsonl").write_text('{"event": "round", "round": 1, "loss_max": 0.5}\n')
    following = Following({"printer": found["Printer"]()}, "run-1", tmp_path, config)
    following.start()
    following.end("finished")
    assert capsys.readouterr().out.splitlines() == ["begins run-1 afl-br", "1 0.5", "finished"]
