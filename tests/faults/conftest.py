"""What the runs leave when nothing goes wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from faults_cases import GROUPS, config_of

from support import result_of, run_together


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a run of an algorithm leaves when nothing goes wrong."""

    @functools.cache
    def of(algorithm: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("undisturbed")
        return result_of(run_together(config_of(algorithm), folder, GROUPS))

    return of
