"""What an error about a path becomes, and what only looks like one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from afl.errors import AflError, ConfigError, DataError, StorageError
from afl.paths import as_argument, begin_here, expanded, from_start, kind_of, naming_paths


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            OSError(errno.EACCES, "Permission denied", b"r\xff"),
            DataError,
            "--out: r\udcff: Permission denied; ",
        ),
        (OSError(errno.EISDIR, "Is a directory", Path("r")), DataError, "--out: r: Is a directory; name an"),
        (
            OSError(errno.ENOSPC, "No space left", "r"),
            StorageError,
            "--out: r: No space left; free some space",
        ),
        (
            OSError(errno.EMFILE, "Too many open files", "r"),
            DataError,
            "--out: r: Too many open files; allow more open files (ulimit -n",
        ),
        (OSError(errno.EDQUOT, "Quota"), StorageError, "--out: Quota; free some space"),
    ],
)
def test_an_error_about_a_path_says_which_and_what_would_be_right(
    error: OSError, kind: type[AflError], said: str
) -> None:
    with pytest.raises(kind) as caught, naming_paths(DataError, "--out"):
        raise error
    assert str(caught.value).startswith(said)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [OSError(errno.EBADF, "Bad file descriptor", 7), ConnectionError("reset"), ValueError("r")]
)
def test_what_is_about_no_path_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_paths():
        raise error
    assert caught.value is error


def test_the_kind_of_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert [kind_of(path) for path in (tmp_path, file, tmp_path / "none", file / "x")] == [
        *("folder", "file", "", "")
    ]
    with pytest.raises(ConfigError, match="File name too long; a name has at most 255 bytes"), naming_paths():
        kind_of(tmp_path / ("x" * 300))


def test_a_home_that_nobody_has_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded(Path("~/data")) == tmp_path / "data"
    assert expanded(Path("~no-such-user/data")) == Path("~no-such-user/data")
    assert os.fspath(expanded(Path("data"))) == "data"


@pytest.mark.parametrize(
    ("path", "argument"),
    [("runs/a", "runs/a"), ("-r", "./-r"), ("$HOME/my runs", "'$HOME/my runs'"), ("~", "'~'")],
)
def test_a_path_in_a_command_to_be_pasted(path: str, argument: str) -> None:
    assert as_argument(Path(path)) == argument


def test_what_a_person_names_stays_where_the_process_has_begun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("afl.paths._start", Path())
    assert from_start(Path("runs")) == Path("runs")
    monkeypatch.chdir(tmp_path)
    begin_here()
    monkeypatch.chdir("/")
    assert from_start(Path("runs")) == tmp_path / "runs"
    assert from_start(Path("/runs")) == Path("/runs")
