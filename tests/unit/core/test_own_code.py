"""What is said of an exception that a task's own code raised."""

from __future__ import annotations

import errno
import subprocess
import traceback
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from afl.core.randomness import SharedRandomness
from afl.core.rounds import policy
from afl.errors import (
    AflError,
    ConfigError,
    DataError,
    ExitCode,
    HelperKilledError,
    InternalError,
    OutOfMemoryError,
    SignalError,
    TaskCodeError,
    placed,
)
from afl.tasks import TaskContext, digits
from afl.tasks.initialization import worker_data
from afl.user_code import as_failure, calling, described, shortage, worth_tracing
from afl_lab.check.findings import Report, StoppedError, blaming
from afl_worker.training import oracle

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


class _Panic(BaseException):
    """As of a library in Rust: no ``Exception``."""


class _MuteError(Exception):
    def __str__(self) -> str:
        raise self


def test_whatever_a_task_raises_is_the_task_s() -> None:
    def panics() -> None:
        raise _Panic("index out of bounds")

    def mutters() -> None:
        raise _MuteError

    assert "raised _Panic: index out of bounds (" in str(raised_by(panics))
    assert "raised _MuteError: (its __str__ raises) (" in str(raised_by(mutters))
    report = Report("T")
    with pytest.raises(StoppedError), blaming(report, "T.data(0)"):
        panics()
    with pytest.raises(StoppedError), blaming(report, "T.data(0)"):
        mutters()
    assert [finding.code for finding in report.errors] == [ExitCode.CONFIG] * 2


@pytest.mark.parametrize("stop", [KeyboardInterrupt, GeneratorExit, SignalError])
def test_what_stops_a_process_is_nobody_s_fault(stop: type[BaseException]) -> None:
    with pytest.raises(stop), calling("T.data(0)"):
        raise stop


def test_the_end_of_an_iterator_within_a_generator_is_of_whom_it_ended() -> None:
    def steps() -> Iterator[int]:
        yield next(iter(()))

    error = as_failure_of(lambda: list(steps()))
    assert isinstance(error, TaskCodeError)
    assert str(error).startswith("the task's code raised StopIteration (")


def test_causes_in_a_circle_end() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert shortage(first) is None


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


def in_file(path: str, code: str) -> Any:
    """A function of no arguments whose lines are said to be in a file."""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(f"def fault():\n    {code}", path, "exec"), names)
    return names["fault"]


def as_failure_below(call: Any) -> AflError:
    """Of what a call raises, as if nothing of this file had called it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # each test says which
        call()
    trace = caught.tb
    while trace.tb_next is not None and trace.tb_frame.f_code.co_filename != call.__code__.co_filename:
        trace = trace.tb_next
    return as_failure(caught.value.with_traceback(trace))


def test_what_our_own_line_raises_is_not_blamed_on_the_task() -> None:
    error = as_failure_below(in_file(str(policy.__file__), "import os; os.no_such_call"))
    assert isinstance(error, InternalError)
    assert error.exit_code is ExitCode.INTERNAL
    assert str(error).startswith("afl itself failed: AttributeError: module 'os' has no attribute")


def test_what_torch_raises_below_our_call_of_a_task_is_the_task_s() -> None:
    unfit = in_file(str(oracle.__file__), "torch.zeros(1).sum().backward()")
    error = as_failure_below(unfit)
    assert isinstance(error, TaskCodeError)
    assert "does not require grad" in str(error)


NO_MEMORY: dict[str, BaseException] = {
    "python": MemoryError(),
    "numpy": MemoryError("Unable to allocate 8.00 EiB for an array with shape (1,)"),
    "torch": RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
    "cuda": torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "fork": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "thread": RuntimeError("can't start new thread"),
    "shared": RuntimeError("unable to mmap 64 bytes from file </torch_1>: Cannot allocate memory (12)"),
}


@pytest.mark.parametrize("of", NO_MEMORY)
def test_lack_of_memory_is_nobody_s_mistake(of: str) -> None:
    """In the task's code and in ours, in a step and in a call of the task alone."""

    def raises() -> None:
        raise NO_MEMORY[of]

    for error in (as_failure_of(raises), raised_by(raises)):
        assert isinstance(error, OutOfMemoryError)
        assert error.exit_code is ExitCode.SHORTAGE
        assert str(error).startswith("out of memory")
        assert worth_tracing(error) is None


def test_real_lack_of_memory_is_told_apart() -> None:
    for call in (lambda: torch.empty(1 << 58), lambda: np.empty(1 << 58), lambda: bytes(1 << 62)):
        assert isinstance(as_failure_of(call), OutOfMemoryError)


@pytest.mark.parametrize(
    "raised",
    [
        RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed. "),
        RuntimeError("DataLoader worker (pid(s) 17, 18) exited unexpectedly"),
        BrokenProcessPool("A process in the process pool was terminated abruptly"),
        subprocess.CalledProcessError(-9, ["decode"]),
    ],
)
def test_a_helper_that_was_killed_is_nobody_s_mistake(raised: Exception) -> None:
    def raises() -> None:
        raise raised

    error = as_failure_of(raises)
    assert isinstance(error, HelperKilledError)
    assert error.exit_code is ExitCode.SHORTAGE


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("out of memory cells"),
        RuntimeError("DataLoader worker (pid 17) exited unexpectedly with exit code 1. Details are lost"),
        subprocess.CalledProcessError(1, ["decode"]),
        FileNotFoundError(errno.ENOENT, "No such file"),
        ImportError("libgomp.so.1: cannot allocate memory in static TLS block"),
    ],
)
def test_what_only_sounds_alike_is_the_task_s(raised: Exception) -> None:
    def raises() -> None:
        raise raised

    assert isinstance(as_failure_of(raises), TaskCodeError)


def test_a_program_that_ends_is_no_traceback() -> None:
    def ends() -> None:
        raise SystemExit(2)

    error = raised_by(ends)
    assert "T.data(0) ends the program (" in str(error)
    assert worth_tracing(error) is None


def test_the_place_comes_first_and_the_exit_code_stays() -> None:
    failure = placed("worker 3, round 5", ConfigError("wrong"))
    assert (str(failure), failure.exit_code) == ("worker 3, round 5: wrong", ExitCode.CONFIG)


def test_a_check_says_that_memory_ran_out_and_does_not_blame_the_task() -> None:
    report = Report("tests_tasks:Wide")
    with pytest.raises(StoppedError), blaming(report, "worker 0's first gradient"):
        torch.empty(1 << 56)
    (finding,) = report.findings
    assert finding.code is ExitCode.SHORTAGE
    assert finding.what.startswith("out of memory: RuntimeError: ")
