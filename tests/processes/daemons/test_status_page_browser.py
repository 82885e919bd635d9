"""The status page in a real browser: what can be seen, reached and read, whatever the state of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afl.config.quantities import shown_bytes
from afl.core.grid import IntegerRound
from afl.core.rounds.results import Evaluation
from afl.errors import ExitCode
from support.browser import Visit, chromium, drawn, fact
from support.served_run import Served, serving

pytestmark = pytest.mark.timeout(300)

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
DESKTOP = {"viewport": {"width": 1280, "height": 900}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A thousand workers, some hundred rounds in."""
    with serving(tmp_path_factory.mktemp("thousand"), workers=1000) as served:
        served.run.play(300)
        yield served


def address(served: Served, fragment: str = "") -> str:
    return f"http://127.0.0.1:{served.server.port}/{fragment}"


def test_a_thousand_workers_weigh_little_and_nothing_comes_from_elsewhere(
    browser: Any, thousand: Served
) -> None:
    visit = Visit(browser, address(thousand), **DESKTOP)
    sizes: list[float] = []
    link = visit.page.context.new_cdp_session(visit.page)
    link.send("Network.enable")
    link.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    with visit as page:
        drawn(page)
        assert page.locator("#found").inner_text() == "1000 of 1000 workers"
        assert page.locator("#rows tr").count() == 20
        assert page.locator("canvas").count() > 4
    assert 10_000 < sum(sizes) < 300_000
    assert len(visit.asked) >= 12


def test_the_table_is_worst_first_and_can_be_searched_sorted_and_paged(
    browser: Any, thousand: Served
) -> None:
    with Visit(browser, address(thousand), **DESKTOP) as page:
        drawn(page)

        def column(number: int) -> list[str]:
            return page.locator(f"#rows tr > :nth-child({number})").all_inner_texts()

        worst = thousand.run.records.ranking.evaluations[-1].worst_worker
        assert column(1)[0] == str(worst)
        accuracies = [float(text.removesuffix(" %")) for text in column(2)]
        assert accuracies == sorted(accuracies)
        page.locator("th[data-column=weight] button").click()
        assert page.locator("th[data-column=weight]").get_attribute("aria-sort") == "descending"
        weights = [float(text) for text in column(4)]
        assert weights == sorted(weights, reverse=True)
        page.locator("#after").click()
        assert page.locator("#page").inner_text() == "page 2 of 50"
        assert max(float(text) for text in column(4)) <= min(weights)
        page.locator("#find").fill("10-12")
        assert sorted(map(int, column(1))) == [10, 11, 12]
        page.locator("#find").fill("999")
        assert column(1) == ["999"]
        page.locator("#find").fill("nobody")
        assert page.locator("#found").inner_text() == "0 of 1000 workers"


def test_everything_is_reached_by_keyboard(browser: Any, thousand: Served) -> None:
    with Visit(browser, address(thousand), **DESKTOP) as page:
        drawn(page)
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "() => document.activeElement.id || document.activeElement.className"
                    " || document.activeElement.textContent.trim()"
                )
            )
            if reached[-1] == "after":
                break
        for wanted in ("skip", "plot", "Last blocks", "Whole run", "find", "only", "Accuracy", "after"):
            assert wanted in reached, f"{wanted} is not reached: {reached}"
        page.locator("#served .plot").focus()
        page.keyboard.press("Home")
        assert page.locator("#served .said").inner_text().startswith("round 10: ")
        page.keyboard.press("ArrowRight")
        assert page.locator("#served .said").inner_text().startswith("round 20: ")
        page.locator("#rows button").first.focus()
        page.keyboard.press("Enter")
        chosen = page.locator("#rows button").first.inner_text()
        page.get_by_role("heading", name=f"Worker {chosen}", exact=True).wait_for()
        assert page.evaluate("() => document.activeElement.id") == "worker"
        page.locator("#served .keys li", has_text=f"worker {chosen} ").wait_for()
        page.locator("#leave").press("Enter")
        assert page.locator("#worker").is_hidden()


@pytest.mark.parametrize(
    "look",
    [DESKTOP, {**PHONE, "color_scheme": "dark", "reduced_motion": "reduce"}],
    ids=["desktop", "phone, dark, still"],
)
def test_nothing_keeps_anybody_out(browser: Any, thousand: Served, look: dict[str, Any]) -> None:
    """By axe's rules, none of which is switched off."""
    axe = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    rules = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    with Visit(browser, address(thousand, "#worker=7"), **look, bypass_csp=True) as page:
        drawn(page)
        page.locator("#worker-facts dd").first.wait_for()
        page.evaluate(rules)
        found = page.evaluate("() => axe.run(document)")
        assert len(found["passes"]) > 20
        faults = {
            fault["id"]: [node["html"][:200] for node in fault["nodes"]]
            for fault in found["violations"]
            if fault["impact"] in {"serious", "critical"}
        }
        assert not faults
        wide = page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, "the page scrolls sideways"
        moves = page.evaluate("() => document.getAnimations().length")
        assert moves == 0 or look.get("reduced_motion") != "reduce"


