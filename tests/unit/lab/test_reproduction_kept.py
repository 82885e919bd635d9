"""What docs/reproduction holds: every run's small file, and the tables that are made from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from afl_reproduction.condensed import read_run
from afl_reproduction.experiment import load_experiment, shipped_experiments
from afl_reproduction.tables import markdown, table_of

DOCS = Path(__file__).resolve().parents[3] / "docs"
KEPT = DOCS / "reproduction"

PARTS = [(name, part) for name in shipped_experiments() for part in load_experiment(name).parts]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_a_table_is_what_its_runs_give(name: str, part: str) -> None:
    experiment = load_experiment(name)
    own, variants = experiment.parts[part], experiment.variants(part)
    folder = KEPT / name / "runs" / part
    files = {run: [folder / f"{run}-seed-{seed}.jsonl" for seed in own.seeds] for run in variants}
    assert {path for paths in files.values() for path in paths} == set(folder.iterdir())
    runs = {run: [read_run(path) for path in paths] for run, paths in files.items()}
    table = table_of(runs, {run: variant.label for run, variant in variants.items()}, own.targets)
    assert markdown(table) == (KEPT / name / f"{part}.md").read_text(encoding="utf-8")


def test_each_point_of_the_summary_names_the_table_it_rests_on() -> None:
    text = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    summary = text.partition("\n## In short\n")[2].partition("\n## ")[0]
    points = re.findall(r"^- .*(?:\n  .*)*", summary, flags=re.MULTILINE)
    assert len(points) >= 5
    for point in points:
        tables = re.findall(r"\]\(((?:reproduction|growth)/[^)]*\.md)\)", point)
        assert tables, point
        for table in tables:
            assert (DOCS / table).read_text(encoding="utf-8").startswith("| "), table
