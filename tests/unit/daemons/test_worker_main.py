"""`afl-worker` and the signals that end it."""

from __future__ import annotations

import signal

import pytest

from afl_worker.main import _interrupt, _InterruptedError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_the_first_signal_any_other_ends_the_process_at_once(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(_InterruptedError, match=number.name):
            _interrupt(number, None)
        assert all(signal.getsignal(each) is signal.SIG_DFL for each in before)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
