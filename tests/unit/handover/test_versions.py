"""Which versions of afl a run has had."""

from __future__ import annotations

from pathlib import Path

import pytest

from afl.errors import DataError
from afl.runs.versions import VERSIONS_FILE, Version, read_versions, shown_versions, write_versions


def test_what_is_written_is_read(tmp_path: Path) -> None:
    versions = [Version("0.2.0", 0), Version("0.3.0", 12), Version("0.2.0", 40)]
    write_versions(tmp_path, versions)
    assert read_versions(tmp_path) == versions
    assert shown_versions(versions) == "0.2.0, 0.3.0 after round 12, 0.2.0 after round 40"


def test_of_a_run_without_the_file_the_first_is_unknown(tmp_path: Path) -> None:
    assert shown_versions([*read_versions(tmp_path), Version("0.2.0", 3)]) == "unknown, 0.2.0 after round 3"


@pytest.mark.parametrize("text", ["", "{", "3", '[{"version": "1"}]', '[["1", 2]]', "[]", '[{"version": 1}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / VERSIONS_FILE).write_text(text)
    with pytest.raises(DataError, match=r"versions\.json cannot be read .* or remove it"):
        read_versions(tmp_path)
