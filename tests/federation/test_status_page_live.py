"""The status page of a real run in a real browser: its numbers, and what it says when things break."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afl.config.quantities import shown_bytes
from support import Federation
from support.browser import Visit, chromium, drawn, fact
from support.federation import free_port

CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "digits", "batch_size": 16, "options": {"hidden": [8]}},
    "algorithm": {
        "name": "afl-com",
        "rounds": 1_000_000,
        "eta_w": 0.05,
        "eta_q": 0.05,
        "block": 20,
        "uplink": {"name": "rand-k", "ratio": 0.1},
    },
    "evaluation": {"every": 10},
}


@pytest.mark.long
def test_numbers_updates_and_a_server_that_comes_back(tmp_path: Path) -> None:
    """A run that waits, goes, stands still, loses its server and gets it back, watched by one page."""
    port = free_port()
    # A server that comes back is found where it was.
    config = {**CONFIG, "server": {"http": f"127.0.0.1:{port}", "listen": f"127.0.0.1:{free_port()}"}}
    with chromium() as browser, Federation(config, tmp_path) as federation:
        federation.start("0-1")
        visit = Visit(browser, f"http://127.0.0.1:{port}/", expects_cuts=True)
        with visit as page:
            page.locator("body[data-phase=waiting]").wait_for()
            assert fact(page, "headline").startswith("Waiting for workers: ")

            last = federation.start("2")
            page.locator("body[data-phase=running]").wait_for()
            federation.wait_until(lambda status: status["last"] is not None and status["round"] > 60)
            drawn(page)
            page.locator("[data-fact=worst_worker]", has_text="worker ").wait_for()
            seen = int(fact(page, "round").replace("\N{NARROW NO-BREAK SPACE}", ""))
            federation.wait_until(lambda status: status["round"] > seen + 20)
            page.locator("[data-fact=round]").filter(has_not_text=fact(page, "round")).wait_for()

            # Without one of its workers the round waits: all numbers stand still.
            last.kill()
            page.locator("body[data-phase=stalled]").wait_for()
            assert "worker 2, which is not connected" in fact(page, "headline")
            status, metrics = federation.status(), federation.metrics()
            page.locator(f"body[data-drawn='{status['round']}']").wait_for()
            worst = status["last"]["worst_worker"]
            assert fact(page, "worst_worker") == f"worker {worst}"
            assert is_percent(fact(page, "worst_figure"), metrics["afl_worst_worker_accuracy"])
            assert is_percent(fact(page, "best_figure"), metrics["afl_best_worst_worker_accuracy"])
            assert fact(page, "ready") == "2 of 3"
            sent = sum(value for name, value in metrics.items() if name.startswith("afl_wire_bytes_total"))
            assert abs(_bytes(fact(page, "bytes")) - sent) <= 0.006 * sent, "heartbeats go on"
            for row in page.locator("#rows tr").all():
                cells = row.locator("th, td").all_inner_texts()
                name = f'{{worker="{cells[0]}"}}'
                assert is_percent(cells[1], metrics["afl_worker_accuracy" + name])
                assert abs(float(cells[2]) / metrics["afl_worker_loss" + name] - 1) < 1e-3
                assert abs(float(cells[3]) / metrics["afl_dual_weight" + name] - 1) < 1e-3

            # The server is gone, and comes back with the curves that it had.
            federation.server.kill()
            page.locator("body[data-link=lost]").wait_for()
            assert "connection lost since " in page.locator("#link").inner_text()
            assert fact(page, "worst_worker") == f"worker {worst}", "what was last known stays"
            federation.start_server()
            federation.server.wait_for("listening")
            page.locator("#retry").click()
            page.locator("body[data-link=live]").wait_for()
            page.locator("#events b").get_by_text("resumed", exact=True).wait_for()
            assert fact(page, "run_id") == status["run_id"]
            page.locator("#served .plot").focus()
            page.keyboard.press("Home")
            assert page.locator("#served .said").inner_text().startswith("round 10: ")

            federation.start("2")
            federation.wait_until(lambda now: now["round"] > status["round"] + 20)
            page.locator("body[data-phase=running]").wait_for()


def is_percent(shown: str, value: float) -> bool:
    """To a tenth of what the page is sent: five significant digits, so it may differ by 0.0005 %."""
    number, unit = shown.split()
    return unit == "%" and abs(float(number) - 100 * value) < 0.05 + 0.0005 + 1e-9


def _bytes(text: str) -> float:
    number, unit = text.split()
    factor = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert text == shown_bytes(float(number) * factor)
    return float(number) * factor
