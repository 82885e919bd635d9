"""The status page's own files: what is in them, where they come from, and that they are packaged."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "server" / "afl_server" / "pages" / "assets"
OWN = sorted(path for path in PAGE.iterdir() if path.is_file())


def test_the_charting_library_is_what_its_registry_has() -> None:
    """Taken out again: npm pack uplot@VERSION, then package/dist and package/LICENSE."""
    origin = json.loads((PAGE / "uplot" / "ORIGIN.json").read_text())
    there = {path.name for path in (PAGE / "uplot").iterdir()} - {"ORIGIN.json"}
    assert there == set(origin["sha256"])
    for name, expected in origin["sha256"].items():
        assert hashlib.sha256((PAGE / "uplot" / name).read_bytes()).hexdigest() == expected, name
    assert f"v{origin['version']}" in (PAGE / "uplot" / "uPlot.iife.min.js").read_text()[:400]
    assert "Permission is hereby granted, free of charge" in (PAGE / "uplot" / "LICENSE.txt").read_text()


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_a_page_below_another_sites_path_finds_its_files(path: Path) -> None:
    """Addresses are relative, and nothing is fetched from elsewhere."""
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://", text)
    assert not re.search(r"""(?:src|href|url\(|fetch\(|ask\(|EventSource\()=?["'`]?/""", text)


def test_the_page_has_no_script_or_style_of_its_own_in_it() -> None:
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    assert "<style" not in text
    assert not re.search(r"\son\w+=|\sstyle=|javascript:", text)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text))


@pytest.mark.parametrize("path", [path for path in OWN if path.suffix == ".js"], ids=lambda path: path.name)
def test_scripts_make_elements_not_markup(path: Path) -> None:
    """What comes from tasks, workers and tracebacks is text, whatever it looks like."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)


def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    wheel = next(iter(builder.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])))
    with zipfile.ZipFile(wheel) as archive:
        packaged = set(archive.namelist())
    expected = {path.relative_to(ROOT / "server").as_posix() for path in PAGE.rglob("*") if path.is_file()}
    assert len(expected) >= 10
    assert expected <= packaged
