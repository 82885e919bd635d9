"""Commands as a user runs them, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from afl_cli.main import main

ROOT = Path(__file__).resolve().parents[3]

PROBLEM = ["--workers=10", "--rounds=10000", "--smoothness=2", "--sigma-q=0.25"]


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """As in ``afl inspect ... | head``: with a pipe that is closed at once, and more output than it holds."""
    path = tmp_path / "metrics.jsonl"
    entry: dict[str, object] = {"event": "evaluation", "round": 1, "worst_worker": 0, "mean_loss": 1.0}
    entry |= {"worst_accuracy": None, "mean_accuracy": None, "max_loss": 1.0}
    line = json.dumps({**entry, "uplink_bytes": 1, "downlink_bytes": 1}) + "\n"
    path.write_text(line * 3000)
    with subprocess.Popen(
        [sys.executable, "-m", "afl_cli", "inspect", "--all", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 0, errors
    assert errors == b""


def test_the_theory_as_a_user_would_ask_for_it() -> None:
    command = [sys.executable, "-m", "afl_cli", "theory", *PROBLEM]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = " ".join(done.stdout.split())
    for expected in (
        "block 100 ceil(sqrt T)",
        "eta_w 6.25e-05 1 / (8 L T^(3/4)) step on the parameters",
        "eta_q 1.214 2 sqrt(ln m)",
        "rand-k both ways, with shared randomness 0.659",
    ):
        assert expected in text
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert not done.stderr


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_new_project_is_linted_formatted_and_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "study"]) == 0
    ruff, mypy = (
        [sys.executable, "-m", "ruff"],
        # What it has found of PyTorch is kept beside what `make lint` keeps: from nothing it takes 13 s.
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={ROOT / '.mypy_cache' / 'of-a-project'}"],
    )
    rules = ["--isolated", "--select", "A,B,C4,D1,E,F,I,N,PTH,RET,SIM,UP,W", "--line-length", "110"]
    for command in (
        [*ruff, "check", *rules, "."],
        [*ruff, "format", "--isolated", "--line-length", "110", "--check", "."],
    ):
        answer = subprocess.run(command, cwd=tmp_path / "study", capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stdout
    # As where the package is installed: its own modules are followed for their types, not checked again.
    answer = subprocess.run(
        [*mypy, "--follow-imports=silent", "task.py", "test_task.py"],
        cwd=tmp_path / "study",
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout
