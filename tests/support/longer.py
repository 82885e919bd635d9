"""Which parameters of a test are left to ``--long``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def but_long(values: Iterable[Any], *long: Any) -> list[Any]:
    """All of them, of which ``long`` run with ``--long`` alone."""
    return [pytest.param(value, marks=pytest.mark.long) if value in long else value for value in values]
