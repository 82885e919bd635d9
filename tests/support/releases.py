"""Other releases of afl, to run beside the present tree: a folder that comes first on a process's path."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from support.process import KIT

ROOT = Path(__file__).parents[2]

PARTS = ("pyproject.toml", "README.md", "LICENSE", "common", "cli", "server", "worker", "lab")
"""What a wheel is made of."""

BUILD_S = 120.0


@dataclass(frozen=True)
class Release:
    """A version of afl; ``environment`` makes a process run it."""

    version: str
    environment: Mapping[str, str]


def release_of_tree(folder: Path, version: str, changes: Mapping[str, Mapping[str, str]]) -> Release:
    """The present tree as if it were ``version``.

    Args:
        changes: by file, texts that stand there once, and what stands there instead.
    """
    source = folder / "source"
    source.mkdir(parents=True)
    for name in PARTS:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    present = re.search(r'^version = ".+"$', (source / "pyproject.toml").read_text(), re.MULTILINE)
    assert present is not None
    for file, texts in {**changes, "pyproject.toml": {present[0]: f'version = "{version}"'}}.items():
        content = (source / file).read_text(encoding="utf-8")
        for old, new in texts.items():
            assert content.count(old) == 1, (file, old)
            content = content.replace(old, new)
        (source / file).write_text(content, encoding="utf-8")
    return _built(source, folder)


def last_release(folder: Path) -> Release | None:
    """That of the last tag before the present commit; ``None`` where there is none."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run(
        [*git, "describe", "--tags", "--abbrev=0", "HEAD^"], check=False, capture_output=True, text=True
    )
    if found.returncode != 0:
        return None
    source = folder / "source"
    source.mkdir(parents=True)
    archive = folder / "source.tar"
    subprocess.run([*git, "archive", "--output", str(archive), found.stdout.strip()], check=True)
    shutil.unpack_archive(archive, source)
    return _built(source, folder)


def _built(source: Path, folder: Path) -> Release:
    """Its wheel, unpacked, as pip would install it."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "wheel")],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=BUILD_S,
    )
    (wheel,) = (folder / "wheel").glob("*.whl")
    installed = folder / "installed"
    with ZipFile(wheel) as archive:
        archive.extractall(installed)
    version = wheel.name.split("-")[1]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (installed, KIT)))}
    said = subprocess.run(
        [sys.executable, "-c", "import afl._version as v; print(v.__version__, v.__file__)"],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    ).stdout.split()
    assert said == [version, str(installed / "afl" / "_version.py")], said
    return Release(version, environment)
