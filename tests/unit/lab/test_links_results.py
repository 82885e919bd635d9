"""Runs over links in a file, and their tables."""

from __future__ import annotations

from pathlib import Path

from afl_benchmarks.links.results import (
    LinkRun,
    Point,
    add_run,
    median_round,
    overhead_table,
    read_runs,
    table,
)
from afl_benchmarks.over_links import TARGETS

ROOT = Path(__file__).parents[3]

STORED = ROOT / "docs" / "network" / "links.jsonl"


def run_of(method: str, mbit: float, accuracies: list[float]) -> LinkRun:
    """An evaluation every ten rounds and five seconds; 10 MB up and 20 down each time."""
    points = [
        Point(10 * n, 5.0 * n, accuracy, 10**7 * n, 2 * 10**7 * n)
        for n, accuracy in enumerate(accuracies, start=1)
    ]
    return LinkRun(
        method=method,
        links="proxy" if mbit else "none",
        mbit=mbit,
        round_trip_ms=50.0 if mbit else 0.0,
        seed=1,
        rounds=10 * len(points),
        round_seconds=0.45,
        carried_up=10_400_000 if mbit else 0,
        carried_down=20_200_000 if mbit else 0,
        messages_up=10_000_000,
        messages_down=20_000_000,
        path="abc",
        machine="x86_64",
        settings={"workers": 2},
        points=points,
    )


def test_a_run_is_read_as_it_was_written_and_replaced_by_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "links.jsonl"
    first, other, again = (
        run_of("A", 20, [0.5]),
        run_of("A", 0, [0.5]),
        run_of("A", 20, [0.4, 0.7]),
    )
    for run in (first, other, again):
        add_run(path, run)
    assert read_runs(path) == [other, again]


def test_the_table_has_the_first_evaluation_that_reaches_a_target() -> None:
    runs = [run_of("A", 0, [0.5, 0.4, 0.6]), run_of("A", 20, [0.5, 0.4, 0.6]), run_of("B", 20, [0.3])]
    lines = table(runs, [0.5, 0.55, 0.9]).splitlines()[2:]
    assert lines == [
        "| ≥ 0.5 | A | 20 Mbit/s, 50 ms | 10 | 5 | 10 | 20 | 0.450 |",
        "| ≥ 0.5 | A | loopback | 10 | 5 | 10 | 20 | 0.450 |",
        "| ≥ 0.5 | B | 20 Mbit/s, 50 ms | not in 10 | - | - | - | 0.450 |",
        "| ≥ 0.55 | A | 20 Mbit/s, 50 ms | 30 | 15 | 30 | 60 | 0.450 |",
        "| ≥ 0.55 | A | loopback | 30 | 15 | 30 | 60 | 0.450 |",
        "| ≥ 0.55 | B | 20 Mbit/s, 50 ms | not in 10 | - | - | - | 0.450 |",
    ]
    assert overhead_table(runs[:2]).splitlines()[2:] == [
        "| A | 20 Mbit/s, 50 ms | 30 | 30.0 | 30.6 | 2.00% | 0.450 | 0.257 |"
    ]


def test_the_first_round_does_not_count() -> None:
    assert median_round([9.0, 1.0, 3.0, 2.0]) == 2.0
    assert median_round([9.0]) == 9.0


def test_the_page_shows_what_was_measured() -> None:
    page = (ROOT / "docs" / "network.md").read_text(encoding="utf-8")
    runs = read_runs(STORED)
    assert table(runs, TARGETS) in page, (
        "python -m afl_benchmarks.over_links --table docs/network/links.jsonl"
    )
    assert overhead_table(runs) in page


def test_links_change_nothing_in_what_was_measured() -> None:
    """The same rounds to each target, the same losses and weights on the way: only later."""
    runs = read_runs(STORED)
    methods = {run.method for run in runs}
    assert len(methods) == 3
    for method in methods:
        shaped, plain = sorted((run for run in runs if run.method == method), key=lambda run: -run.mbit)
        assert shaped.mbit == 20
        assert shaped.path == plain.path
        assert [point.round for point in shaped.points] == [point.round for point in plain.points]
