"""Federations are several processes that each import torch: on a busy machine a test may take minutes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults_cases import GROUPS, config_of

from support import result_of, run_together

TIMEOUT_S = 400
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a run of an algorithm leaves when nothing goes wrong."""

    @functools.cache
    def of(algorithm: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("undisturbed")
        return result_of(run_together(config_of(algorithm), folder, GROUPS))

    return of
