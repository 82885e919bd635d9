"""What people are shown of a run, on the server's terminal and by ``afl``: pure, from plain values."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from afl.config.address import shown_peer
from afl.config.quantities import shown_bytes, shown_seconds
from afl.names import Names, named, names_of, with_names
from afl.outside import lines
from afl.runs.metrics import HIDDEN, growth, hidden_figures, own_metrics_line, ranked
from afl.security.identity import WorkerIds

NARROWEST = 100  # columns where there is no terminal: a table in a log is not squeezed into the customary 80
SLOW_STEP_S = 5.0  # how long a step is open before the workers that it waits for are named
MOST_NAMED = 8  # workers named in one line
BAR_COLUMNS = 60  # the longest progress bar
MOST_SESSIONS = 20
MOST_LINES = 10  # workers with a line each
FULL_COLUMNS = 60  # in a narrower view an evaluation is told in fewer words
FEWEST_PLOT_COLUMNS = 12  # a plot that would be narrower is left out
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = ".:-=+*#%@"


def make_console() -> Console:
    """A console that neither colours digits nor squeezes what goes into a file."""
    is_terminal = sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        # A name that this terminal cannot show is no reason to end.
        sys.stdout.reconfigure(errors="replace")
    return _Console(
        highlight=False,
        markup=False,
        emoji=False,
        width=None if is_terminal else max(NARROWEST, shutil.get_terminal_size().columns),
    )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command: a reader that has seen enough is no failure."""
        raise  # noqa: PLE0704  # rich calls this while it handles the BrokenPipeError

    def render_str(self, text: str, **looks: Any) -> Text:
        """Every plain text that is shown comes through here, whoever worded it."""
        return super().render_str(lines(text), **looks)


def facts(rows: Mapping[str, RenderableType], title: str | None = None) -> Table:
    """Names and what is said of each."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def table(*columns: str, title: str | None = None, **looks: Any) -> Table:
    """A table of columns by their headings; one that ends with ``>`` holds numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", **looks)
    for name in columns:
        made.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left")
    return made


class RunView:
    """The state of a run (the server's ``/status``) as a few lines, as wide as there is room.

    What an older server's state lacks is left out; ``hint`` is a last line, such as what Ctrl-C does.
    """

    def __init__(self, state: Mapping[str, Any], hint: str = "") -> None:
        self._state = state
        self._hint = hint

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the view's table, plot and progress bar."""
        state = self._state
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        hides = state.get("losses") == "hidden"
        at_length, names = options.max_width >= FULL_COLUMNS, names_of(state)
        rows = {
            "run": f"{state['run_id']}  {state['algorithm']} on {state['task']}, {_phase(state)}",
            "round": f"{state['round']} of {state['rounds']}{_rate(state)}",
            "workers": describe_workers(state),
            "all workers" if hides else "worst worker": describe_standing(
                state["last"], names, at_length=at_length
            ),
            "best so far": describe_standing(state["best"], names, at_length=at_length),
            "on the wire": _describe_bytes(state),
        }
        if state.get("warnings"):
            rows["warning"] = with_names("\n".join(state["warnings"]), names)
        if hides:
            rows["losses"] = HIDDEN
        if state.get("record_privacy"):
            rows["records"] = state["record_privacy"]
        if state.get("integers"):
            rows["integers"] = describe_integers(state["integers"])
        for row in rows.items():
            grid.add_row(*row)
        parts: list[RenderableType] = [grid, *_worst_plot(state.get("worst_history"), options)]
        # In a table, since a bar alone does not end its line.
        bar = Table.grid()
        width = min(BAR_COLUMNS, options.max_width)
        bar.add_row(ProgressBar(total=state["rounds"], completed=state["round"], width=width))
        end: list[RenderableType] = [bar, Text(self._hint, style="dim")]
        history = state.get("dual_history")
        plot = list(_dual_plot(history, options, names, MOST_LINES))
        # A terminal cuts off what does not fit: rather lines of workers than the progress.
        most = MOST_LINES if console.is_terminal else 0
        while most and _height(console, options, [*parts, *plot, *end]) > console.height:
            most -= 1
            plot = list(_dual_plot(history, options, names, most))
        yield Group(*parts, *plot, *end)


def _height(console: Console, options: ConsoleOptions, parts: Sequence[RenderableType]) -> int:
    return sum(len(console.render_lines(part, options, pad=False)) for part in parts)


def _phase(state: Mapping[str, Any]) -> str:
    """The state in words, as the status page has it."""
    return "waiting for a straggler" if state.get("phase") == "stalled" else str(state["state"])


def _rate(state: Mapping[str, Any]) -> str:
    """How fast rounds close, and the time that is left; an older server's state has no rate."""
    rate = state.get("rounds_a_second")
    left = f", {shown_seconds(state['seconds_left'])} left" if state["seconds_left"] else ""
    if rate is None:
        return left
    if rate == 0:
        return ", no round closes"
    shown = f"{rate:.1f} rounds/s" if rate >= 1 else f"{60 * rate:.1f} rounds/min"
    return f", {shown}{left}"


