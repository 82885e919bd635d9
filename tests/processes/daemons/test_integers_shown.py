"""What a round's integer messages were like, wherever a run is shown; nothing of float32 values."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from afl.core.grid import IntegerRound
from afl.runs.tracking.lines import numbers_of
from afl.terminal.view import RunView, describe_integers
from afl_cli.main import main
from support.served_run import Served, serving

SEEN = IntegerRound(
    uplink_bits=0.625,
    downlink_bits=1.25,
    zeros=0.9375,
    at_limit=0.004,
    smallest_exponent=-20,
    largest_exponent=-12,
)

NAMES = ("afl_integer_", "afl_grid_")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as found:
        found.run.integers = SEEN
        found.run.play(20)
        yield found


def samples(served: Served) -> dict[str, float]:
    lines = served.body("/metrics").decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith(NAMES)}


def test_prometheus(served: Served) -> None:
    assert samples(served) == {
        'afl_integer_bits{direction="uplink"}': 0.625,
        'afl_integer_bits{direction="downlink"}': 1.25,
        "afl_integer_zero_ratio": 0.9375,
        "afl_integer_limit_ratio": 0.004,
        "afl_grid_smallest_exponent": -20,
        "afl_grid_largest_exponent": -12,
    }


def test_prometheus_of_integers_down_alone(served: Served) -> None:
    served.run.integers = replace(SEEN, uplink_bits=None)
    served.run.play(1)
    assert 'afl_integer_bits{direction="uplink"}' not in samples(served)
    assert samples(served)['afl_integer_bits{direction="downlink"}'] == 1.25


def test_status_page_and_terminal(served: Served) -> None:
    assert served.json("/data/state.json")["integers"] == asdict(SEEN)
    state = served.json("/status")
    assert state["integers"] == asdict(SEEN)
    console = Console(file=io.StringIO(), width=120)
    console.print(RunView(state))
    assert isinstance(console.file, io.StringIO)
    said = "0.625 bits a value up, 1.25 down; 93.8 % are 0, 0.4 % the largest there is; steps 2^-20 to 2^-12"
    assert said in console.file.getvalue()
    down_alone = describe_integers(asdict(replace(SEEN, uplink_bits=None)))
    assert down_alone.startswith("float32 up, 1.25 bits a value down; ")


def test_the_lines_of_the_metrics(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    path = served.run.records.directory / "metrics.jsonl"
    *_, last = (json.loads(line) for line in path.read_text().splitlines() if '"round",' in line)
    assert last["integers"] == asdict(SEEN)
    numbers = numbers_of(last)
    assert numbers["integers/uplink_bits"] == 0.625
    assert numbers["integers/smallest_exponent"] == -20
    assert "integers/uplink_bits" not in numbers_of(
        {**last, "integers": {**asdict(SEEN), "uplink_bits": None}}
    )
    assert main(["inspect", str(path)]) == 0
    assert "0.625 bits a value up" in capsys.readouterr().out


def test_nothing_of_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path) as served:
        served.run.play(20)
        assert samples(served) == {}
        state = served.json("/status")
        assert state["integers"] is None
        assert served.json("/data/state.json")["integers"] is None
        console = Console(file=io.StringIO(), width=120)
        console.print(RunView(state))
        assert isinstance(console.file, io.StringIO)
        assert "bits a value" not in console.file.getvalue()
        path = served.run.records.directory / "metrics.jsonl"
        assert "integers" not in path.read_text()
        assert main(["inspect", str(path)]) == 0
        assert "bits a value" not in capsys.readouterr().out
