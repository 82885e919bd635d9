"""The reader itself: what is wrong on a page is found, and said where."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from documentation_exempt import in_passing
from documentation_plans import NOT_RUN, REPLACEMENTS
from documentation_reader import NotRun, Page, PageError, Reader, Replacement, compare

from afl.errors import ConfigError
from support.pages import Block, blocks_of, command_lines

SERVE = (
    "afl-server --config deploy/server.yaml --set task.name=synthetic --set workers=2"
    " --set algorithm.rounds=2 --set run.directory=run"
)


def read(folder: Path, text: str, replacements: Sequence[Replacement] = (), **plan: Any) -> Reader:
    """Follow a page with this text."""
    reader = Reader(Page("page.md", **plan), folder, replacements=replacements, not_run=NOT_RUN)
    reader.follow(blocks_of("page.md", text))
    return reader


def fenced(language: str, text: str) -> str:
    return f"# Title\n\n```{language}\n{text}\n```\n"


WRONG = {
    "no language": ("", "x", "no language is followed by nobody"),
    "an unknown language": ("rust", "x", "rust is followed by nobody"),
    "an unknown program": ("sh", "frobnicate --now", "neither run nor in NOT_RUN"),
    "an unknown option": ("sh", "afl status --wach", "unrecognized arguments: --wach"),
    "an unknown option of a daemon": ("sh", "afl-worker --id 3 --sever x:1", "--sever"),
    "an unknown option of a module": ("sh", "python -m afl_reproduction.bounds --wrokers 4", "--wrokers"),
    "a command that fails": ("sh", "afl inspect nothing-here", "ended with 2"),
    "a command that fails in a pipe": ("sh", "cat nothing-here | cat", "ended with 1"),
    "a server to ask that is not there": ("sh", "afl status", "no server runs"),
    "a worker without a server": ("sh", "afl-worker --id 0 --server 127.0.0.1:50051", "no server runs"),
    "an extra that is not there": ("sh", "pip install 'afl[frills]'", "no extra frills"),
    "a unit that is not there": ("sh", "systemctl restart afl-serve", "no unit afl-serve"),
    "a file that is not there": ("sh", "cp deploy/systemd/afl.service /etc", "no deploy/systemd/afl.service"),
    "a tunnel to nowhere": ("sh", "ssh -N -L 9090:127.0.0.1:9999 user@host", "not a port of the server"),
    "a target that is not there": (
        "sh",
        "docker build -f deploy/containers/Containerfile --target both -t x .",
        "no target both",
    ),
    "an image that nobody builds": ("sh", "docker run ghcr.io/OWNER/afl-worker:9 --id 3", "is built nowhere"),
    "a variable that no unit reads": ("ini", "AFL_SERVE=x", "no unit reads AFL_SERVE=x"),
    "no instruction": ("dockerfile", "FORM x", "FORM is no instruction"),
    "a file that no page shows": ("dockerfile", "COPY their_task.py /", "their_task.py is not here"),
    "fields that the event has not": (
        "json",
        '{"time": "", "level": "info", "logger": "afl", "message": "", "event": "joined", "x": 1}',
        "joined: fields",
    ),
    "an event that is none": (
        "json",
        '{"time": "", "level": "info", "logger": "afl", "message": "", "event": "joint"}',
        "'joint' is no event",
    ),
    "a log line without its fields": ("json", '{"event": "run_complete"}', "no log line has only"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_found_and_said_where(case: str, tmp_path: Path) -> None:
    language, text, said = WRONG[case]
    with pytest.raises(PageError) as found:
        read(tmp_path, fenced(language, text))
    assert said in str(found.value)
    assert found.value.__notes__ == ["at page.md:3, in the section 'Title'"]


def test_a_configuration_is_loaded_whole_or_in_part(tmp_path: Path) -> None:
    read(tmp_path / "right", fenced("yaml", "server:\n  heartbeat: 3s"))
    with pytest.raises(ConfigError, match="heartbeet"):
        read(tmp_path / "wrong", fenced("yaml", "server:\n  heartbeet: 3s"))
    with pytest.raises(ConfigError, match="rounds"):
        read(
            tmp_path / "whole",
            fenced("yaml", "workers: 2\ntask: {name: x}\nalgorithm: {name: afl-br, eta_w: 1}"),
        )


def test_files_are_written_and_code_is_run_in_order(tmp_path: Path) -> None:
    page = fenced("python", "# own.py\nSIX = 6")
    page += fenced("python", "from own import SIX\nprint(SIX * factor, 'is the answer')")
    page += fenced("text", "42 is the answer")
    read(tmp_path / "right", page, names=lambda reader: {"factor": 7})
    with pytest.raises(PageError, match="was not printed"):
        read(
            tmp_path / "wrong",
            page.replace("the answer\n", "an answer\n"),
            names=lambda reader: {"factor": 7},
        )
    with pytest.raises(PageError, match="was not printed"):
        read(tmp_path / "other", page.replace("42", "41"), names=lambda reader: {"factor": 7})
    with pytest.raises(NameError, match="factor"):
        read(tmp_path / "nameless", page)
    with pytest.raises(SyntaxError):
        read(tmp_path / "broken", fenced("python", "# broken.py\nSIX = = 6"))


def test_an_entry_point_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    points = '[project.entry-points."afl.compressors"]\nwindow = "own:{}"'
    written = fenced("python", "# own.py\nclass Window: ...")
    read(tmp_path / "right", written + fenced("toml", points.format("Window")))
    with pytest.raises(AttributeError, match="Door"):
        read(tmp_path / "wrong", written + fenced("toml", points.format("Door")))


def test_a_run_has_a_server_to_ask_until_its_last_worker_is_there(tmp_path: Path) -> None:
    worker = "afl-worker --id {} --server 127.0.0.1:50051"
    lines = [SERVE, worker.format(0), worker.format(1), "afl status", "afl inspect run"]
    reader = read(tmp_path, fenced("sh", "\n".join(lines)))
    assert "waiting for workers" in reader.said["afl status"]
    assert re.search(r"waiting for (0, )?1\b", reader.said["afl status"])
    assert "the run is complete" in reader.said["afl inspect run"]


def test_a_run_that_lacks_workers_or_has_a_bad_one_is_found(tmp_path: Path) -> None:
    with pytest.raises(PageError, match=r"nobody starts its workers \[0, 1\]"):
        read(tmp_path / "nobody", fenced("sh", SERVE))
    bad = "afl-worker --id 0-1 --server 127.0.0.1:50051 --task digits"
    with pytest.raises(AssertionError, match="ended with 3, not 0"):
        read(tmp_path / "bad", fenced("sh", f"{SERVE}\n{bad}"))


def test_a_reader_goes_back_where_the_plan_says_so(tmp_path: Path) -> None:
    page = fenced("sh", "mkdir below\ncd below") + fenced("python", "# here.py\n").replace("Title", "Back")
    reader = read(tmp_path, page, back_at=("Back",))
    assert (reader.top / "here.py").is_file()


def test_a_block_that_is_only_looked_at_is_looked_at(tmp_path: Path) -> None:
    seen: list[str] = []
    read(tmp_path, fenced("rust", "fn main() {}\n"), pictures={"fn main() {}": seen.append})
    assert seen == ["fn main() {}\n\n"]


def test_whole_lines_or_parts_of_them_are_replaced() -> None:
    text = "make demo\nmake demo ARGS=x\n"
    line = Replacement("page.md", "make demo", "make test", "why")
    part = Replacement("page.md", "demo", "test", "why", part=True)
    assert line.applied(text) == "make test\nmake demo ARGS=x\n"
    assert part.applied(text) == "make test\nmake test ARGS=x\n"
    assert not Replacement("page.md", "make", "x", "why").is_in(text)


def test_a_replacement_is_made_where_its_module_is(tmp_path: Path) -> None:
    here = Replacement("page.md", "frobnicate", "cat own.txt", "why", needs="torch")
    away = Replacement("page.md", "cat own.txt", "frobnicate", "why", lacks="torch")
    page = fenced("sh", "printf 'own' > own.txt\nfrobnicate")
    assert read(tmp_path, page, [here, away]).said["cat own.txt"] == "own"


def test_what_is_shown_was_printed_but_for_numbers() -> None:
    printed = "run  20260504-091230-0a1b2c\n\x1b[2Kround 7 of 300, 1.25 s left\nsent 12.5 kB ▁▂▃ ━━━\n ^  ^\n"
    compare(
        "run 20251128-154812-c21569\nround 203 of 300, 5 s left\nsent 1.96 MB ▇█ ━━━╸━\n^   ^  ^\n", printed
    )
    compare("sent 1 B ▇ ━\n", printed)
    for wrong in (
        "round 203 of many\n",
        "sent 1 B ▇ ━\nround 1 of 2, 3 s left\n",
        "run 1\n",
        "sent ten B ▇ ━\n",
    ):
        with pytest.raises(PageError):
            compare(wrong, printed)


def test_fences_are_found_as_they_nest() -> None:
    text = "# A\n\n- item\n\n  ```sh\n  ls\n    -l\n  ```\n\n"
    text += "## B\n````text\n```\n# no heading\n```\n````\n~~~yaml\na: 1\n~~~\n"
    assert blocks_of("page.md", text) == [
        Block("page.md", 5, "A", "sh", "ls\n  -l\n"),
        Block("page.md", 11, "B", "text", "```\n# no heading\n```\n"),
        Block("page.md", 16, "B", "yaml", "a: 1\n"),
    ]
    with pytest.raises(ValueError, match=r"page\.md:1: this block is never closed"):
        blocks_of("page.md", "```sh\nls\n")


def test_commands_go_on_over_a_backslash() -> None:
    assert command_lines("# first\nafl run \\\n    server.yaml\n\nafl status\n") == [
        "afl run server.yaml",
        "afl status",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "make tests",
        "pip install 'afl[frills]'",
        "python -m afl_lab.benches",
        "python use_it.py",
        "python -m afl_reproduction.bounds --wrokers 4",
        "afl stat",
        "afl status --wach",
        "afl-server --help-configuration",
    ],
)
def test_a_wrong_command_in_passing_is_found(line: str) -> None:
    with pytest.raises(PageError):
        in_passing(line)


def test_the_tables_have_each_entry_once() -> None:
    keys = [(each.page, each.old, each.version, each.needs, each.lacks) for each in REPLACEMENTS]
    assert len(set(keys)) == len(keys)
    exempt = [(each.page, each.words) for each in NOT_RUN]
    assert len(set(exempt)) == len(exempt)
    assert not [other for other in NOT_RUN for each in NOT_RUN if each is not other and _hides(each, other)]


def _hides(each: NotRun, other: NotRun) -> bool:
    """Whether the other one is never asked."""
    return each.page in {"", other.page} and other.words.startswith(each.words)
