"""Child processes and their logs."""

from pathlib import Path

import pytest

from afl.errors import ConfigError
from afl_cli.federation.children import Child, Children

TALKATIVE = """
import json, sys
for number in range(20_000):
    print(json.dumps({"level": "info", "message": f"line {number}"}), file=sys.stderr)
sys.exit(3)
"""


def child_of(children: Children, log: Path) -> Child:
    return children.start("talker", "talkative", [], log)


@pytest.fixture(autouse=True)
def talkative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_log_goes_to_its_file_and_its_end_is_kept(tmp_path: Path) -> None:
    with Children() as children:
        child = child_of(children, tmp_path / "log")
        assert child.wait() == 3
    assert len((tmp_path / "log").read_text().splitlines()) == 20_000
    assert child.tail.splitlines()[-1] == "info: line 19999"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_does_not_hold_the_child(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    with Children() as children:
        child = child_of(children, tmp_path / "log")
        assert child.wait() == 3
    first, *_, last = child.tail.splitlines()
    assert first == "(the file has less: No space left on device)"
    assert last == "info: line 19999"


def test_a_log_that_cannot_be_made_is_said_before_anything_is_started(tmp_path: Path) -> None:
    with Children() as children, pytest.raises(ConfigError, match=r"no/log cannot be written: No such file"):
        child_of(children, tmp_path / "no" / "log")
