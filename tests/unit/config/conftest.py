"""A configuration file to change, and what loading it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from afl.config import Config, InvalidConfigError, load_config

Load = Callable[..., Config]
Problems = Callable[..., list[str]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a text, written to ``server.yaml`` in the current directory."""
    monkeypatch.chdir(tmp_path)

    def _load(
        text: str, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> Config:
        Path("server.yaml").write_text(text, encoding="utf-8")
        return load_config("server.yaml", overrides, environment={} if environment is None else environment)

    return _load


@pytest.fixture
def problems(load: Load) -> Problems:
    """Load a text that cannot be used; each problem as it is shown."""

    def _problems(
        text: str, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> list[str]:
        with pytest.raises(InvalidConfigError) as caught:
            load(text, overrides, environment)
        message = str(caught.value)
        for foreign in ("pydantic", "https:", "Traceback", "class", "Error", "Input should"):
            assert foreign not in message
        heading, *shown = message.split("\n\n")
        count = len(caught.value.problems)
        assert heading == f"server.yaml cannot be used: {count} problem{'s' * (count != 1)}"
        return shown

    return _problems
