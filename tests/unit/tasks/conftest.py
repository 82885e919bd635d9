"""Fixtures of the tasks' tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from afl.core.randomness import SharedRandomness
from afl.tasks import TaskContext

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_data_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFL_DATA", raising=False)


@pytest.fixture
def context() -> TaskContext:
    return TaskContext(workers=10, randomness=SharedRandomness.from_int(7))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """A folder with real data sets, for the tests that compare with them."""
    folder = Path(os.environ.get("AFL_SHARED_DATA") or REPOSITORY.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder} (set AFL_SHARED_DATA)")
    return folder