def test_a_task_s_own_metrics_have_a_line_where_there_are_any(browser: Any, tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.run.play(10)
        with Visit(browser, address(served), **DESKTOP) as page:
            drawn(page)
            assert page.locator(".own").is_hidden()
        metrics = tuple({"loss": 1.0 + worker, "mae": worker / 8, "f1": 0.5} for worker in range(3))
        counters = served.run.counters
        evaluation = Evaluation(10, 10, metrics, (10, 10, 10), ())
        served.run.records.ranking.see(evaluation)
        served.run.records.evaluation(evaluation, up=counters.uplink, down=counters.downlink)
        with Visit(browser, address(served), **DESKTOP) as page:
            page.locator(".own", has_text="mae 0.25 (mean 0.125)").wait_for()
            assert fact(page, "own_metrics") == "f1 0.5 (mean 0.5)\nmae 0.25 (mean 0.125)"


def test_what_a_user_names_is_shown_as_it_is(browser: Any, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    with serving(tmp_path, name=hostile) as served:
        served.run.play(10)
        trace = f"worker 1 failed: {hostile}\nTraceback\n  a\n  b\n<script>alert(2)</script>"
        logging.getLogger("afl.server").error(trace, extra={"event": "worker_failed"})
        with Visit(browser, address(served)) as page:
            drawn(page)
            assert page.locator("h1").inner_text() == hostile
            page.locator("#events summary").click()
            assert "<script>alert(2)</script>" in page.locator("#events pre").inner_text()
            assert page.locator("img, #events script").count() == 0


@pytest.mark.parametrize("state", ["waiting", "stalled"])
def test_who_is_waited_for(browser: Any, tmp_path: Path, state: str) -> None:
    with serving(tmp_path) as served:
        if state == "waiting":
            served.run.unseen = {1, 2}
        else:
            served.run.play(30)
            served.run.gone = {2: 60.0}
            served.run.step_opened_at -= 60
        with Visit(browser, address(served)) as page:
            drawn(page)
            row = page.locator("#rows tr", has=page.get_by_role("button", name="Worker 2"))
            if state == "waiting":
                assert fact(page, "headline").startswith("Waiting for workers: 1 of 3 are here. Start")
                assert "has not joined yet" in row.inner_text()
            else:
                assert fact(page, "headline").startswith(
                    "The round waits for worker 2, which is not connected;"
                )
                assert "afl-worker --id 2 ..." in fact(page, "headline")
                assert "not connected" in row.inner_text()
            page.locator("#only").select_option("trouble")
            assert page.locator("#rows tr").count() == (2 if state == "waiting" else 1)


def test_without_a_script_the_page_says_where_to_look(browser: Any, thousand: Served) -> None:
    with Visit(browser, address(thousand), java_script_enabled=False) as page:
        said = page.locator("noscript p")
        assert said.is_visible()
        assert "afl status" in said.inner_text()
        assert not page.locator("#rows").is_visible()
        assert said.locator("a").evaluate("link => link.href") == address(thousand, "status")


def test_until_curves_and_table_have_come_there_are_none(browser: Any, thousand: Served) -> None:
    visit = Visit(browser, address(thousand), **DESKTOP)
    visit.page.route("**/data/history.json", lambda _: None)  # never answered
    with visit as page:
        page.locator("body[data-phase]").wait_for()
        assert page.locator("[data-fact=round]").is_visible()
        for place in ("#served", "#bytes", "#workers", "#events"):
            assert not page.locator(place).is_visible()


def test_the_essentials_in_words(browser: Any, tmp_path: Path) -> None:
    with serving(tmp_path / "first") as served:
        served.run.play(1)
        with Visit(browser, address(served)) as page:
            drawn(page)
            assert fact(page, "worst_worker") == "not evaluated yet"
            assert fact(page, "rate") == fact(page, "left") == fact(page, "worst_figure") == "\N{EM DASH}"
    with serving(tmp_path / "second") as served:
        served.run.integers = IntegerRound(0.625, 1.25, 0.9375, 0.004, -20, -12)
        served.run.play(1200)
        # A round takes 50 s.
        served.run.first_closed = (time.monotonic() - 50 * 1199, 1)
        state = served.data.state()
        with Visit(browser, address(served)) as page:
            drawn(page)
            last, best = state["last"], state["best"]
            worst, mean = last["worst_accuracy"], last["mean_accuracy"]
            expected = {
                "phase_words": "running",
                "round": "1\N{NARROW NO-BREAK SPACE}200",
                "rounds": "2\N{NARROW NO-BREAK SPACE}000",
                "percent": "60 %",
                "rate": "1.2 rounds/min",
                "ready": "3 of 3",
                "measure": "test accuracy",
                "worst_figure": f"{100 * worst:.1f} %",
                "worst_worker": f"worker {last['worst_worker']}",
                "worst_round": "after round 1\N{NARROW NO-BREAK SPACE}200",
                "mean_figure": f"{100 * mean:.1f} %",
                "gap": f"{100 * (mean - worst):.1f} points",
                "worst_weight": f"{3 * state['worst_weight']:.2f} \N{MULTIPLICATION SIGN} even",
                "bytes": shown_bytes(state["up"] + state["down"]),
                "bytes_up": shown_bytes(state["up"]),
                "uncompressed": shown_bytes(state["uncompressed"]),
                "share": f"{100 * (state['up'] + state['down']) / state['uncompressed']:.1f} % of it is sent",
                "paper": shown_bytes(state["paper"]),
                "integer_bits": "0.625 up, 1.25 down",
                "integer_shares": "93.8 % are 0, 0.4 % the largest there is",
                "afl_version": state["afl_version"],
            }
            grouped = f"{best['round']:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
            expected["best_where"] = f"worker {best['worst_worker']}, round {grouped}"
            assert {name: fact(page, name) for name in expected} == expected
            assert fact(page, "left").startswith("11 h ")
            assert page.title().startswith(f"{100 * worst:.1f} % \N{MIDDLE DOT} digits ")


def test_another_metric_and_the_sites_by_name(browser: Any, tmp_path: Path) -> None:
    more = {"evaluation": {"rank_by": "held_out_auc"}, "sites": ["north", "south", "Zürich"]}
    with serving(tmp_path, more=more) as served:
        served.run.play(20)
        last = served.data.state()["last"]
        worst = more["sites"][last["worst_worker"]]
        with Visit(browser, address(served)) as page:
            drawn(page)
            assert fact(page, "worst_figure") == f"{last['worst_value']:.4g}"
            assert fact(page, "measure") == "held-out auc"
            assert fact(page, "worst_worker") == f"worker {last['worst_worker']} ({worst})"
            assert page.locator("#served figcaption").inner_text().startswith("Held-out auc: worst")
            assert worst in page.locator("#served .plot").get_attribute("aria-label")
            assert page.locator("th[data-column=value]").inner_text() == "Held-out auc"
            assert (
                page.locator("#rows tr").first.locator("th").inner_text() == f"{last['worst_worker']} {worst}"
            )
            page.locator("#find").fill("zür")
            assert page.locator("#rows tr").count() == 1
            page.locator("#rows tr th button").click()
            page.locator("#worker-title", has_text="Zürich").wait_for()
            assert page.locator("#worker-title").inner_text() == "Worker 2 (Zürich)"


def test_where_the_loss_ranks_one_chart_and_one_column_are_enough(browser: Any, tmp_path: Path) -> None:
    with serving(tmp_path, more={"evaluation": {"rank_by": "loss"}}) as served:
        served.run.play(20)
        with Visit(browser, address(served)) as page:
            drawn(page)
            assert page.locator("#served figcaption").inner_text().startswith("Test loss: worst")
            assert not page.locator("#loss").is_visible()
            assert page.locator("thead th:visible").all_inner_texts() == [
                "Worker",
                "Loss",
                "Dual weight",
                "At first",
                "At best (round)",
                "Weight at first",
                "Test records",
                "Report, s",
                "State",
            ]
            assert fact(page, "measure") == "test loss"


@pytest.mark.long
def test_more_pages_than_streams_are_live_all_the_same(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afl_server.pages.live_updates.MOST_VIEWERS", 0)
    with serving(tmp_path) as served:
        served.run.play(10)
        with Visit(browser, address(served), expects_cuts=True) as page:
            page.locator("body[data-link=asking]").wait_for()
            assert fact(page, "round") == "10"
            served.run.play(10)
            page.locator("[data-fact=round]", has_text="20").wait_for()


def test_the_end_is_shown_when_the_server_has_gone(browser: Any, tmp_path: Path) -> None:
    with serving(tmp_path, rounds=20) as served:
        served.run.play(10)
        visit = Visit(browser, address(served), expects_cuts=True)
        with visit as page:
            drawn(page)
            served.run.play(10)
            served.run.end(ExitCode.OK, "the run is complete")
            served.server.close()
            page.locator("body[data-link=over]").wait_for()
            assert fact(page, "phase_words") == "finished"
            assert fact(page, "round") == "20"
            assert "the server has ended" in page.locator("#link").inner_text()
            # What the server can be asked for no more came with its last state.
            assert page.locator("body").get_attribute("data-drawn") == "20"
            assert page.locator("#rows tr td:last-child").all_inner_texts() == ["ended"] * 3
