"""Every query of the dashboard and every alert, asked of a real Prometheus that scrapes a real run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afl_tools.monitoring import rules
from support import Federation, expressions
from support.federation import free_port
from support.identities import Identities, tls
from support.prometheus import Prometheus, needs_prometheus

pytestmark = [needs_prometheus, pytest.mark.timeout(400)]

DASHBOARDS = Path(__file__).parents[2] / "deploy" / "grafana"
SCRAPES = 12
PATIENCE_S = 100.0


OF_OTHER_RUNS = {
    "afl_smooth_worst_loss",  # hidden losses
    "afl_page_certificate_expiry_seconds",  # the page with a certificate
    'afl_worker_value{better="lower",metric!="loss"}',  # a metric of the task's own that should fall
}
"""What this run does not have."""


class ReloadedFiles:
    """A run with all that there is to see, and the Prometheus that scrapes it."""

    def __init__(self, federation: Federation, prometheus: Prometheus, worker: str) -> None:
        self.prometheus = prometheus
        listening = federation.server.wait_for("listening")
        self.instances = {"afl": f"127.0.0.1:{listening['http_port']}", "afl-site": worker}
        self.run_id = listening["run_id"]

    def filled(self, expression: str, dashboard: str) -> str:
        """An expression of a dashboard, with what Grafana would put for its variables."""
        values = {
            "$job": "afl",
            "$instance": self.instances[dashboard],
            "$run": self.run_id,
            "$__rate_interval": "10s",
        }
        for name, value in values.items():
            expression = expression.replace(name, value)
        assert "$" not in expression, expression
        return expression

    def has_been_scraped(self) -> bool:
        """Often enough for rates, and since the first evaluation."""
        counted = self.prometheus.query("count_over_time(afl_downlink_residual_norm[5m])")
        return bool(counted) and float(counted[0]["value"][1]) >= SCRAPES


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReloadedFiles]:
    """Top-k up and integers down under mutual TLS: residuals at both ends, and certificates."""
    folder = tmp_path_factory.mktemp("watched")
    pki = Identities(folder / "pki")
    config: dict[str, Any] = {
        "workers": 2,
        "task": {"name": "digits", "batch_size": 16, "options": {"hidden": [8]}},
        "algorithm": {
            "name": "afl-com",
            "rounds": 1_000_000,
            "block": 20,
            "eta_w": 0.05,
            "eta_q": 0.01,
            "uplink": {"name": "top-k", "ratio": 0.1},
            "downlink": {"name": "rand-k", "ratio": 0.1, "bits": 4},
        },
        "evaluation": {"every": 10},
        "server": {"tls": tls(pki.server(), pki.ca)},
    }
    with Federation(config, folder / "federation") as federation:
        policy = folder / "policy.yaml"
        policy.write_text(f"max_rounds: {config['algorithm']['rounds']}\n", encoding="utf-8")
        worker = f"127.0.0.1:{free_port()}"
        options = ["--ca", str(pki.ca), "--http", worker, "--policy", str(policy)]
        federation.start("0-1", *options, *pki.worker("0-1").worker_options)
        federation.wait_until(lambda status: status["best"] is not None)
        target = f"127.0.0.1:{federation.server.wait_for('listening')['http_port']}"
        scraping = {
            "global": {
                "scrape_interval": "250ms",
                "scrape_timeout": "250ms",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(rules.RULES)],
            "scrape_configs": [{"job_name": "afl", "static_configs": [{"targets": [target, worker]}]}],
        }
        with Prometheus(scraping, folder / "prometheus") as prometheus:
            run = ReloadedFiles(federation, prometheus, worker)
            prometheus.wait_until(run.has_been_scraped, PATIENCE_S)
            yield run


def board_of(name: str) -> dict[str, Any]:
    board: dict[str, Any] = json.loads((DASHBOARDS / f"{name}.json").read_text(encoding="utf-8"))
    return board


def panels(name: str) -> list[dict[str, Any]]:
    return [inner for panel in board_of(name)["panels"] for inner in (panel, *panel.get("panels", ()))]


@pytest.mark.parametrize(("name", "least"), [("afl", 50), ("afl-site", 15)])
def test_every_query_of_a_dashboard_has_data(watched: ReloadedFiles, name: str, least: int) -> None:
    empty, asked = [], 0
    for panel in panels(name):
        for target in panel.get("targets", ()):
            if expressions.metrics(target["expr"]) <= OF_OTHER_RUNS:
                continue
            series = watched.prometheus.query_range(watched.filled(target["expr"], name), seconds=60, step=1)
            asked += 1
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            if not series or not all(wanted <= entry["metric"].keys() for entry in series):
                empty.append((panel["title"], target["expr"]))
    assert asked > least
    assert not empty, empty


@pytest.mark.parametrize("name", ["afl", "afl-site"])
def test_every_variable_of_a_dashboard_has_a_value(watched: ReloadedFiles, name: str) -> None:
    variables = board_of(name)["templating"]["list"]
    values = {"source": "prometheus"}
    for variable in variables:
        if variable["type"] == "query":
            selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]).groups()
            series = watched.prometheus.query(watched.filled(selector, name))
            values[variable["name"]] = {entry["metric"][label] for entry in series}
    assert values == {
        "source": "prometheus",
        "run": {watched.run_id},
        "job": {"afl"},
        "instance": {watched.instances[name]},
    }


def test_every_part_of_every_alert_has_data(watched: ReloadedFiles) -> None:
    """An alert as a whole has none while all is well."""
    for rule in rules.alerts():
        told = [rule["expr"], *re.findall(r'printf "(.*?%q.*?)" ', rule["annotations"]["summary"])]
        for expression in told:
            filled = expression.replace("job=%q", 'job="afl"').replace(
                "instance=%q", f'instance="{watched.instances["afl"]}"'
            )
            for selector in set(expressions.selectors(filled)) - OF_OTHER_RUNS:
                assert watched.prometheus.query(selector), f"{rule['alert']}: {selector} has no data"
            watched.prometheus.query(filled)


def test_the_alerts_are_evaluated_and_silent_while_all_is_well(watched: ReloadedFiles) -> None:
    def are_evaluated() -> bool:
        return all(rule["health"] != "unknown" for rule in watched.prometheus.rules())

    watched.prometheus.wait_until(are_evaluated, PATIENCE_S)
    found = {rule["name"]: (rule["health"], rule["alerts"]) for rule in watched.prometheus.rules()}
    # Whatever else this machine writes may fill its disk for a moment, which is not yet an alert that fires.
    health, disk = found["AflDiskFilling"]
    found["AflDiskFilling"] = health, [alert for alert in disk if alert["state"] == "firing"]
    assert found.keys() == {rule["alert"] for rule in rules.alerts()}
    assert {name: state for name, state in found.items() if state != ("ok", [])} == {}


def test_a_misspelt_metric_or_label_would_be_found(watched: ReloadedFiles) -> None:
    assert watched.prometheus.query("afl_round")
    assert not watched.prometheus.query("afl_rond")
    assert not watched.prometheus.query('afl_worker_incidents_total{incident="restarted"}')
