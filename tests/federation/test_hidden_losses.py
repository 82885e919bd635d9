"""Hidden losses over real processes: all that is shown is right, and the run is that of a simulation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from afl.config import config_from_mapping
from afl.runs.export.export import export
from afl.runs.files import read_model
from afl_cli.inspect import described
from afl_lab.plots.points import hides_losses, points_of
from afl_lab.simulation.run import simulate
from support import Federation
from support.browser import Visit, chromium, drawn, fact
from support.federation import free_port

CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "digits", "batch_size": 16},
    "algorithm": {
        "name": "afl-com",
        "rounds": 300,
        "block": 9,
        "eta_w": 0.1,
        "eta_q": 0.5,
        "uplink": {"name": "rand-k", "ratio": 0.1, "bits": 16},
    },
    "evaluation": {"every": 25},
    "privacy": {"secure_aggregation": True, "losses": "hidden"},
    "server": {"checkpoint_every": 20},
}

OF_WORKERS = (
    "afl_dual_weight",
    "afl_train_loss",
    "afl_worker_loss",
    "afl_worker_accuracy",
    "afl_max_worker_loss",
)

TIMING = frozenset({"seconds"})


def no_nan(text: str) -> str:
    raise AssertionError(f"{text} in JSON")


def strict(text: str) -> Any:
    """JSON, as it is defined."""
    return json.loads(text, parse_constant=no_nan)


def lines(directory: Path) -> list[dict[str, Any]]:
    """What the metrics say of the model: without times and bytes, which depend on who came back."""
    found = map(strict, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        {key: value for key, value in line.items() if key not in TIMING and "link" not in key}
        for line in found
    ]


def shown(parts: list[Any]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A run whose server and a worker are killed in the middle, as it was left."""
    # A server that comes back is found where it was.
    config = {**CONFIG, "server": {**CONFIG["server"], "listen": f"127.0.0.1:{free_port()}"}}
    with Federation(config, tmp_path_factory.mktemp("hidden")) as federation:

        def start(worker: str) -> None:
            federation.start(worker, "--trust-server-keys", "--journal", str(federation.folder / worker))

        for worker in ("0", "1", "2"):
            start(worker)
        federation.wait_until(lambda status: status["round"] >= 30)
        watch(federation)
        federation.workers[1].kill()
        start("1")
        federation.wait_until(lambda status: status["round"] >= 60)
        federation.server.kill()
        federation.start_server()
        federation.finish()
    return federation


def watch(federation: Federation) -> None:
    """What a server says while it runs."""
    status = strict(federation.get("/status"))
    assert (status["losses"], status["dual_weights"]) == ("hidden", None)
    assert status["last"]["worst_worker"] is None
    assert status["last"]["smooth_worst_loss"] > status["last"]["mean_loss"]
    metrics = federation.metrics()
    assert metrics["afl_smooth_worst_loss"] > metrics["afl_mean_worker_loss"] > 0
    assert 0 < metrics["afl_mean_worker_accuracy"] <= 1
    assert metrics["afl_mean_train_loss"] > 0
    of_workers = [name for name in metrics if name.startswith((*OF_WORKERS, "afl_uplink_residual_norm"))]
    assert not of_workers
    assert metrics['afl_worker_ready{worker="2"}'] == 1
    table = strict(federation.get("/data/workers.json"))
    assert (table["id"], table["loss"], table["weight"]) == ([0, 1, 2], [None] * 3, [None] * 3)
    assert strict(federation.get("/data/state.json"))["hides_losses"]
    curves = strict(federation.get("/data/history.json"))
    assert curves["curves"] == []
    assert all(value is not None for value in curves["smooth_worst_loss"])
    assert strict(federation.get("/data/worker.json?id=1"))["examples"] is None


