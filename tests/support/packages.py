"""Packages of users, as an installer would leave them: where Python looks for entry points."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from support.pages import blocks
from support.process import KIT


def install(site: Path, name: str, points: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Leave in ``site``, which has the package's modules, that it is installed.

    Args:
        points: by entry point group, what each name stands for.

    Returns:
        An environment in which a process finds it, and the kit.
    """
    information = site / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    lines = []
    for group, named in points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in named.items())]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return {"PYTHONPATH": os.pathsep.join([str(site), str(KIT), os.environ.get("PYTHONPATH", "")])}


def shown_points(page: str) -> dict[str, dict[str, str]]:
    """The entry points in the ``pyproject.toml`` that a page shows."""
    (toml,) = blocks(page, "toml")
    found: dict[str, dict[str, str]] = tomllib.loads(toml.text)["project"]["entry-points"]
    return found
