"""What a run looks like: fixed states at several widths, with and without colours, terminals and Unicode."""

import io
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from afl.terminal import display, view
from afl.terminal.display import RunDisplay
from afl.terminal.view import RunView, describe_standing, run_line, summary_table

STANDING = {
    "round": 120,
    "worst_worker": 2,
    "worst_accuracy": 0.25,
    "mean_accuracy": 0.5,
    "max_loss": 2.0,
    "mean_loss": 1.0,
}

RISING = [round(0.25 + 0.01 * (column % 15), 3) for column in range(60)]

STATE: dict[str, Any] = {
    "run_id": "20260101-000000-abcdef",
    "state": "running",
    "task": "digits",
    "algorithm": "afl-com",
    "round": 120,
    "rounds": 300,
    "workers": 4,
    "workers_missing": [],
    "workers_missing_seconds": [],
    "reports_missing": [3],
    "open_step_seconds": 0.1,
    "seconds_left": 75.0,
    "last": STANDING,
    "best": STANDING,
    "uplink_bytes": 1_000_000,
    "downlink_bytes": 1_000_000,
    "uncompressed_bytes": 20_000_000,
    "dual_history": {
        "rounds": list(range(61, 121)),
        "restarts": [0, 15, 30, 45],
        "workers": [0, 2],
        "weights": [[0.25] * 60, RISING],
    },
    "worst_history": {
        "measure": "worst accuracy",
        "rounds": list(range(2, 122, 2)),
        "values": [None, *(point / 100 for point in range(59))],
        "last": 0.61,
    },
    "phase": "running",
    "rounds_a_second": 2.5,
}


NEWER = {"dual_history", "uncompressed_bytes", "worst_history", "phase", "rounds_a_second"}


def shown(state: dict[str, Any], width: int, encoding: str = "utf-8", **options: Any) -> str:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True) as file:
        console = Console(file=file, width=width, highlight=False, markup=False, emoji=False, **options)
        console.print(RunView(state, "a hint"))
        return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1", "cp437"])
def test_no_line_is_wider_than_the_terminal(width: int, encoding: str) -> None:
    lines = shown(STATE, width, encoding).splitlines()
    assert max(map(cell_len, lines)) <= width
    words = "".join(lines).replace(" ", "")
    for fact in ("20260101-000000-abcdef", "120of300", "1min15s", "accuracy0.250", "10.0times", "ahint"):
        assert fact in words


def test_the_plot_of_the_dual_weights() -> None:
    lines = shown(STATE, 100).splitlines()
    (heading,) = [index for index, line in enumerate(lines) if line.startswith("dual weights")]
    assert lines[heading].rstrip() == "dual weights from round 61 on: 0.250 to 0.390"
    flat, rising, marks = lines[heading + 1 : heading + 4]
    assert flat.split() == ["worker", "0", "▁" * 60, "0.250"]
    assert rising.startswith("worker 2")
    assert rising.rstrip().endswith("0.390")
    line = rising[10:70]
    assert line == line[:15] * 4
    assert set(line) == set("▁▂▃▄▅▆▇█")
    assert list(line[:15]) == sorted(line[:15])
    assert [index - 10 for index, char in enumerate(marks) if char == "^"] == [0, 15, 30, 45]


@pytest.mark.parametrize(("width", "columns"), [(40, 15), (80, 30), (100, 60)])
def test_the_curve_of_the_worst_accuracy_is_of_the_whole_run(width: int, columns: int) -> None:
    (line,) = [line for line in shown(STATE, width).splitlines() if line.startswith("worst accuracy")]
    assert line.rstrip().endswith("  0.610")
    curve = line.rstrip()[len("worst accuracy  ") : -len("  0.610")]
    assert len(curve) == columns
    assert curve[0] == " ", "not known"
    assert curve[1] == "▁"
    assert list(curve) == sorted(curve)
    assert curve[-1] == "█"


