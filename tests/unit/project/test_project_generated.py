"""What is generated and checked in is what the code gives now."""

import importlib.util

import pytest

from afl.errors import ExitCode
from afl_lab import protobuf
from afl_lab.docs import generated, tables


@pytest.mark.skipif(importlib.util.find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_the_protobuf_modules_are_fresh() -> None:
    assert protobuf.differing() == [], "run `make proto`"


def test_what_is_generated_is_fresh() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
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
