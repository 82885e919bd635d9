"""The status page as HTTP has it: what is said, to whom, how much of it, and how often it is made."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from afl._version import __version__
from afl.core.rounds.results import Evaluation
from afl.errors import ExitCode
from afl.wire.accounting import GRPC_PREFIX_BYTES
from afl_server.pages.live_updates import MOST_VIEWERS, Document
from afl_server.pages.progress import Rate
from afl_server.pages.recent_events import KEPT, LONGEST_MESSAGE
from support.fake_run import DIM
from support.served_run import Served, serving

LOG = logging.getLogger("afl.server")

FIRST_VIEW = (
    "/",
    *(f"/page/{name}" for name in ("page.css", "page.js", "charts.js", "link.js", "table.js", "words.js")),
    "/page/icon.svg",
    "/page/uplot/uPlot.min.css",
    "/page/uplot/uPlot.iife.min.js",
    *(f"/data/{name}.json" for name in ("state", "workers", "history", "events")),
)
"""What a browser asks for before anybody clicks."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as found:
        yield found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# What is said.


def test_without_a_script_the_page_says_where_to_look(served: Served) -> None:
    page = served.body("/").decode()
    said = page[page.index("<noscript>") : page.index("</noscript>")]
    assert "afl status" in said
    assert 'href="status"' in said


def test_the_state_is_the_run_s(served: Served) -> None:
    served.run.play(200)
    summary = served.run.records.ranking.evaluations[-1]
    state = served.json("/data/state.json")
    assert state["last"]["worst_accuracy"] == summary.worst_accuracy
    assert state["last"]["worst_worker"] == summary.worst_worker
    assert (state["round"], state["rounds"], state["phase"]) == (200, 2000, "running")
    assert served.json("/data/workers.json")["id"][0] == summary.worst_worker