@pytest.mark.parametrize("width", [40, 80])
def test_a_view_of_ten_workers_fits_a_terminal_of_24_lines(width: int) -> None:
    weights = [[0.01 * (worker + 1)] * 60 for worker in range(10)]
    ten = {**STATE["dual_history"], "workers": list(range(10)), "weights": weights}
    options = {"force_terminal": True, "color_system": None, "height": 24}
    lines = shown({**STATE, "dual_history": ten}, width, **options).splitlines()
    assert len(lines) <= 24
    assert lines[-1].strip() == "a hint"
    names = [line[:9].strip() for line in lines if re.match(r"worker \d ", line)]
    assert names == sorted(names)
    assert names[-1] == "worker 9", "of too many, those with most weight"
    assert len(names) == {40: 4, 80: 10}[width]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "120 of 300, 2.5 rounds/s, 1 min 15 s left"),
        ({"rounds_a_second": 0.25}, "120 of 300, 15.0 rounds/min, 1 min 15 s left"),
        ({"rounds_a_second": 0.0, "seconds_left": None}, "120 of 300, no round closes"),
        ({"phase": "stalled"}, "afl-com on digits, waiting for a straggler"),
        (
            {"workers_missing": [2], "workers_missing_seconds": [12.0]},
            "3 of 4 ready; waiting for worker 2 (lost 12.0 s ago)",
        ),
        ({"open_step_seconds": 30.0}, "all 4 ready; waiting for worker 3"),
    ],
)
def test_how_it_gets_on(changes: dict[str, Any], said: str) -> None:
    assert said in shown({**STATE, **changes}, 100)


def test_equal_weights_are_a_flat_line() -> None:
    equal = {**STATE["dual_history"], "weights": [[0.25] * 60, [0.25] * 60]}
    assert shown({**STATE, "dual_history": equal}, 100).count("▁" * 60) == 2


def test_a_warning_of_a_site_names_it() -> None:
    warned = {**STATE, "warnings": ["worker 1 is served worst"], "sites": ["north", "south"]}
    assert "warning       worker 1 (south) is served worst" in shown(warned, 100)


def test_the_hint_has_a_line_of_its_own() -> None:
    *_, bar, hint = shown(STATE, 80).splitlines()
    assert len(bar.rstrip()) <= 60
    assert hint.strip() == "a hint"


def test_at_the_end_nobody_is_waited_for() -> None:
    gone = {"workers_missing": [0, 1], "workers_missing_seconds": [0.1, 0.1], "state": "over"}
    assert "waiting" not in shown({**STATE, **gone}, 80)
    assert run_line({**STATE, **gone}) == run_line(STATE)


def test_a_narrow_plot_has_the_newest_rounds() -> None:
    lines = shown(STATE, 40).splitlines()
    (heading,) = [line for line in lines if line.startswith("dual weights")]
    assert "from round 98 on" in heading
    (marks,) = [line for line in lines if line.startswith("restarts")]
    assert [index - 10 for index, char in enumerate(marks) if char == "^"] == [45 - 37]


def test_where_there_is_no_room_there_is_no_plot() -> None:
    assert "dual weights" not in shown(STATE, 25)


def test_without_unicode_the_bars_are_ascii() -> None:
    text = shown(STATE, 80, "ascii")
    assert text.isascii()
    assert re.search(r"worker 2 +[.:=+*#%@-]{60} +0\.390", text)


def test_no_colour_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    colourful = shown(STATE, 80, force_terminal=True, color_system="standard")
    assert "\x1b[3" in colourful
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown(STATE, 80, force_terminal=True))


def test_a_state_of_an_older_server_is_shown_as_far_as_it_goes() -> None:
    old = {key: value for key, value in STATE.items() if key not in NEWER}
    text = shown(old, 80)
    assert "1.00 MB up, 1.00 MB down\n" in re.sub(" +\n", "\n", text)
    assert "dual weights" not in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "round 120 of 300: worst worker 2, accuracy 0.250 (mean 0.500)"),
        ({"last": {**STANDING, "worst_accuracy": None}}, "round 120 of 300: worst worker 2, loss 2 (mean 1)"),
        (
            {"last": {**STANDING, "own_metrics": {"f1": {"worst_worker": 0.125, "mean": 0.375}}}},
            "round 120 of 300: worst worker 2, accuracy 0.250 (mean 0.500), f1 0.125 (mean 0.375)",
        ),
        ({"last": None}, "all 4 ready"),
        (
            {"workers_missing": [1, 3], "workers_missing_seconds": [None, 9.0]},
            "round 120 of 300: 2 of 4 ready; waiting for workers 1, 3",
        ),
    ],
)
def test_one_line(changes: dict[str, Any], line: str) -> None:
    assert run_line({**STATE, **changes}) == line


def test_without_a_terminal_there_is_a_line_where_something_changes() -> None:
    file = io.StringIO()
    with RunDisplay(Console(file=file, width=40), hint="never seen") as shows:
        for state in (STATE, {**STATE, "round": 121}, {**STATE, "last": {**STANDING, "round": 140}}):
            shows.show(state)
        shows.say("something happened")
    lines = file.getvalue().splitlines()
    assert [line[:9] for line in lines] == ["round 120", "round 140", "something"]