def _worst_plot(history: Mapping[str, Any] | None, options: ConsoleOptions) -> Iterator[RenderableType]:
    """A line: how the worst worker was served over the whole run, and now."""
    if not history or len(history["rounds"]) < 2 or history["last"] is None:
        return
    label, now = f"{history['measure']}  ", f"  {history['last']:.3f}"
    columns = min(len(history["rounds"]), options.max_width - len(label) - len(now))
    if columns < min(FEWEST_PLOT_COLUMNS, len(history["rounds"])):
        return
    # Every so many-th, so that the whole run is in sight.
    values = history["values"][:: -(-len(history["rounds"]) // columns)]
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    shown = "".join(" " if value is None else _bar(value, low, high, options) for value in values)
    yield Text.assemble((label, "bold"), (shown, "green"), now)


def _bar(value: float, low: float, high: float, options: ConsoleOptions) -> str:
    """A character as high as a value is between ``low`` and ``high``."""
    bars = _ASCII_BARS if options.ascii_only else _BARS
    return bars[round((value - low) / (high - low) * (len(bars) - 1)) if high > low else 0]


def _dual_plot(
    history: Mapping[str, Any] | None, options: ConsoleOptions, sites: Names, most: int
) -> Iterator[RenderableType]:
    """A line for each of at most so many workers with much weight: it over the last rounds, and now."""
    if not history or len(history["rounds"]) < 2 or not most:
        return
    lines = dict(zip(history["workers"], history["weights"], strict=True))
    chosen = sorted(sorted(lines, key=lambda worker: -sum(lines[worker]))[:most])
    history = {**history, "workers": chosen, "weights": [lines[worker] for worker in chosen]}
    names = [f"worker {named(worker, sites)}" for worker in chosen]
    label = max(len("restarts"), *map(len, names)) + 2
    columns = min(len(history["rounds"]), options.max_width - label - len("  0.000"))
    if columns < min(FEWEST_PLOT_COLUMNS, len(history["rounds"])):
        return
    values = [value for line in history["weights"] for value in line[-columns:]]
    low, high = min(values), max(values)
    first, second = history["rounds"][-columns:][:2]
    each = f", {second - first} rounds a character" if second - first > 1 else ""
    yield Text(f"dual weights from round {first} on{each}: {low:.3f} to {high:.3f}", style="bold")
    for name, line in zip(names, history["weights"], strict=True):
        shown = "".join(_bar(value, low, high, options) for value in line[-columns:])
        yield Text.assemble(name.ljust(label), (shown, "cyan"), f"  {line[-1]:.3f}")
    skipped = len(history["rounds"]) - columns
    marks = {point - skipped for point in history["restarts"]}
    if any(mark >= 0 for mark in marks):
        line = "".join("^" if column in marks else " " for column in range(columns))
        yield Text.assemble("restarts".ljust(label), (line.rstrip(), "dim"))


def sessions_table(state: Mapping[str, Any]) -> Table | None:
    """Who is connected: of each session its workers, version and address, and for how long it has been ready.

    ``None`` where none is open, and of an older server's state.
    """
    sessions, names = state.get("sessions") or (), names_of(state)
    if not sessions:
        return None
    made = table("workers", "version", "address", "ready for>")
    for session in sessions[:MOST_SESSIONS]:
        ready = "not yet" if session["seconds"] is None else shown_seconds(session["seconds"])
        who = with_names(WorkerIds.of(session["workers"]).named, names)
        made.add_row(who, session["version"], shown_peer(session["peer"]), ready)
    if len(sessions) > MOST_SESSIONS:
        made.add_row(f"and {len(sessions) - MOST_SESSIONS} more: --json has all")
    return made


def run_line(state: Mapping[str, Any]) -> str:
    """The state of a run in one line, which changes when there is news."""
    last, is_waiting = state["last"], state["workers_missing"] and state["state"] != "over"
    if last is None and not is_waiting:
        return describe_workers(state)
    if last is None or is_waiting:
        # For how long would be news at every look.
        timeless = {**state, "workers_missing_seconds": [None] * len(state["workers_missing"])}
        return f"round {state['round']} of {state['rounds']}: {describe_workers(timeless)}"
    known = hidden_figures(last)
    known = (
        known
        or f"worst worker {named(last['worst_worker'], names_of(state))}, {_figures(last, at_length=False)}"
    )
    return f"round {last['round']} of {state['rounds']}: {known}"


def _describe_bytes(state: Mapping[str, Any]) -> str:
    """What has been sent, and what whole vectors would have taken."""
    up, down = state["uplink_bytes"], state["downlink_bytes"]
    sent = f"{shown_bytes(up)} up, {shown_bytes(down)} down"
    whole = state.get("uncompressed_bytes")
    if not whole or not up + down:
        return sent
    return f"{sent}; uncompressed {compared(up + down, whole)}"


def describe_integers(integers: Mapping[str, Any]) -> str:
    """What a round's integer messages were like."""
    up, down = integers["uplink_bits"], integers["downlink_bits"]
    above = "float32 up" if up is None else f"{up:.3g} bits a value up"
    steps = " to ".join(f"2^{integers[f'{end}_exponent']}" for end in ("smallest", "largest"))
    whose = "of the update's, " if integers.get("of_update") else ""
    zeros, at_limit = 100 * integers["zeros"], 100 * integers["at_limit"]
    shares = f"{whose}{zeros:.3g} % are 0, {at_limit:.2g} % the largest there is"
    return f"{above}, {down:.3g}{' bits a value' * (up is None)} down; {shares}; steps {steps}"


def compared(sent: int, uncompressed: int) -> str:
    """What uncompressed training would have sent, and how much more that is."""
    return f"{shown_bytes(uncompressed)}, {uncompressed / sent:.1f} times as much"


def describe_workers(state: Mapping[str, Any]) -> str:
    """Which workers have joined, and which the run waits for."""
    missing, late, names = state["workers_missing"], state["reports_missing"], names_of(state)
    if state["state"] == "over":
        return f"{state['workers']}, informed of the end"
    if missing:
        waiting = [
            named(worker, names)
            if seconds is None
            else f"{named(worker, names)} (lost {shown_seconds(seconds)} ago)"
            for worker, seconds in zip(missing, state["workers_missing_seconds"], strict=True)
        ]
        ready = f"{state['workers'] - len(missing)} of {state['workers']} ready"
        return f"{ready}; waiting for worker{'s' * (len(missing) > 1)} {some_of(waiting)}"
    if state["open_step_seconds"] > SLOW_STEP_S and late:
        slowest = some_of([named(worker, names) for worker in late])
        return f"all {state['workers']} ready; waiting for worker{'s' * (len(late) > 1)} {slowest}"
    return f"all {state['workers']} ready"


def describe_standing(
    standing: Mapping[str, Any] | None, names: Names = MappingProxyType({}), *, at_length: bool = True
) -> str:
    """An evaluation in a few words, with the task's own metrics; an older server's standing has none."""
    if standing is None:
        return "not evaluated yet"
    if known := hidden_figures(standing):
        return f"round {standing['round']}: {known}"
    figures = _figures(standing, at_length=at_length)
    since = standing.get("rounds_since_restart") if at_length else None
    phase = "" if since is None else f", {since} after a restart of the weights"
    return f"worker {named(standing['worst_worker'], names)} at round {standing['round']}{phase}: {figures}"


def _figures(standing: Mapping[str, Any], *, at_length: bool) -> str:
    over, by = "over workers " * at_length, ranked(standing)
    largest = f", largest loss {standing['max_loss']:.3f}" * (at_length and by.metric != "loss")
    figures = f"{by.metric} {by.shown(by.worst)} (mean {over}{by.shown(by.mean)}{largest})"
    own = own_metrics_line(standing.get("own_metrics", {}))
    return f"{figures}, {own}" if own else figures


def summary_table(summary: Mapping[str, Any], directory: Path) -> Table:
    """A run's end (its ``summary.json``); of one by an older version, what it lacks is left out."""
    hides = bool(hidden_figures(summary["last"] or {}))
    whom = "all workers" if hides else "worst worker"
    rows: dict[str, RenderableType] = {
        "rounds": f"{summary['rounds']} in {shown_seconds(summary['seconds'])}",
        f"{whom}, last model": describe_standing(summary["last"], names_of(summary)),
        f"{whom}, best model": describe_standing(summary["best"], names_of(summary)),
    }
    if hides:
        rows["losses"] = HIDDEN
    if "record_privacy" in summary:
        rows["records"] = summary["record_privacy"]
    # A run that faults.divergence has ended says so itself.
    if summary.get("result") != "diverged" and (
        grown := growth(summary.get("first_round"), summary.get("first"), summary["last"])
    ):
        rows["warning"] = grown
    for direction, words in (("uplink", "workers to server"), ("downlink", "server to workers")):
        count = summary["communication"][direction]
        wire, paper = map(shown_bytes, (count["wire_bytes"], count["float_equivalents_as_bytes"]))
        rows[words] = f"{wire} on the wire; the paper's accounting: {paper}"
    sent = sum(count["wire_bytes"] for count in summary["communication"].values())
    if sent and "uncompressed_bytes" in summary:
        rows["uncompressed"] = compared(sent, summary["uncompressed_bytes"])
    if "afl_versions" in summary:
        rows["versions of afl"] = str(summary["afl_versions"])
    rows["results"] = str(directory)
    return facts(rows, title=f"Run {summary['run_id']}: {with_names(summary['reason'], names_of(summary))}")


def some_of(workers: Sequence[object]) -> str:
    """At most eight of these, separated by commas."""
    return ", ".join(map(str, workers[:MOST_NAMED])) + (", ..." if len(workers) > MOST_NAMED else "")