def test_the_task_s_own_metrics_are_the_worst_worker_s(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.run.play(9)
        assert served.data.state()["own_metrics"] == "", "nothing is known yet"
        metrics = tuple({"loss": 1.0 + worker, "<mae>": worker / 8} for worker in range(3))
        counters = served.run.counters
        evaluation = Evaluation(9, 9, metrics, (10, 10, 10), ())
        served.run.records.ranking.see(evaluation)
        served.run.records.evaluation(evaluation, up=counters.uplink, down=counters.downlink)
        state = served.data.state()
        assert state["own_metrics"] == "<mae> 0.25 (mean 0.125)"
        assert state["last"]["worst_worker"] == 2
        assert "own_metrics" not in state["last"], "many would be sent every second"
        assert served.json("/status")["last"]["own_metrics"] == {
            "<mae>": {"worst_worker": 0.25, "mean": 0.125}
        }


def test_the_rate_is_there_from_the_second_round_on(served: Served) -> None:
    run, now = served.run, time.monotonic()

    def rate() -> float | None:
        return Rate().after(run.snapshot(), now)  # as for the first who looks

    assert rate() is None
    run.play(1)
    assert rate() is None, "one round has no duration yet"
    run.play(40)
    run.first_closed = (now - 2000, 1)
    assert rate() == 40 / 2000
    run.end(ExitCode.OK, "the run is complete")
    assert rate() is None


def test_the_rate_is_over_the_last_half_minute(served: Served) -> None:
    run, rate, now = served.run, Rate(), time.monotonic()
    for second in range(100):
        run.play(1 if second < 50 else 3, evaluate_every=1000)
        found = rate.after(run.snapshot(), now + second)
    assert found == 3
    run.late = {1}
    for second in range(100, 200):
        found = rate.after(run.snapshot(), now + second)
    assert found == 0, "it stands still"


def test_the_rate_of_long_rounds_is_not_zero_between_two(served: Served) -> None:
    run, rate, now = served.run, Rate(), time.monotonic()
    run.play(11)
    run.first_closed = (now - 500, 1)
    for second in range(45):
        found = rate.after(run.snapshot(), now + second)
        assert found == pytest.approx(10 / (500 + second))


def test_the_bytes_beside_what_whole_vectors_would_have_cost(served: Served) -> None:
    served.run.play(100)
    state = served.json("/data/state.json")
    counters = served.run.counters
    assert (state["up"], state["down"]) == (counters.uplink.total, counters.downlink.total)
    assert (
        state["uncompressed"] == counters.uncompressed_bytes == 100 * (3 + 3) * (4 * DIM + GRPC_PREFIX_BYTES)
    )
    curves = served.json("/data/history.json")
    assert curves["bytes"][-1] == state["up"] + state["down"]
    assert curves["uncompressed"][-1] == state["uncompressed"]
    assert curves["uncompressed"][0] == round(state["uncompressed"] * curves["round"][0] / 100)


def test_phases(served: Served) -> None:
    run = served.run
    run.unseen = {0, 2}

    def phase() -> tuple[str, str]:
        state = served.data.state()
        return state["phase"], state["headline"]

    assert phase()[0] == "waiting"
    assert phase()[1] == (
        "Waiting for workers: 1 of 3 are here. Start those that do not run, at their sites "
        "(afl-worker --id 0,2 ...); the others' logs say what is wrong."
    )
    run.unseen = set()
    run.play(10)
    assert phase() == ("running", "")
    run.late = {1}
    assert phase() == ("running", ""), "not yet"
    run.step_opened_at -= 100
    assert phase()[0] == "stalled"
    assert phase()[1].startswith("The round waits for worker 1, which is still computing; ")
    assert phase()[1].endswith("It closes when all have reported.")
    status = served.json("/status")
    assert (status["phase"], status["rounds_a_second"], status["seconds_left"]) == ("stalled", 0, None)
    run.gone = {0: 5.0, 2: 7.0}
    assert phase()[1].startswith("The round waits for 2 workers (0, 2), which are not connected; ")
    run.gone = {2: 7.0}
    assert phase()[1].endswith(
        "If it does not run, start it at its site (afl-worker --id 2 ...); if it does, its log says what is "
        "wrong."
    )


@pytest.mark.parametrize(
    ("code", "can_resume", "phase"),
    [
        (ExitCode.OK, False, "finished"),
        (ExitCode.INTERRUPTED, True, "stopped"),
        (ExitCode.DIVERGED, False, "aborted"),
    ],
)
def test_the_end(served: Served, code: ExitCode, can_resume: bool, phase: str) -> None:
    served.run.play(10)
    served.run.end(code, "so it is", can_resume=can_resume)
    state = served.json("/data/state.json")
    assert state["phase"] == phase
    assert "so it is" in state["headline"] or phase == "finished"
    if phase == "finished":
        folder = served.run.records.directory
        assert state["headline"] == (
            f"So it is. On the server's machine, its model is {folder}/model-final.safetensors. "
            f"Next: afl inspect {folder}"
        )
    assert state["seconds_left"] is None
    assert state["rounds_a_second"] is None


def test_one_worker(served: Served) -> None:
    served.run.play(50)
    served.run.gone = {1: 12.0}
    there, gone = served.json("/data/worker.json?id=0"), served.json("/data/worker.json?id=1")
    assert there["peer"].startswith("ipv4:")
    assert gone["peer"] is None
    assert there["version"] == __version__
    assert 61 <= there["ready_seconds"] < 90
    assert gone["version"] is gone["ready_seconds"] is None
    sessions = served.json("/status")["sessions"]
    assert sessions[0] == {
        "workers": [0],
        "peer": there["peer"],
        "version": __version__,
        "seconds": pytest.approx(61, abs=30),
    }
    assert [1] not in [session["workers"] for session in sessions]
    assert gone["missing_seconds"] == pytest.approx(12, abs=1e-3)
    assert there["round"] == list(range(1, 51))
    assert there["curves"][0]["weight_high"] == there["curves"][0]["weight_low"]
    assert len(there["curves"][0]["value"]) == len(there["evaluation_round"]) == 5
    assert there["metrics"]["accuracy"] == there["curves"][0]["value"][-1]


@pytest.mark.parametrize("asked", ["", "?id=", "?id=3", "?id=-1", "?id=x", "?id=1e400", "?other=1"])
def test_a_worker_that_is_none(served: Served, asked: str) -> None:
    answer: Any = served.ask("/data/worker.json" + asked)
    assert answer.status == 404
    assert answer.body == b"id is a worker's, from 0 to 2\n"


def test_events_are_few_and_short(served: Served) -> None:
    for number in range(KEPT + 20):
        LOG.warning("x%d%s", number, "y" * 2 * LONGEST_MESSAGE, extra={"event": "worker_failed"})
    LOG.info("round 1", extra={"event": "evaluation"})
    LOG.info("a line without a name")
    events = served.json("/data/events.json")
    assert [event["number"] for event in events] == list(range(KEPT + 20, 20, -1))
    assert {event["name"] for event in events} == {"worker_failed"}
    assert all(len(event["message"]) < LONGEST_MESSAGE + 10 for event in events)
    assert served.json("/data/state.json")["events"] == KEPT + 20


def test_what_is_shown_says_of_when_it_is(served: Served) -> None:
    data, run = served.data, served.run

    def stamps() -> set[str]:
        return {data.state()["stamp"], data.workers()["stamp"], data.history()["stamp"]}

    seen = []
    for change in (lambda: run.play(10), lambda: run.late.add(2), lambda: run.gone.update({1: 1.0})):
        seen.append(stamps())
        assert len(seen[-1]) == 1
        change()
    run.end(ExitCode.OK, "the run is complete")
    assert len(set.union(*seen, stamps())) == 4


# To whom, and how.


@pytest.mark.parametrize("path", [*FIRST_VIEW, "/metrics", "/status", "/healthz", "/nowhere"])
def test_every_answer_is_locked_down(served: Served, path: str) -> None:
    answer = served.ask(path)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_files_are_asked_for_again_but_not_sent_again(served: Served) -> None:
    first = served.ask("/page/page.js")
    assert first.headers["Content-Type"] == "text/javascript; charset=utf-8"
    second: Any = served.ask("/page/page.js", **{"If-None-Match": first.headers["ETag"]})
    assert (second.status, second.body) == (304, b"")


def test_who_can_is_sent_less(served: Served) -> None:
    served.run.play(50)
    plain = served.body("/page/page.css")
    answer: Any = served.ask("/page/page.css", **{"Accept-Encoding": "gzip, br"})
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.headers["Vary"] == "Accept-Encoding"
    assert len(answer.body) < len(plain) / 2
    assert gzip.decompress(answer.body) == plain


@pytest.mark.parametrize(
    "path",
    ["/", "/status", "/metrics", "/page/page.js", "/healthz", "/readyz", "/data/worker.json?id=1", "/no"],
)
def test_head_is_get_without_a_body(served: Served, path: str) -> None:
    head: Any = served.ask(path, "HEAD")
    got: Any = served.ask(path)
    assert (head.status, head.body) == (got.status, b"")
    varies = {"Date", "Content-Length"} if path in {"/metrics", "/status"} else {"Date"}
    first, second = ({*answer.getheaders()} for answer in (head, got))
    assert {name for name, _ in first ^ second} <= varies
    assert int(head.headers["Content-Length"]) > 0


def test_head_opens_no_stream(served: Served) -> None:
    answer: Any = served.ask("/data/stream", "HEAD")
    assert (answer.status, answer.body) == (200, b"")
    assert len(served.server.viewers) == 0


def test_a_scraper_has_the_format_that_it_asks_for(served: Served) -> None:
    answer: Any = served.ask("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.body.endswith(b"# EOF\n")
    assert served.ask("/metrics").headers["Content-Type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    "path", ["/page/", "/page/index.html", "/page/../http.py", "/page/uplot/ORIGIN.json"]
)
def test_nothing_else_is_served(served: Served, path: str) -> None:
    assert served.ask(path).status == 404


def test_nothing_is_changed_by_asking(served: Served) -> None:
    refused = served.ask("/data/state.json", "POST")
    assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD")


# How much.


@pytest.mark.parametrize("workers", [3, 1000, 10_000])
def test_the_first_view_is_small(tmp_path: Path, workers: int) -> None:
    with serving(tmp_path, workers=workers) as served:
        served.run.play(10 if workers > 1000 else 600)
        sizes = {path: len(served.body(path)) for path in FIRST_VIEW}
        assert sum(sizes.values()) < 300_000, sizes
        assert sizes["/data/state.json"] < 4096, "it is sent every second"
        table = served.json("/data/workers.json")
        worst = served.run.records.ranking.evaluations[-1].worst_worker
        assert table["id"][0] == worst
        assert table["value"] == sorted(table["value"])


def test_what_many_ask_for_is_made_once() -> None:
    made = []
    document = Document(lambda: made.append(1) or len(made), max_age=3600)  # type: ignore[func-returns-value]
    asking = [threading.Thread(target=document.current) for _ in range(20)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(made) == 1
    assert document.current() == b"1"
    assert document.current(fresh=True) == b"2"


# Streams.


def test_a_stream_begins_with_the_state_and_ends_with_the_last(served: Served) -> None:
    served.run.play(10)
    link = served.stream()
    with link, link.makefile("rb") as lines:
        head = list(iter(lines.readline, b"\r\n"))
        assert head[0].split()[1] == b"200"
        assert b"Content-Type: text/event-stream; charset=utf-8\r\n" in head
        assert b"X-Accel-Buffering: no\r\n" in head
        assert lines.readline() == b"event: state\n"
        assert json.loads(lines.readline().removeprefix(b"data: "))["round"] == 10
        served.run.play(10)
        served.run.end(ExitCode.OK, "the run is complete")
        served.server.viewers.close()
        rest = lines.read().decode().strip().split("\n\n")
    name, _, data = rest[-1].partition("\ndata: ")
    assert name == "event: end"
    ending = json.loads(data)
    assert ending["history"]["round"][-1] == 20
    assert ending["workers"]["evaluated"] == 20
    assert ending["workers"]["state"] == ["over"] * 3
    assert ending["events"] == served.json("/data/events.json")
    last = json.loads(rest[-2].partition("data: ")[2])
    assert (last["round"], last["phase"]) == (20, "finished")


def test_more_pages_than_streams_are_told_to_ask(served: Served) -> None:
    with contextlib.ExitStack() as open_links:
        for _ in range(MOST_VIEWERS):
            link = open_links.enter_context(served.stream())
            assert link.recv(12) == b"HTTP/1.0 200"
        answer: Any = served.ask("/data/stream")
        assert answer.status == 503
        assert b"/data/state.json" in answer.body
        assert served.json("/data/state.json")["phase"] == "running"
        assert served.body("/healthz") == b"ok\n"


def test_a_page_that_is_closed_makes_room(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.server.viewers.period = 0.01
    link = served.stream()
    assert link.recv(12) == b"HTTP/1.0 200"
    assert len(served.server.viewers) == 1
    link.close()
    wait_until(lambda: not len(served.server.viewers))


def test_a_reader_that_is_too_slow_is_hung_up_on(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("afl.daemon.http.IDLE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(served.server.viewers, "state", Document(lambda: "x" * (1 << 20)))
    monkeypatch.setattr(served.server.viewers, "period", 0.0)
    link = served.stream()
    with link:
        wait_until(lambda: len(served.server.viewers) == 1)
        wait_until(lambda: not len(served.server.viewers))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_end_does_not_wait_for_a_reader_that_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afl_server.pages.live_updates.FAREWELL_S", 0.2)
    monkeypatch.setattr("afl.daemon.http.IDLE_TIMEOUT_S", 3.0)
    stop = threading.Event()
    with serving(tmp_path) as served:
        state = Document(lambda: "" if stop.wait(30) else "late")
        monkeypatch.setattr(served.server.viewers, "state", state)
        link = served.stream()
        wait_until(lambda: len(served.server.viewers) == 1)
    stop.set()
    link.close()
