"""What the pages promise has tests that are there, and their numbers are the code's."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from afl.core.disk_usage import SMALLEST_LOG_BYTES
from afl.core.secrecy.neighbours import COMPLETE_UP_TO, degree
from afl.daemon import http
from afl.runs.durable import LOCK_PATIENCE_S
from afl.security.certificates import EXPIRES_SOON_S
from afl.site.policy import DEFAULT_MIN_BATCH
from afl.v1 import federation_pb2 as pb
from afl_server.federation.membership import PROBE_TIMEOUT_S
from afl_server.federation.run import LOG_BURST, LOG_PERIOD_S
from afl_server.network import door, health, service
from afl_server.runner.run import DIRECTORY_CHECK_S
from support.pages import ROOT

PROMISES_NOTHING = {
    "guarantees.md": ("What you can rely on", "- **The same bits if a task's", "- **Equal bits across"),
    "security.md": (
        "Who can read what",
        # How things are used.
        "The server has a certificate and its key",
        "To replace the authority",
        "- **An SSH tunnel**",
        "- **A VPN**",
        # What cannot be relied on.
        "A worker that proves who it is may still report",
        "Checkpoints, logs and journals carry checksums",
        "- The server sees each worker's updates",
        "- Revocation lists",
        # What was measured.
        "With d = 10^6",
        "- It costs a pass of SHA-256",
        "What one worker does to the nine others",
    ),
}
"""How the paragraphs begin that no test can show."""


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def named_in(text: str) -> set[str]:
    return set(re.findall(r"`(test_\w+)`", text))


def notes(page: str) -> dict[str, str]:
    """The footnotes of a page, by their names."""
    found = re.findall(r"^\[\^([\w-]+)\]: (.*(?:\n    .*)*)", text_of(page), re.MULTILINE)
    assert len({name for name, _ in found}) == len(found), "a name for two notes"
    return dict(found)


def paragraphs(page: str) -> Iterator[str]:
    """Paragraphs, entries of lists, and tables with the paragraph before each, without headings and code."""
    prose = re.sub(r"^```[\s\S]*?^```$|^\[\^.*(?:\n    .*)*|^#.*", "", text_of(page), flags=re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=- )", prose)
    for block, after in zip(blocks, [*blocks[1:], ""], strict=True):
        if block.strip() and not block.startswith("| "):
            yield f"{block.strip()}\n{after}" if after.startswith("| ") else block.strip()


def rows(table: str) -> list[str]:
    return [line for line in table.splitlines() if line.startswith("| ")][1:]


def is_shown(text: str) -> bool:
    return "[^" in text or bool(named_in(text))


def without_tests(page: str) -> list[str]:
    """The promises of a page that name no test; a paragraph's are for the table after it, unless rows have
    their own."""
    bare = []
    for block in paragraphs(page):
        prose, _, table = block.partition("\n| ")
        entries = rows(f"| {table}")
        nothing = block.startswith((*PROMISES_NOTHING[page], "1. "))
        if not nothing and not is_shown(prose):
            bare.append(prose)
        if any(map(is_shown, entries)):
            bare += [row for row in entries if not is_shown(row)]
    return bare


@pytest.mark.parametrize("page", ["guarantees.md", "security.md", "privacy.md", "tests.md"])
def test_every_test_that_a_page_names_is_there(page: str) -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    defined = set(re.findall(r"^(?: {4})?(?:async )?def (test_\w+)", "\n".join(sources), re.MULTILINE))
    named = named_in(text_of(page))
    assert len(named) >= 12
    assert named <= defined, sorted(named - defined)


@pytest.mark.parametrize("page", ["guarantees.md", "security.md"])
def test_every_promise_names_its_tests(page: str) -> None:
    assert without_tests(page) == []
    used = set(re.findall(r"\[\^([\w-]+)\](?!:)", text_of(page)))
    assert used == notes(page).keys()
    for name, note in notes(page).items():
        assert named_in(note), name


def test_every_claim_of_the_threat_model_names_its_tests() -> None:
    claims = rows(text_of("privacy.md").partition("## Who can see what")[2].partition("\n## ")[0])
    assert len(claims) > 8
    assert not [claim for claim in claims if not named_in(claim)]


def test_the_numbers_of_the_pages_are_the_codes() -> None:
    guarantees, security, privacy = (
        " ".join(text_of(f"{name}.md").split()) for name in ("guarantees", "security", "privacy")
    )
    for said in (
        f"any frame comes within {PROBE_TIMEOUT_S:.0f} seconds",
        f"the second waits for {LOCK_PATIENCE_S:.0f} seconds",
        f"if the log reaches {SMALLEST_LOG_BYTES >> 20} MiB",
        f"fewer than {DEFAULT_MIN_BATCH} examples",
    ):
        assert said in guarantees, said
    for said in (
        f"at most {http.MOST_REQUEST_BYTES >> 10} KiB",
        f"at most {http.MOST_CONNECTIONS} connections",
        f"the first {LOG_BURST} are written, then one a second",
        f"at most {service.STREAMS_A_CONNECTION} streams",
        f"at most {health.MOST_CALLS} health calls",
    ):
        assert said in security, said
    in_words = (
        ("at most four for each of `server.max_sessions`", service.CONNECTIONS_A_SESSION, 4),
        ("its headers included, and ten seconds; an answer has a minute", http.ASKING_TIMEOUT_S, 10),
        ("its headers included, and ten seconds; an answer has a minute", http.ANSWERING_TIMEOUT_S, 60),
        ("then one a second", LOG_PERIOD_S, 1),
        ("`quarantine` again within two seconds", DIRECTORY_CHECK_S, 2),
        ("From two weeks before", EXPIRES_SOON_S, 14 * 24 * 3600),
        ("Once three quarters of all connections are open", door.CROWDED, 0.75),
        ("until half are left, twenty times a second", door.ROOMY, 0.5),
        ("until half are left, twenty times a second", door.LOOK_S, 1 / 20),
        ("twice as long", door.TIMES_PATIENCE, 2),
        ("at most every ten seconds (`strangers_cut`)", door.TOLD_EVERY_S, 10),
    )
    for said, number, right in in_words:
        assert said in security, said
        assert number == right, said
    assert f"up to {COMPLETE_UP_TO} workers everybody" in privacy
    assert f"k is {degree(65)} for 65 workers and {degree(10_000)} for 10,000" in privacy


def test_the_fields_that_the_page_on_privacy_names_are_the_protocols() -> None:
    for name in re.findall(r"`failure\.(\w+)`", text_of("privacy.md")):
        assert name in pb.Failure.DESCRIPTOR.fields_by_name


def test_no_wall_clock_time_is_on_the_wire() -> None:
    """Durations, positions and counts travel; nothing in the schema holds a time of day."""
    schema = (ROOT / "proto" / "afl" / "v1" / "federation.proto").read_text(encoding="utf-8")
    fields = re.findall(r"^\s+(?:repeated )?(\S+) (\w+) = \d+;", schema, re.MULTILINE)
    assert len(fields) > 60
    assert not [
        name for kind, name in fields if "Timestamp" in kind or re.search(r"time$|_at$|clock|date", name)
    ]
