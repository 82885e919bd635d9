"""The repository as a whole."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from afl import __version__

ROOT = Path(__file__).resolve().parents[3]

PERSONAL_FOLDER = re.compile(r"(?<![\w./~$-])/(?:root|home|Users|work|private|tmp/\w+)/")
"""A path that only exists on somebody's machine."""


def tracked() -> list[Path]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git, or no checkout")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), start=1)
            if PERSONAL_FOLDER.search(line)
        ]
    assert not found, "\n".join(found)


def test_the_pattern_knows_a_machines_folder() -> None:
    for seen in ("/ro" + "ot/x", "see /ho" + "me/me/x", "'/Us" + "ers/me/x'", "/tm" + "p/envs/x"):
        assert PERSONAL_FOLDER.search(seen)
    for unseen in ("https://example.org/home/x", "./wo" + "rk/x", "/usr/share/x", "~/wo" + "rk/x"):
        assert not PERSONAL_FOLDER.search(unseen)


def test_the_changelog_has_the_version() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_license_is_the_one_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


def test_every_direct_dependency_has_a_development_version() -> None:
    """And only those: what they need in turn is pip's to choose."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    direct = {_name(entry) for entry in [*project["dependencies"], *extras["tasks"], *extras["dev"]]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_name(line) for line in lines if line.strip() and not line.startswith("#")}
    assert pinned == direct


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    for entry in [*project["dependencies"], *project["optional-dependencies"]["tasks"]]:
        name = re.split(r"[<>=!~]", entry)[0].strip()
        assert re.search(rf"^\| {re.escape(name)}\b.* \| .+ \|$", text, re.MULTILINE), name


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement)[0].strip().lower().replace("_", "-")
