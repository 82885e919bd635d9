"""Whatever is in the file or in an override, it is a configuration or an error that a person can read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afl.config import InvalidConfigError, config_from_mapping, document, load_config

LINES = Path(__file__).parents[3].joinpath("deploy", "server.yaml").read_text(encoding="utf-8").splitlines()
KEYS = [key.name for key in document.all_keys()]

VALUES = st.sampled_from(
    [
        *(
            "",
            "null",
            "[]",
            "{}",
            "[1, {a: 2}]",
            "{name: top-k, x: .nan}",
            "-1",
            "1e400",
            "0x",
            "theory",
            "auto",
            "on",
        ),
        *(
            "'",
            '"\\ud800"',
            "&a b",
            "*a",
            "!!set {}",
            "<<: 1",
            "${",
            "${X}",
            "${HOME:-}",
            "? x",
            "- 1",
            "| x",
            "\t",
        ),
    ]
) | st.text(max_size=8)


@settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(LINES) - 1), VALUES), max_size=4),
    overrides=st.lists(st.builds("{}={}".format, st.sampled_from(KEYS) | VALUES, VALUES), max_size=2),
)
def test_a_configuration_or_a_readable_error(
    tmp_path: Path, changes: list[tuple[int, str]], overrides: list[str]
) -> None:
    lines = list(LINES)
    for number, value in changes:
        key, colon, _ = lines[number].partition(":")
        lines[number] = f"{key}{colon} {value}"
    path = tmp_path / "server.yaml"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    try:
        load_config(path, overrides, environment={})
    except InvalidConfigError as error:
        message = str(error)
    else:
        return
    assert "1 problem" in message or "problems" in message
    assert "pydantic" not in message
    assert all(line.isprintable() and len(line) <= 400 for line in message.split("\n"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None, max_examples=30)
@given(values=st.dictionaries(st.sampled_from(["workers", "task", "algorithm", "server", "run", "x"]), JSON))
def test_any_plain_values_are_checked(values: dict[str, object]) -> None:
    with pytest.raises(InvalidConfigError):
        config_from_mapping(values)
