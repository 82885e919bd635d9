"""Federations are several processes that each import torch: on a busy machine a test may take minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

TIMEOUT_S = 400
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