def test_it_is_the_simulation_to_the_bit_after_kills(federation: Federation, tmp_path: Path) -> None:
    simulate(config_from_mapping({**CONFIG, "run": {"seed": 7}}), tmp_path / "simulated")
    for name in ("final", "best", "random"):
        file = f"model-{name}.safetensors"
        assert (
            read_model(federation.directory / file).digest == read_model(tmp_path / "simulated" / file).digest
        )
    assert lines(federation.directory) == lines(tmp_path / "simulated")
    assert not federation.server.logged("digest_mismatch")


def test_no_record_has_anything_of_one_worker(federation: Federation) -> None:
    summary = strict((federation.directory / "summary.json").read_text(encoding="utf-8"))
    assert summary["last"]["max_loss"] is summary["last"]["worst_worker"] is None
    assert summary["best"]["smooth_worst_loss"] <= summary["last"]["smooth_worst_loss"]
    for line in federation.records("evaluation"):
        assert line.keys().isdisjoint({"workers", "examples"})
        assert line["max_loss"] is line["worst_worker"] is line["worst_accuracy"] is None
        assert line["means"] == {"loss": line["mean_loss"], "accuracy": line["mean_accuracy"]}
        assert line["smooth_worst_loss"] - line["mean_loss"] > math.log(3) / 50 - 1e-6
    for line in federation.records("round"):
        assert line["loss_max"] is line["loss_max_worker"] is line["dual_weight_max"] is None
        assert line["integers"]["of_update"]
    # Those of before the kill are in the first server's.
    said = [line for server in federation.servers for line in server.logged("evaluation")]
    assert {line["max_loss"] for line in said} == {None}
    assert all(line["message"].count("smooth worst loss") == 1 for line in said)


def test_the_tools_say_what_is_known(federation: Federation, tmp_path: Path) -> None:
    told = shown(described(federation.directory, 20))
    assert "all workers, last model" in told
    assert "smooth worst loss" in told
    assert "hidden: only means" in told
    assert "of the update's, " in told
    assert "None" not in told
    assert "nan" not in told.lower().split()
    metrics = federation.directory / "metrics.jsonl"
    assert hides_losses(metrics)
    assert [point.max_loss for point in points_of(metrics)] == [
        round(line["smooth_worst_loss"], 6) for line in federation.records("evaluation")
    ]
    card = export(federation.directory, "best", tmp_path / "exported")
    assert card["privacy"]["losses"] == "hidden"
    assert card["evaluation"]["workers"] == []
    page = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    assert "only sums over all workers of their masked gradients, losses and metrics, and no examples" in page
    assert "| loss | " in page
    strict((tmp_path / "exported" / "card.json").read_text(encoding="utf-8"))


def test_the_page_shows_all_workers_together(tmp_path: Path) -> None:
    config = {**CONFIG, "algorithm": {**CONFIG["algorithm"], "rounds": 1_000_000}}
    with chromium() as browser, Federation(config, tmp_path) as federation:
        federation.start("0-2", "--trust-server-keys")
        federation.wait_until(lambda status: status["last"] is not None and status["round"] > 60)
        port = federation.server.wait_for("listening")["http_port"]
        with Visit(browser, f"http://127.0.0.1:{port}/#worker=1", expects_cuts=True) as page:
            drawn(page)
            page.locator("[data-fact=measure]", has_text="smooth worst test loss").wait_for()
            assert float(fact(page, "worst_figure")) > 0
            assert " %, loss " in fact(page, "mean_figure")
            assert page.locator("#hidden").is_visible()
            assert page.locator("#loss, #served").evaluate_all("found => found.every((one) => !one.hidden)")
            for name in ("#weights", "#worst-link", "th[data-column=loss]", "#rows td.of-each"):
                assert not page.locator(name).first.is_visible(), name
            assert page.locator("#rows tr").first.inner_text().split()[0] == "0"
            assert "smooth worst" in page.locator("#loss .keys").inner_text()
            page.locator("#worker-facts", has_text="Last report after").wait_for()
            assert "Dual weight" not in page.locator("#worker-facts").inner_text()
            for text in ("NaN", "null", "undefined"):
                assert text not in page.locator("main").inner_text()
            page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
