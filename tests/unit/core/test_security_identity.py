"""Which worker ids a certificate or a token allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afl.errors import ConfigError
from afl.security.identity import (
    WorkerIds,
    checked_token,
    ids_of_hash,
    ids_of_names,
    new_token,
    parse_tokens,
    token_hash,
)


@pytest.mark.parametrize(
    ("text", "shown", "inside", "outside"),
    [
        ("3", "3", [3], [2, 4]),
        ("0-9", "0-9", [0, 9], [10]),
        ("7,0-3", "0-3,7", [0, 3, 7], [4, 6, 8]),
        ("0-3,2-5,6", "0-6", [0, 6], [7]),
        ("0-2147483647", "0-2147483647", [2**31 - 1], [2**31]),
    ],
)
def test_ids_are_ranges(text: str, shown: str, inside: list[int], outside: list[int]) -> None:
    ids = WorkerIds.parse(text)
    assert str(ids) == shown
    assert all(worker in ids for worker in inside)
    assert not any(worker in ids for worker in outside)


@pytest.mark.parametrize(
    ("text", "named"),
    [("2", "worker 2"), ("0-1", "workers 0-1"), ("0,2", "workers 0,2"), ("0-3,7", "workers 0-3,7")],
)
def test_one_worker_is_not_named_as_several(text: str, named: str) -> None:
    assert WorkerIds.parse(text).named == named


@pytest.mark.parametrize(
    "text", ["", "a", "3-", "-3", "5-3", "1,,2", "1 2", "+1", "\u0663", "9" * 11, "1-2-3"]
)
def test_what_are_no_ids(text: str) -> None:
    with pytest.raises(ValueError, match="worker ids are written 3, 0-9 or 0-3,7"):
        WorkerIds.parse(text)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=8))
def test_ranges_hold_what_their_parts_hold(parts: list[tuple[int, int]]) -> None:
    ids = WorkerIds().united((first, first + more) for first, more in parts)
    members = {worker for first, more in parts for worker in range(first, first + more + 1)}
    assert {worker for worker in range(80) if worker in ids} == members
    assert list(ids.ranges) == sorted(ids.ranges)


def test_a_certificate_s_names_of_other_kinds_do_not_count() -> None:
    names = [
        "silo.example.org",
        "afl:worker:3",
        "afl:worker:5-6",
        "afl:worker:x",
        "afl:server:9",
        "AFL:worker:8",
    ]
    assert str(ids_of_names(names)) == "3,5-6"
    assert not ids_of_names(["silo.example.org", "10.0.0.1"]).ranges


def test_a_token_allows_what_the_lines_with_its_hash_say() -> None:
    one, other = new_token(), new_token()
    entries = parse_tokens(
        f"# comment\n\n0-3 {token_hash(one)}\n  4 {token_hash(other)}  \r\n7 {token_hash(one)}\n", "tokens"
    )
    assert str(ids_of_hash(token_hash(one), entries)) == "0-3,7"
    assert str(ids_of_hash(token_hash(other), entries)) == "4"
    assert ids_of_hash(token_hash(new_token()), entries) is None
    assert ids_of_hash(token_hash(token_hash(one)), entries) is None, "a hash is no token"
    assert ids_of_hash("", entries) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0-3 SECRET", "tokens:2: a line is IDS sha256:HASH"),
        ("0-3", "tokens:2: a line is IDS sha256:HASH"),
        ("SECRET", "tokens:2: a line is IDS sha256:HASH"),
        (f"3- {token_hash('SECRET')}", "tokens:2: worker ids are written 3, 0-9 or 0-3,7"),
        (f"0-3 {token_hash('SECRET').upper()}", "tokens:2: a line is IDS sha256:HASH"),
        (f"0 3 {token_hash('SECRET')}", "tokens:2: a line is IDS sha256:HASH"),
    ],
)
def test_a_wrong_line_is_named_and_not_shown(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tokens(f"# IDS HASH\n{line}\n", "tokens")
    assert str(caught.value).startswith(said)
    assert "SECRET" not in str(caught.value)


def test_a_file_without_a_hash_is_no_file_of_tokens() -> None:
    with pytest.raises(ConfigError, match="tokens holds no token's hash, so no worker could join"):
        parse_tokens("# nothing\n\n", "tokens")


def test_tokens() -> None:
    token = new_token()
    assert len(token) == 43
    assert checked_token(f"{token}\n", "a file") == token
    for wrong in ("", "short", f"{token} {token}", f"{token}\n{token}", "ä" * 40):
        with pytest.raises(
            ConfigError, match=r"^a file holds no token: one has at least 32 characters"
        ) as caught:
            checked_token(wrong, "a file")
        assert token not in str(caught.value)
