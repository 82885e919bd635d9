"""What ``afl theory`` shows: pure, from the plain values of :mod:`afl_cli.theory.answer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_STEPS: Final = (
    ("block", "ceil(sqrt T)", "rounds from restart to restart of the weights", ""),
    ("eta_w", "1 / (8 L T^(3/4))", "step on the parameters", "--smoothness"),
    ("eta_q", "2 sqrt(ln m) / (sigma_q T^(1/4))", "step on the dual weights, per unit of loss", "--sigma-q"),
)

_RATIOS: Final = {
    "contractive": ("top-k, and any delta-approximate one", "(ln m)^(-1/4)"),
    "additive-idempotent": ("rand-k both ways, with shared randomness", "(ln m)^(-1/2)"),
}

_NAMES: Final = {"sgda": "SGDA", "drfa": "DRFA", "afl-br": "AFL-BR", "afl-com": "AFL-Com"}


def sections(answer: Mapping[str, Any]) -> list[RenderableType]:
    """The parts, from first to last."""
    return [
        _run(answer),
        _step_sizes(answer),
        _compression(answer),
        _bound(answer),
        _complexities(answer),
    ]


def number(value: float) -> str:
    """A number as a person reads it: a count in full up to 10^7, else three or four significant digits."""
    if isinstance(value, int) and value < 10**7:
        return f"{value:,}"
    return f"{value:.4g}" if 1e-3 <= value < 1e5 or not value else f"{value:.3g}"


def _run(answer: Mapping[str, Any]) -> RenderableType:
    counts = (("worker", answer["workers"]), ("round", answer["rounds"]), ("parameter", answer["dim"]))
    size = ", ".join(f"{number(n)} {what}{'s' * (n != 1)}" for what, n in counts if n is not None)
    return Group(_heading(size), *map(_warning, answer["warnings"]))


def _step_sizes(answer: Mapping[str, Any]) -> RenderableType:
    table = _table("setting", "value>", "formula", "what it is")
    for name, formula, meaning, needs in _STEPS:
        value = answer["step_sizes"][name]
        if value is None:
            table.add_row(name, "-", formula, f"{meaning}; needs {needs}")
        else:
            table.add_row(name, number(value), formula, meaning)
    return Group(_heading("Step sizes and block length, the same in all theorems"), table)


def _compression(answer: Mapping[str, Any]) -> RenderableType:
    has_dim = answer["dim"] is not None
    table = _table("compressor", "keep>", *(["k>"] if has_dim else []), "rule for k/d")
    for row in answer["ratios"]:
        words, rule = _RATIOS[row["class"]]
        table.add_row(words, f"{row['ratio']:.3f}", *([f"{row['k']:,}"] if has_dim else []), rule)
    lines: list[RenderableType] = [
        _heading("What a compressor may drop without slowing AFL-BR's rate"),
        table,
        _remark("The paper gives the order in m; the factor before it is taken as 1 here."),
    ]
    own = answer["compression"]
    if own is not None and own["theorem"] > 1:
        line = f"This run: {own['description']}, delta = {number(own['delta'])}."
        least = own["ratio_that_keeps_the_rate"]
        if own["delta"] < least:
            line += f" That is below {least:.3f}: cheaper rounds and, by the bound, more of them."
        lines.append(Text(line))
    return Group(*lines)


def _bound(answer: Mapping[str, Any]) -> RenderableType:
    bound = answer["bound"]
    if bound is None:
        missing = ", ".join(answer["missing"])
        return Group(
            _heading("No bound"), Text(f"It takes all constants of the problem; missing: {missing}.")
        )
    heading = f"Theorem {bound['theorem']}: {bound['subject']}"
    if bound["theorem"] > 1:
        heading += f"; delta = {number(bound['delta'])}"
    table = _table("term", "value>", "share>", "formula", "where it comes from")
    for term in bound["terms"]:
        share = term["value"] / bound["value"] if bound["value"] else 0.0
        table.add_row(term["name"], number(term["value"]), f"{share:.0%}", term["formula"], term["meaning"])
    table.add_section()
    table.add_row("sum", number(bound["value"]))
    lines: list[RenderableType] = [
        _heading(heading),
        table,
        Text(
            "The model of a uniformly random round has an expected ||grad Phi_(1/2L)||^2 of at most "
            f"{number(bound['value'])}, so a norm of {number(bound['norm'])}. It is 0 where no small change "
            "of the model helps its worst workers."
        ),
    ]
    if bound["vacuous"]:
        lines.append(
            _warning(
                f"at T = {number(answer['rounds'])} the bound says nothing: no model at all is above "
                f"G^2 = {number(bound['trivial'])}. It is below that from "
                f"T = {number(bound['rounds_until_informative'])} on."
            )
        )
    lines.append(
        Text(
            f"A norm of {number(answer['epsilon'])} (--epsilon) is guaranteed from "
            f"T = {number(bound['rounds_for_epsilon'])} on. That is the worst case over all problems "
            "with these constants; a real run usually needs far fewer rounds."
        )
    )
    return Group(*lines)


def _complexities(answer: Mapping[str, Any]) -> RenderableType:
    unit = answer["communication_unit"]
    table = _table(
        "method", "rounds>", f"{unit} a round>", f"{unit} in all>", "AFL-BR = 1>", "O(entries in all)"
    )
    rows = answer["complexities"]
    (reference,) = [row for row in rows if row["algorithm"] == "afl-br"]
    for row in rows:
        table.add_row(
            ", ".join(filter(None, (_NAMES[row["algorithm"]], row["technique"]))),
            *(number(row[part]["value"]) for part in ("rounds", "per_round", "total")),
            f"{row['total']['value'] / reference['total']['value']:.3g}",
            row["total"]["formula"],
        )
    return Group(
        _heading(f"The paper's Table 1: cost of a norm of epsilon = {number(answer['epsilon'])} (--epsilon)"),
        table,
        _remark("Constants are dropped: compare the rows, and how they grow; the numbers predict no run."),
    )


def _table(*columns: str) -> Table:
    """Columns by their headings; one that ends with ``>`` holds numbers."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        is_number = name.endswith(">")
        table.add_column(
            name.removesuffix(">"),
            justify="right" if is_number else "left",
            style="bold" if index == 0 else None,
            no_wrap=index in {0, len(columns) - 1},
        )
    return table


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _remark(text: str) -> Text:
    return Text(text, style="dim")


def _warning(text: str) -> Text:
    return Text(f"Warning: {text}", style="yellow")
