"""The file of a run's versions: read as it was written, or said to be damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from afl.errors import DataError
from afl.runs.versions import UNKNOWN, VERSIONS_FILE, Version, read_versions, shown_versions, write_versions


def test_versions_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_versions(tmp_path) == [Version(UNKNOWN, 0)]
    versions = [Version("0.2.0", 0), Version("0.3.0", 12)]
    write_versions(tmp_path, versions)
    assert read_versions(tmp_path) == versions
    assert shown_versions(versions) == "0.2.0, 0.3.0 after round 12"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '""', "1", "[" * 100_000, "[1]", '[{"version":"1"}]']
    + [f'[{{"version":"1","round":{round_}}}]' for round_ in ("1e999", "null", "[]", '"x"')],
)
def test_a_file_that_is_none_is_damaged(content: str, tmp_path: Path) -> None:
    (tmp_path / VERSIONS_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match="put it back from a backup, or remove it"):
        read_versions(tmp_path)