def test_a_log_of_a_long_run_gets_ever_fewer_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("afl.terminal.display.time.monotonic", lambda: now)
    file = io.StringIO()
    with RunDisplay(Console(file=file, width=40)) as shows:
        for step in range(36_000):
            now = 1000.0 + step
            shows.show({**STATE, "last": {**STANDING, "round": step}})
            if step == 30_001:
                missing = {"workers_missing": [1], "workers_missing_seconds": [0.0]}
                shows.show({**STATE, "last": {**STANDING, "round": step}, **missing})
    lines = file.getvalue().splitlines()
    rounds = [int(line.split()[1]) for line in lines if "waiting" not in line]
    assert rounds[:30] == list(range(30)), "a new run is followed closely"
    assert max(later - earlier for earlier, later in pairwise(rounds)) == 60, "it is never silent"
    assert len(lines) < 36_000 / 60 + 150
    assert lines.index("round 120 of 300: 3 of 4 ready; waiting for worker 1") > 500, "said at once"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    with RunDisplay(Console(file=file, force_terminal=True, width=80)) as shows:
        shows.show(STATE)
    assert file.getvalue() == "round 120 of 300: worst worker 2, accuracy 0.250 (mean 0.500)\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert not display.can_redraw()
    monkeypatch.setenv("TERM", "xterm-256color")
    assert display.can_redraw()


def test_a_terminal_is_redrawn() -> None:
    file = io.StringIO()
    with RunDisplay(Console(file=file, force_terminal=True, width=80), hint="a hint") as shows:
        shows.show(STATE)
        shows.show({**STATE, "round": 121})
    assert "120 of 300" in file.getvalue()
    assert "121 of 300" in file.getvalue()
    assert "\x1b[" in file.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_s_standard_error_is_put_above_the_view(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(errors, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", errors)
    file = io.StringIO()
    with RunDisplay(Console(file=file, force_terminal=True, width=80)) as shows:
        shows.show(STATE)
        sys.stderr.write("what is wrong\n")
    assert ("what is wrong" in file.getvalue()) is is_terminal
    assert ("what is wrong" in errors.getvalue()) is not is_terminal


def test_what_the_terminal_cannot_show_is_no_reason_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii", write_through=True) as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        view.make_console().print(RunView({**STATE, "task": "Größe:Übung"}))
        assert b"Gr??e:?bung" in raw.getvalue()


def test_an_evaluation_is_shown_with_the_task_s_own_metrics() -> None:
    own = {"mae": {"worst_worker": 1.5, "mean": 1.0}}
    assert describe_standing({**STANDING, "own_metrics": own}) == (
        "worker 2 at round 120: accuracy 0.250 (mean over workers 0.500, largest loss 2.000), "
        "mae 1.5 (mean 1)"
    )
    assert describe_standing({**STANDING, "worst_accuracy": None, "own_metrics": own}) == (
        "worker 2 at round 120: loss 2 (mean over workers 1), mae 1.5 (mean 1)"
    )
    phased = describe_standing({**STANDING, "rounds_since_restart": 10})
    assert phased.startswith("worker 2 at round 120, 10 after a restart of the weights: accuracy 0.250 ")
    assert "restart" not in describe_standing({**STANDING, "rounds_since_restart": 10}, at_length=False)


WAY = {"wire_bytes": 500, "float_equivalents_as_bytes": 400}

SUMMARY: dict[str, Any] = {
    "run_id": "r",
    "result": "ok",
    "reason": "the run is complete",
    "rounds": 3,
    "seconds": 1.0,
    "last": STANDING,
    "best": None,
    "communication": {"uplink": WAY, "downlink": WAY},
    "uncompressed_bytes": 10_000,
}


def summarized(summary: dict[str, Any]) -> str:
    file = io.StringIO()
    Console(file=file, width=240).print(summary_table(summary, Path("runs/x")))
    return file.getvalue()


def test_a_summary_says_what_compression_has_spared() -> None:
    assert "10.00 kB, 10.0 times as much" in summarized(SUMMARY)


def test_a_summary_warns_of_a_loss_that_has_grown() -> None:
    start = {"first_round": {"round": 1, "loss_max": 0.1}, "first": {**STANDING, "round": 15}}
    warned = summarized({**SUMMARY, **start})
    assert "warning" in warned
    assert "the largest loss has grown from 0.1 in round 1 to 2 after round 120; begin again with" in warned
    assert "warning" not in summarized({**SUMMARY, **start, "result": "diverged"}), "its reason says so"
    assert "warning" not in summarized({**SUMMARY, **start, "first_round": {"round": 1, "loss_max": 2.0}})
    assert "warning" not in summarized(SUMMARY), "of an older version's it is not known"
