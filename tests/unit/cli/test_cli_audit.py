"""``afl audit``: the chain is checked, and what left is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode
from afl.site.audit import AuditLog
from afl_cli.main import main

REPORT: dict[str, Any] = {
    "run": "run-1",
    "workers": [0, 3],
    "phase": 0,
    "kind": "train",
    "bytes": 1200,
    "digest": "ab" * 32,
    "told": {"losses": [0.5, 0.25], "examples": [8, 8], "metrics": ["loss", "\x1b[2J"]},
    "epsilon": None,
    "again": False,
}

JOINED = {**REPORT, "kind": "joined", "round": 0, "bytes": 0, "digest": None, "again": False}


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AuditLog:
    monkeypatch.chdir(tmp_path)
    made = AuditLog(Path("audit.jsonl"), lambda _: None, lambda _: None)
    made.add({**JOINED, "told": {"server": "fl.example.org:1", "task": "evil\x1b]52;c;x\x07"}})
    for round_ in range(1, 31):
        made.add({**REPORT, "round": round_, "again": round_ == 30})
    return made


def test_what_left_is_shown(log: AuditLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "audit.jsonl", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "31 that follow from each other" in shown
    assert log.last.hash in shown
    assert "36.00 kB" in shown
    assert "train again" in shown
    assert "fl.example" in shown, "the server that it joined"
    assert "\x1b" not in shown.replace("\x1b[1m", ""), "what a server has worded is printable"
    assert main(["audit", "audit.jsonl"]) == 0
    assert "the last 20 of 31 lines" in capsys.readouterr().out


def test_the_same_for_programs(log: AuditLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "audit.jsonl", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["intact"], said["broken"], said["last_hash"]) == (True, None, log.last.hash)
    assert [line["line"] for line in said["lines"]] == list(range(1, 32))
    assert said["lines"][5]["told"] == REPORT["told"]


def test_a_line_that_was_changed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("audit.jsonl")
    path.write_text(path.read_text(encoding="utf-8").replace('"round":7}', '"round":8}'), encoding="utf-8")
    assert main(["audit", "audit.jsonl", "--json"]) == ExitCode.DATA
    out, error = capsys.readouterr()
    assert "audit.jsonl:8: this line was changed" in error
    assert json.loads(out)["broken"] in error
    assert not json.loads(out)["intact"]
    assert main(["audit", "audit.jsonl"]) == ExitCode.DATA
    assert "8 that follow from each other" in capsys.readouterr().out


def test_a_new_log_is_begun_after_an_old_one(log: AuditLog, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "audit.jsonl", "--next", "new.jsonl"]) == 0
    assert main(["audit", "audit.jsonl", "new.jsonl"]) == 0
    assert "32 that follow from each other" in capsys.readouterr().out
    assert main(["audit", "new.jsonl"]) == 0
    assert log.last.hash in capsys.readouterr().out
    for names in (["new.jsonl", "audit.jsonl"], ["audit.jsonl", "audit.jsonl"]):
        assert main(["audit", *names]) == ExitCode.DATA
        assert "does not go on from the one before it" in capsys.readouterr().err
    assert main(["audit", "audit.jsonl", "--next", "new.jsonl"]) == ExitCode.CONFIG
    Path("empty.jsonl").touch()
    assert main(["audit", "empty.jsonl", "--next", "newer.jsonl"]) == ExitCode.CONFIG
    assert not Path("newer.jsonl").exists()
    assert main(["audit", "missing.jsonl"]) == ExitCode.CONFIG
