"""The documentation made from the schema: complete, aligned, and in agreement with it."""

from __future__ import annotations

from typing import Any

import pytest

from afl.config import Config, InvalidConfigError, config_from_mapping, document
from afl.config.problems import Problem
from afl.core.algorithms.registry import algorithm_named, algorithm_names
from afl.core.dual import rule_named, rule_names
from afl_tools.docs import tables


def _flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in values.items():
        flat[prefix + name] = value
        if isinstance(value, dict) and name != "options":
            flat |= _flat(value, f"{prefix}{name}.")
    return flat


def test_every_key_is_described() -> None:
    keys = document.all_keys()
    assert len({key.name for key in keys}) == len(keys)
    for key in keys:
        assert key.description, key.name
        assert key.accepts, key.name
        assert key.default or key.accepts == "a section", key.name
        assert not key.description.endswith("."), key.name


def test_the_documented_keys_are_those_of_the_schema_with_their_defaults() -> None:
    config = config_from_mapping(
        {
            "workers": 1,
            "task": {"name": "t"},
            "algorithm": {
                "name": "afl-com",
                "rounds": 1,
                "eta_w": 1,
                "eta_q": 1,
                "dual": {},
                "schedule": {},
                "optimizer": {},
                "uplink": {"name": "rand-k", "ratio": 1, "bits": 4},
                "downlink": {"name": "rand-k", "ratio": 1, "bits": 4},
            },
            "faults": {"divergence": {"max_loss": 1}, "update_norm": {"times": 10}},
            "server": {"tls": {"certificate": "c", "key": "k"}},
            "worker": {"journal": "machine"},
            "privacy": {"records": {"clip": 1, "delta": 1e-5, "noise": 1}},
        }
    )
    actual = _flat(config.model_dump(mode="json"))
    keys = {key.name: key for key in document.all_keys()}
    own = {
        f"algorithm.{option.name}" for name in algorithm_names() for option in algorithm_named(name).options
    } | {f"algorithm.dual.{option.name}" for name in rule_names() for option in rule_named(name).options}
    assert set(keys) == set(actual) | own
    words = {None: "null", True: "true", False: "false"}
    given = {"algorithm.eta_q", "privacy.records.noise", "worker.journal"}
    for name, key in keys.items():
        if (
            name not in given | own
            and key.default not in {"required", ""}
            and not name.startswith(("algorithm.uplink", "algorithm.downlink"))
        ):
            value = actual[name]
            assert key.default == (words[value] if value is None or isinstance(value, bool) else str(value))
    required = {name for name, key in keys.items() if key.default == "required"} - own
    assert required == {
        "workers",
        "task.name",
        "algorithm.name",
        "algorithm.rounds",
        "algorithm.eta_w",
        "algorithm.uplink.ratio",
        "algorithm.downlink.ratio",
        "faults.divergence.max_loss",
        "privacy.records.delta",
        "server.tls.certificate",
        "server.tls.key",
    }


def test_units() -> None:
    units = {key.name: key.unit for key in document.all_keys()}
    assert units["workers"] == "workers"
    assert units["task.batch_size"] == "examples"
    assert units["algorithm.rounds"] == units["evaluation.every"] == "rounds"
    assert units["server.heartbeat"] == units["server.start_timeout"] == "s"
    assert units["server.chunk_bytes"] == "bytes"


@pytest.mark.parametrize("width", [72, 80, 100, 160])
def test_the_help_fits_and_is_aligned(width: int) -> None:
    lines = document.help_text(width).splitlines()
    assert max(map(len, lines)) <= width
    start = next(line for line in lines if line.startswith("KEY")).index("MEANING")
    body = lines[lines.index(next(line for line in lines if line.startswith("workers "))) :]
    for line in body:
        assert not line or (line[start - 1] == " " and line[start] != " ")
    assert [line.split()[0] for line in body if line and not line.startswith(" ")] == [
        key.name for key in document.all_keys()
    ]


def test_a_terminal_narrower_than_the_help_gets_it_all_the_same() -> None:
    assert document.help_text(10) == document.help_text(72)


def test_the_table_has_a_row_a_key_and_equal_columns() -> None:
    head, rule, *rows = tables.config_table().splitlines()
    assert head == "| key | meaning | accepted | default | unit |"
    assert rule == "|---|---|---|---|---|"
    assert len(rows) == len(document.all_keys())
    assert all(row.replace("\\|", "").count("|") == 6 for row in rows)
    assert rows[0] == (
        "| `workers` | m, the number of workers | a whole number from 1 to 2^31 - 1 | required | workers |"
    )


def test_nothing_in_it_names_a_type_of_the_program() -> None:
    text = document.help_text()
    for name in (Config.__name__, "Literal", "Optional", "NoneType", "Annotated", "Duration(", "Address("):
        assert name not in text


@pytest.mark.parametrize("key", [key.name for key in document.all_keys() if key.default == "null"])
def test_null_in_words_is_taken(key: str) -> None:
    """Some keys are refused for what others demand of them, never for being null."""
    values: dict[str, Any] = {"workers": 3, "task": {"name": "digits"}}
    values["algorithm"] = {"name": "afl-com", "rounds": 1, "eta_w": 1.0, "eta_q": 0.0}
    *sections, last = key.split(".")
    section = values
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = None
    problems: tuple[Problem, ...] = ()
    try:
        config_from_mapping(values)
    except InvalidConfigError as error:
        problems = error.problems
    assert all("null" not in problem.found for problem in problems)
