"""The command itself: help, exit codes, output that nobody reads to its end."""

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
