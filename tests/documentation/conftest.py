"""A reader's own environment is not the tests'."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_variables_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AFL_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
