"""A model or data that this machine has no memory for are refused before the memory is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afl.core.randomness import SharedRandomness
from afl.errors import OutOfMemoryError
from afl.tasks import initialization
from afl.tasks.base import TaskContext
from afl.tasks.initialization import build_vector, worker_data
from afl.tasks.registry import load_task

RANDOMNESS = SharedRandomness.from_int(0)


def limited(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """As in a container with this limit of memory."""
    file = folder / "memory.max"
    file.write_text(f"{limit}\n", encoding="ascii")
    monkeypatch.setattr(initialization, "_CGROUP_LIMIT", file)


@pytest.mark.parametrize(
    ("name", "options"),
    [("synthetic", {"dim": 30_000}), ("digits", {"hidden": [200, 200]}), ("femnist", {"hidden": 64})],
)
@pytest.mark.parametrize("limit", ["100000", "max"])
def test_a_model_that_memory_cannot_hold_is_refused_with_both_sizes(
    name: str, options: dict[str, Any], limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = load_task(name, options)
    limited(tmp_path, monkeypatch, limit)
    if limit == "max":
        assert build_vector(task, RANDOMNESS).dim > 25_000
        return
    with pytest.raises(OutOfMemoryError, match=r"model\(\) takes at least .* this machine has 100\.00 kB"):
        build_vector(task, RANDOMNESS)


def test_data_that_memory_cannot_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_task("synthetic", {"dim": 1000, "examples": 1000})
    limited(tmp_path, monkeypatch, "900000")
    assert build_vector(task, RANDOMNESS).dim == 1000
    with pytest.raises(OutOfMemoryError, match=r"data\(0\) takes at least 1\.00 MB"):
        worker_data(task, 0, TaskContext(2, RANDOMNESS))
