"""What is generated and checked in is what the code gives now."""

import importlib.util

import pytest

import afl
import afl.theory
from afl.errors import ExitCode
from afl_tools import protobuf
from afl_tools.docs import api, generated, tables


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_the_protobuf_modules_are_fresh() -> None:
    assert protobuf.differing() == [], "run `make proto`"


def test_what_is_generated_is_fresh() -> None:
    stale = [
        path.name for path, fresh in generated.fresh_files() if path.read_text(encoding="utf-8") != fresh
    ]
    assert not stale, "run `make docs`"


def test_the_tables_hold_what_they_should() -> None:
    table = tables.metrics_table()
    assert "| `afl_wire_bytes_total` | counter | direction, kind |" in table
    assert "| `afl_dual_weight` | gauge | worker |" in table
    assert "| `afl_round` | gauge |  |" in table
    assert all(f"| {int(code)} | {code.meaning} |" in tables.exit_codes_table() for code in ExitCode)


def test_a_missing_marker_is_an_error() -> None:
    with pytest.raises(ValueError, match="must have each"):
        generated.with_tables("# no markers here\n", {"metrics": tables.metrics_table})


def test_the_reference_names_what_is_public_with_a_line_of_each() -> None:
    pytest.importorskip("griffe", reason="griffe is not installed")
    table = api.api_table()
    for name in (
        *(f"afl.{name}" for name in afl.__all__),
        *(f"afl.theory.{name}" for name in afl.theory.__all__),
    ):
        assert f"\n| `{name}` | " in table
    classification = "A task whose batches are `(inputs, labels)` and whose loss is the mean cross-entropy."
    assert f"| `afl.Classification` | {classification} |\n" in table
    assert "| `afl.theory.FEWEST_ROUNDS` | The least T that the theorems speak of. |\n" in table


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("One.", "One."),
        ("One that is\n    wrapped.\n\n    More.", "One that is wrapped."),
        ("First, e.g. this. Then that.", "First, e.g. this."),
        ("B: ``ceil(sqrt T)``, for T >= 1.", "B: ``ceil(sqrt T)``, for T >= 1."),
    ],
)
def test_of_a_docstring_its_first_sentence(docstring: str, sentence: str) -> None:
    assert api.first_sentence(docstring) == sentence
