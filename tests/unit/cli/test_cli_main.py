"""The command itself: help, exit codes, output that nobody reads to its end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from afl import __version__
from afl.errors import ExitCode
from afl_cli.main import commands, main


def test_help_lists_each_command_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in commands().items():
        assert any(line.split()[:1] == [name] and line.endswith(command.HELP) for line in lines)
    for code in ExitCode:
        assert any(line.split()[:1] == [str(int(code))] and line.endswith(code.meaning) for line in lines)


@pytest.mark.parametrize(
    "arguments", [[], ["simulacrum"], ["demo", "--nonsense"], ["inspect"], ["demo", "--work", "3"]]
)
def test_a_wrong_command_line_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == ExitCode.CONFIG
    assert "usage: afl" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"afl {__version__}\n"


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
