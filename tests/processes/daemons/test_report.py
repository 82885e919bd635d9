"""``afl report``: one file with the whole page in it, which says what the run's own files say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode
from afl.runs.sites import sites_of
from afl_cli.main import main
from support.browser import Visit, chromium, drawn, fact
from support.fake_run import FakeRun

pytestmark = pytest.mark.timeout(300)

EVIL = "</script><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def finished(folder: Path, **options: Any) -> Path:
    """The directory of a run that is over."""
    run = FakeRun(folder / "run", rounds=60, **options)
    run.play(60)
    run.records.summarize(ExitCode.OK, "the run is complete", 61.5, run.counters)
    run.close()
    event = {"number": 1, "time": 1.5e9, "level": "warning", "name": "worker_failed", "message": EVIL}
    (folder / "run" / "events.json").write_text(json.dumps([event, {"odd": 1}]))
    return folder / "run"


def test_it_shows_what_the_run_s_files_say_and_asks_for_nothing(browser: Any, tmp_path: Path) -> None:
    more = {
        "sites": ["north", "south", "Zürich"],
        "evaluation": {"rank_by": "auc"},
        "run": {"seed": 1, "description": EVIL},
    }
    run = finished(tmp_path, more=more)
    summary = json.loads((run / "summary.json").read_text())
    file = tmp_path / "report.html"
    assert main(["report", str(run), "--output", str(file)]) == 0
    visit = Visit(browser, file.as_uri(), viewport={"width": 1280, "height": 900})
    with visit as page:
        drawn(page)
        assert visit.asked == [file.as_uri()]
        last = summary["last"]
        worst = f"worker {last['worst_worker']} ({more['sites'][last['worst_worker']]})"
        assert fact(page, "worst_figure") == f"{last['worst_value']:.4g}"
        assert fact(page, "worst_worker") == worst
        assert fact(page, "phase_words") == "finished"
        assert fact(page, "headline") == "When this report was made, the run is complete, after 60 rounds."
        assert page.locator("canvas").count() >= 4
        assert page.locator(".live:visible").count() == 0
        rows = [row.locator("td").all_inner_texts() for row in page.locator("#by-site tr").all()[1:]]
        table = sites_of(run).rows
        assert (
            [row[0] for row in rows]
            == [row.label for row in table]
            == ["0 (north)", "1 (south)", "2 (Zürich)"]
        )
        assert [row[1] for row in rows] == ["360"] * 3
        assert [float(row[5]) for row in rows] == pytest.approx([row.best for row in table], rel=1e-4)
        page.locator("#rows th button").first.click()
        assert page.locator("#worker-title").inner_text() == f"W{worst[1:]}"
        assert "Test accuracy" in page.locator("#worker-facts").inner_text()
        assert page.locator("#events li").count() == 1
        assert EVIL in page.locator("#events").inner_text()
        assert EVIL in page.locator(".saved pre").first.inner_text()
        assert page.title().startswith(f"{last['worst_value']:.4g} ")


def test_without_a_script_table_and_configuration_are_there(browser: Any, tmp_path: Path) -> None:
    run = finished(tmp_path)
    assert main(["report", str(run)]) == 0
    with Visit(browser, (run / "report.html").as_uri(), java_script_enabled=False) as page:
        assert page.locator("#by-site td").first.is_visible()
        assert "rand-k" in page.locator(".saved pre").first.inner_text()
        assert page.locator("noscript p").inner_text() == "The charts need JavaScript."


def test_nothing_of_it_comes_from_elsewhere_and_no_other_script_may_run(tmp_path: Path) -> None:
    run = finished(tmp_path, workers=200)
    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert len(text) < 2_000_000
    policy = re.search('Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert not re.search(r"<(link|script|img)[^>]* (src|href)=\"(?!data:)", text)
    assert text.count("<script") == 3
    assert re.search(
        r"Over whole blocks: worst accuracy 0\.\d{3} \(mean over workers 0\.\d{3}\), mean of ", text
    )


def test_a_run_that_goes_on_and_one_of_before_there_were_weights(browser: Any, tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", rounds=60)
    run.play(30)
    run.close()
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    old = [{key: value for key, value in line.items() if key != "dual_weights"} for line in lines]
    old[-1] |= {"warnings": ["worker 1 is served worst"], "sites": ["a", "b", "c"]}
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    assert main(["report", str(tmp_path / "run")]) == 0
    with Visit(browser, (tmp_path / "run" / "report.html").as_uri()) as page:
        drawn(page)
        said = fact(page, "headline").splitlines()
        assert said[0].startswith("When this report was made, the run has no summary")
        assert said[1] == "worker 1 (b) is served worst"
        assert fact(page, "round") == "30"
        assert fact(page, "worst_weight") == "\N{EM DASH}"


def test_hidden_losses_are_said_to_be(browser: Any, tmp_path: Path) -> None:
    run = finished(tmp_path)
    config = (run / "config.yaml").read_text().replace("losses: shown", "losses: hidden")
    config = config.replace("secure_aggregation: false", "secure_aggregation: true")
    (run / "config.yaml").write_text(config.replace("    ratio: 0.1\n", "    ratio: 0.1\n    bits: 16\n"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["event"] == "evaluation":
            for key in ("workers", "examples", "dual_weights"):
                del line[key]
            line |= {
                "worst_worker": None,
                "worst_accuracy": None,
                "max_loss": None,
                "smooth_worst_loss": 0.75,
            }
            line["means"] = {"loss": line["mean_loss"], "accuracy": line["mean_accuracy"]}
        else:
            line |= {"loss_max": None, "loss_max_worker": None, "dual_weight_max": None}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(run)]) == 0
    with Visit(browser, (run / "report.html").as_uri()) as page:
        drawn(page)
        assert fact(page, "worst_figure") == "0.75"
        assert page.locator("#by-site tr").count() == 2
        assert "mean of all" in page.locator("#by-site").inner_text()
        assert "hidden" in page.locator(".saved p").first.inner_text()


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none")]) == ExitCode.CONFIG
    assert "no such directory" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == ExitCode.CONFIG
    assert "holds no run (no config.yaml)" in capsys.readouterr().err
    run = finished(tmp_path)
    assert main(["report", str(run), "--output", str(tmp_path / "a" / "b.html")]) == ExitCode.STORAGE
    assert "cannot be written" in capsys.readouterr().err
