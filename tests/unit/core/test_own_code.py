"""What is said of an exception that a task's own code raised."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from afl.core import policy
from afl.core.randomness import SharedRandomness
from afl.errors import AflError, ConfigError, DataError, ExitCode, TaskCodeError, placed
from afl.tasks import TaskContext, digits
from afl.tasks.initialization import worker_data
from afl.user_code import as_failure, calling, described, worth_tracing

HERE = Path(__file__).name


def raised_by(call: Any) -> AflError:
    with pytest.raises(AflError) as caught, calling("T.data(0)"):
        call()
    return caught.value


def test_what_was_raised_has_its_kind_its_text_and_the_user_s_line() -> None:
    error = raised_by(lambda: {}["age"])
    assert isinstance(error, TaskCodeError)
    assert str(error).startswith("T.data(0) raised KeyError: 'age' (")
    assert f"{HERE}:" in str(error)
    assert str(error).endswith(", in <lambda>)")
    assert error.exit_code is ExitCode.CONFIG


def test_the_line_is_the_user_s_where_a_library_raised() -> None:
    error = raised_by(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3))
    assert f"{HERE}:" in str(error)


def test_an_error_that_says_all_itself_passes() -> None:
    own = DataError("site-0.npz is missing")

    def raises() -> None:
        raise own

    assert raised_by(raises) is own
    assert worth_tracing(own) is None
    assert worth_tracing(placed("worker 0, round 1", own)) is None


def test_a_long_message_is_cut_to_one_line() -> None:
    text = described(ValueError("x" * 1000 + "\nmore"))
    assert text == f"ValueError: {'x' * 297}..."
    assert described(ValueError()) == "ValueError"


def test_the_traceback_begins_at_the_user_s_code() -> None:
    error = as_failure_of(lambda: 1 / 0)
    shown = worth_tracing(error)
    assert isinstance(shown, ZeroDivisionError)
    assert traceback.extract_tb(shown.__traceback__)[0].filename == __file__
    failure = placed("worker 1, round 2", error)
    failure.__cause__ = error
    assert worth_tracing(failure) is shown, "also where the place was added"


def test_the_traceback_of_a_task_of_ours_begins_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = eval(compile("lambda *_: 1 / 0", str(digits.__file__), "eval"))
    monkeypatch.setattr(digits.Digits, "data", failing)
    with pytest.raises(TaskCodeError) as caught:
        worker_data(digits.Digits(), 0, TaskContext(2, SharedRandomness.from_int(1)))
    shown = worth_tracing(caught.value)
    assert shown is not None
    assert Path(traceback.extract_tb(shown.__traceback__)[0].filename).name == "digits.py"


def as_failure_of(call: Any) -> AflError:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return as_failure(error)
    raise AssertionError


def test_of_a_fault_that_is_all_ours_everything_is_shown() -> None:
    try:
        exec(compile("def fault():\n    1 / 0\nfault()", str(policy.__file__), "exec"))
    except ZeroDivisionError as raised:
        trace = raised.__traceback__
        error = as_failure(raised.with_traceback(trace.tb_next if trace else None))
    shown = worth_tracing(error)
    assert shown is not None
    assert "fault" in [frame.name for frame in traceback.extract_tb(shown.__traceback__)]


def test_a_program_that_ends_is_no_traceback() -> None:
    def ends() -> None:
        raise SystemExit(2)

    error = raised_by(ends)
    assert "T.data(0) ends the program (" in str(error)
    assert worth_tracing(error) is None


def test_the_place_comes_first_and_the_exit_code_stays() -> None:
    failure = placed("worker 3, round 5", ConfigError("wrong"))
    assert (str(failure), failure.exit_code) == ("worker 3, round 5: wrong", ExitCode.CONFIG)
