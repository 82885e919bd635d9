"""Durations and sizes: what is read, what is refused, what is written back."""

from __future__ import annotations

import re

import pytest

from afl.config import Duration, Size


@pytest.mark.parametrize(
    ("written", "seconds", "text"),
    [
        ("30s", 30.0, "30s"),
        ("5m", 300.0, "5m"),
        ("1h", 3600.0, "1h"),
        ("250ms", 0.25, "250ms"),
        ("0.1s", 0.1, "0.1s"),
        (" 1.5 h ", 5400.0, "1.5 h"),
        (".5s", 0.5, ".5s"),
        (90, 90.0, "90s"),
        (0.25, 0.25, "0.25s"),
        (100, 100.0, "100s"),
        (0, 0.0, "0s"),
    ],
)
def test_a_duration(written: object, seconds: float, text: str) -> None:
    duration = Duration(written)
    assert duration == seconds
    assert f"{duration}" == str(duration) == text
    assert Duration(str(duration)) == duration
    assert str(Duration(duration)) == text


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("30", "'30' needs a unit: ms, s, m or h"),
        ("30 sec", "the unit 'sec' is not ms, s, m or h"),
        ("1h30m", "'1h30m' is not a number followed by a unit"),
        ("-1s", "'-1s' is not a number followed by a unit"),
        ("", "'' is not a number followed by a unit"),
        ("1:30", "'1:30' is not a number followed by a unit"),
        ("٣s", "'٣s' is not a number followed by a unit"),
        ("9" * 30 + "s", f"'{'9' * 30}s' is not a number followed by a unit"),
        (-1, "out of range"),
        (float("nan"), "out of range"),
        (float("inf"), "out of range"),
        (10**400, "out of range"),
        (True, "neither text nor a number"),
        (None, "neither text nor a number"),
    ],
)
def test_no_duration(written: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Duration(written)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("written", "count", "text"),
    [
        ("1MiB", 1 << 20, "1MiB"),
        ("64 KiB", 65536, "64 KiB"),
        ("2GB", 2_000_000_000, "2GB"),
        ("1.5kb", 1500, "1.5kb"),
        ("1TiB", 1 << 40, "1TiB"),
        ("7B", 7, "7B"),
        (4096, 4096, "4096B"),
        (4096.0, 4096, "4096B"),
    ],
)
def test_a_size(written: object, count: int, text: str) -> None:
    size = Size(written)
    assert size == count
    assert f"{size}" == str(size) == text
    assert Size(str(size)) == size
    assert str(Size(size)) == text


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("1M", "the unit 'M' is not B, KiB, MiB, GiB, KB, MB or GB"),
        ("64", "'64' needs a unit: B, KiB, MiB, GiB, KB, MB or GB"),
        ("0.3KiB", "'0.3KiB' is not a whole number of bytes"),
        (0.5, "'0.5B' is not a whole number of bytes"),
        (-1, "out of range"),
        (False, "neither text nor a number"),
    ],
)
def test_no_size(written: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Size(written)
    assert str(caught.value) == message


def test_they_show_themselves_to_a_developer() -> None:
    assert repr(Duration("5m")) == "Duration('5m')"
    assert repr(Size("1MiB")) == "Size('1MiB')"
