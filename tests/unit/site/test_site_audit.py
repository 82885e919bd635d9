"""The log of what left a site: a chain that shows every change, and goes on after whatever ended it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afl.errors import DataError, ExitCode, StorageError
from afl.site import audit
from afl.site.audit import BEGINNING, NOTHING, AuditLog, Entry, Link, begin_after, read_log


class Seen:
    """A log, and what it tells."""

    def __init__(self, path: Path) -> None:
        self.entries: list[Entry] = []
        self.cuts: list[int] = []
        self.log = AuditLog(path, self.entries.append, self.cuts.append)

    def add(self, *values: Any) -> None:
        for value in values:
            self.log.add({"kind": "train", "value": value})

    @property
    def values(self) -> list[Any]:
        return [entry["value"] for entry in self.entries]


def read(path: Path, after: Link = NOTHING) -> list[Link]:
    return list(read_log(path, after))


def test_each_line_holds_the_hash_of_the_line_before(tmp_path: Path) -> None:
    path = tmp_path / "new" / "audit.jsonl"
    one = Seen(path)
    one.add(1, "\x1b]52;c;evil\x07 \u009b", None)
    lines = path.read_bytes().splitlines()
    hashes = [hashlib.sha256(line).hexdigest() for line in lines]
    assert [json.loads(line)["previous"] for line in lines] == [BEGINNING, *hashes[:-1]]
    assert b"".join(lines).isascii()
    assert min(b"".join(lines)) >= 32, "a server's words reach no terminal as they are"
    assert [link.entry["value"] for link in read(path)] == one.values
    assert one.log.last.hash == read(path)[-1].hash == hashes[-1]
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_entry_is_on_the_disk_before_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "audit.jsonl", []
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.append(path.read_text(encoding="utf-8")))
    one = Seen(path)
    one.add("it")
    assert '"value":"it"' in synced[-1]


def test_a_log_is_gone_on_with_and_two_share_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    one, two = Seen(path), Seen(path)
    one.add(1)
    two.add(2, 3)
    one.add(4)
    assert one.values == [1, 2, 3, 4]
    assert two.values == [1, 2, 3]
    three = Seen(path)
    assert three.values == [1, 2, 3, 4]
    three.add(5)
    assert [link.entry["value"] for link in read(path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("left", [1, 20, -1])
def test_a_line_that_was_cut_off_is_taken_away_and_that_is_said(tmp_path: Path, left: int) -> None:
    path = tmp_path / "audit.jsonl"
    Seen(path).add(1, 2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[:-1] if left < 0 else whole[: first + left])
    with pytest.raises(DataError, match=r"audit.jsonl:2: cut in the middle"):
        read(path)
    one = Seen(path)
    assert (one.values, one.cuts) == ([1], [len(whole) - first - 1 if left < 0 else left])
    one.add(3)
    assert [link.entry["value"] for link in read(path)] == [1, 3]


def test_what_another_left_half_written_is_taken_away_too(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    one = Seen(path)
    one.add(1)
    with path.open("ab") as file:
        file.write(b'{"previous":"')
    one.add(2)
    assert one.cuts == [13]
    assert [link.entry["value"] for link in read(path)] == [1, 2]


def changed(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b'"value":1', b'"value":9'), *lines[2:]]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (changed, 2),
        (lambda lines: [*lines[:2], *lines[3:]], 2),
        (lambda lines: [*lines[:2], lines[2], lines[2], *lines[3:]], 3),
        (lambda lines: [lines[1], lines[0], *lines[2:]], 1),
        (lambda lines: [*lines[:3], b"not JSON\n", *lines[3:]], 4),
        (lambda lines: [*lines[:3], b"[1]\n", *lines[3:]], 4),
        (lambda lines: [*lines[:3], b"x" * (audit.LONGEST_LINE + 1), *lines[3:]], 4),
    ],
)
def test_the_first_line_that_is_not_as_it_was_is_named(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], line: int
) -> None:
    path = tmp_path / "audit.jsonl"
    Seen(path).add(*range(5))
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(DataError, match=f"audit.jsonl:{line}: "):
        read(path)
    with pytest.raises(StorageError, match=f"audit.jsonl:{line}: .*name another log in the policy") as caught:
        Seen(path)
    assert caught.value.exit_code is ExitCode.STORAGE


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_byte_of_a_line_that_others_follow_can_be_changed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "audit.jsonl"
    Seen(path).add(
        *data.draw(
            st.lists(
                st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=5
            )
        )
    )
    whole = bytearray(path.read_bytes())
    end = whole.rindex(b"\n", 0, len(whole) - 1)
    at = data.draw(st.integers(whole.index(b'"time"'), end - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with pytest.raises(DataError):
        read(path)


def test_a_new_log_goes_on_from_one_that_was_put_aside(tmp_path: Path) -> None:
    old, new = tmp_path / "audit-1.jsonl", tmp_path / "audit.jsonl"
    Seen(old).add(1, 2)
    last = read(old)[-1]
    begin_after(last, new, old)
    assert new.stat().st_mode & 0o777 == 0o600
    one = Seen(new)
    one.add(3)
    first, second = read(new, last)
    assert (first.entry["previous"], first.entry["from"], second.entry["value"]) == (last.hash, old.name, 3)
    with pytest.raises(DataError, match=r"audit\.jsonl:1: this log does not go on from the one before it"):
        read(new, read(old)[0])
    with pytest.raises(FileExistsError):
        begin_after(last, new, old)


def test_a_log_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    one = Seen(path)
    one.add(1)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda *_: 5)
        with pytest.raises(StorageError, match="nothing is sent that is not in the audit log before"):
            one.add(2)
    one.add(3)
    assert [link.entry["value"] for link in read(path)] == [1, 3]
    path.rename(tmp_path / "aside")
    with pytest.raises(StorageError, match=r"cannot be used \(No such file"):
        one.add(4)
    (tmp_path / "aside").rename(path)
    path.write_bytes(b"")
    with pytest.raises(StorageError, match="another file than before, or shorter"):
        one.add(4)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be used"):
        Seen(tmp_path / "file" / "audit.jsonl")
