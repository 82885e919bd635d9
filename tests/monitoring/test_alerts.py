"""The alert rules: well-formed, tested, and about metrics that there are."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from afl_server.pages.metrics import FAMILIES
from afl_tools.monitoring import rules
from afl_worker.pages import FAMILIES as WORKER_FAMILIES
from support import expressions
from support.prometheus import needs_promtool

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("alerts.test.yaml")
ALERTS = {rule["alert"]: rule for rule in rules.alerts()}

REQUIRED = {
    "AflRoundStalled",
    "AflStraggler",
    "AflWorkerDiverging",
    "AflResidualGrowing",
    "AflPeerRefused",
    "AflDiskNearlyFull",
    "AflCertificateExpires",
    "AflWorkerMissing",
    "AflServerRestarting",
    "AflNonFinite",
    "AflDigestMismatch",
    "AflSiteDown",
    "AflSiteStalled",
    "AflSiteReconnecting",
    "AflSitePolicyEnds",
    "AflSiteDiskNearlyFull",
}
"""What an operator must hear of."""


def promtool(*arguments: str) -> None:
    ran = subprocess.run(["promtool", *arguments], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    return found


@functools.cache
def served() -> dict[str, set[str]]:
    """The labels of each metric of the server and of workers, as Prometheus has them."""
    own = {"job", "instance"}
    labels = {name: own | set(family.labels) for name, family in {**FAMILIES, **WORKER_FAMILIES}.items()}
    return {**labels, "up": own, "process_start_time_seconds": own}


def about(name: str) -> str:
    """The metric by which an alert knows whom it is about: the run, or a site's worker process."""
    return "afl_site_process_info" if name.startswith("AflSite") else "afl_run_info"


@needs_promtool
def test_promtool_takes_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", str(rules.RULES))
    promtool("check", "config", str(rules.FOLDER / "prometheus.yml"))


@needs_promtool
@pytest.mark.timeout(400)  # ten seconds of a core; ten times that beside other work
@pytest.mark.long
def test_every_alert_fires_where_it_should_and_is_silent_where_it_should_be() -> None:
    promtool("test", "rules", str(CASES))


def expanded(values: str) -> list[str]:
    """promtool's notation, a sample a minute: `3+2x4` is 3 and four more, each 2 above the last."""
    found: list[str] = []
    for word in values.split():
        parts = re.fullmatch(r"(_|-?[\d.e]+)([+-][\d.e]+)?(?:x(\d+))?", word)
        assert parts, word
        first, step, more = parts[1], float(parts[2] or 0), int(parts[3] or 0)
        if first == "_":
            found += ["_"] * max(more, 1)
        else:
            found += [f"{float(first) + index * step:.12g}" for index in range(more + 1)]
    return found


def minutes(duration: str) -> int:
    return int(duration[:-1]) * {"m": 1, "h": 60}[duration[-1]]


FIRES = {
    check["alertname"]: (case, check)
    for case in reversed(cases())
    for check in case["alert_rule_test"]
    if check["exp_alerts"]
}
"""Of each alert the first case in which it fires, and when."""

RUN = '{job="afl",instance="s:9090"}'


def vanishing(name: str) -> dict[str, Any]:
    """The case in which it fires; then discovery loses the target for 20 minutes, and finds it well."""
    case, check = FIRES[name]
    at = minutes(check["eval_time"])
    told = {each["series"]: expanded(each["values"]) for each in case["input_series"]}
    is_site = about(name) == "afl_site_process_info"
    prefix = "afl_site_" if is_site else "afl_"
    own = {f"up{RUN}": ["1"], f"{prefix}round{RUN}": ["1"], f"{prefix}rounds{RUN}": ["100"]}
    info = next(series for series in told if series.startswith(about(name)))
    healthy = {**{key: value[0] for key, value in own.items()}, info: "1"}
    series = []
    for key, values in {**{key: value * (at + 1) for key, value in own.items()}, **told}.items():
        back = f" _x20 {healthy[key]}x80" if key in healthy else ""
        series.append({"series": key, "values": " ".join(values[: at + 1]) + " stale" + back})
    gone = "AflSiteDown" if is_site else "AflServerDown"
    who = "the process of workers 0-1" if is_site else "its server"
    down = {
        "exp_labels": {**labels_of(info), "severity": "critical"},
        "exp_annotations": {
            "summary": f"run r1: {who} at s:9090 does not answer, "
            "and was last seen before the run's last round",
            "runbook_url": ALERTS[gone]["annotations"]["runbook_url"],
        },
    }
    checks = [
        check,
        {"eval_time": f"{at + 18}m", "alertname": gone, "exp_alerts": [down]},
        {"eval_time": f"{at + 24}m", "alertname": gone, "exp_alerts": []},
    ]
    if (
        name != "AflServerRestarting"
    ):  # a server that restarts is gone most of the time, and it stays for the hour
        checks.append({"eval_time": f"{at + 18}m", "alertname": name, "exp_alerts": []})
    checks.append({"eval_time": f"{at + 90}m", "alertname": name, "exp_alerts": []})
    return {"name": name, "interval": "1m", "input_series": series, "alert_rule_test": checks}


def labels_of(series: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', series))


@pytest.mark.long
@needs_promtool
@pytest.mark.timeout(400)
def test_every_alert_clears_with_its_target_and_that_it_is_gone_fires_instead(tmp_path: Path) -> None:
    file = tmp_path / "vanishing.test.yaml"
    tests = [vanishing(name) for name in ALERTS if name not in {"AflServerDown", "AflSiteDown"}]
    assert len(tests) > 30
    whole = {"rule_files": [str(rules.RULES)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(whole, sort_keys=False), encoding="utf-8")
    promtool("test", "rules", str(file))


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_case_that_fires_and_one_that_does_not(name: str) -> None:
    fires = {True: 0, False: 0}
    for case in cases():
        told = {re.split(r"[{]", series["series"])[0] for series in case["input_series"]}
        for check in case["alert_rule_test"]:
            if check["alertname"] != name:
                continue
            looked_at = expressions.metrics(ALERTS[name]["expr"]) - {about(name)}
            assert looked_at & told, f"{case['name']}: no series of what the alert looks at"
            fires[bool(check["exp_alerts"])] += 1
    assert fires[True], name
    assert fires[False], name


def test_no_case_is_of_an_alert_that_there_is_not() -> None:
    assert {check["alertname"] for case in cases() for check in case["alert_rule_test"]} == ALERTS.keys()
    assert ALERTS.keys() >= REQUIRED


def test_the_cases_have_series_as_they_are_served() -> None:
    for case in cases():
        for series in case["input_series"]:
            name, _, rest = series["series"].partition("{")
            assert set(re.findall(r"(\w+)=", rest)) == served()[name], series


@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_an_alert_says_how_bad_it_is_of_whom_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"warning", "critical"}
    summary, expression = rule["annotations"]["summary"], rule["expr"]
    assert "{{ $labels.run_id }}" in summary
    assert about(rule["alert"]) in expression
    assert about(rule["alert"]) == "afl_run_info" or "{{ $labels.ids }}" in summary
    if any("worker" in served()[name] for name in expressions.metrics(expression)):
        # By its label, or by a query where one alert is about several.
        assert re.search(r"labels\.worker|Labels\.Worker|\.Labels\.worker", summary), rule["alert"]
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    headings = {heading.lower() for heading in re.findall(r"^### (\w+)$", text, re.MULTILINE)}
    assert anchor in headings, rule["alert"]


@pytest.mark.parametrize("rule", ALERTS.values(), ids=ALERTS)
def test_an_alert_is_about_metrics_and_labels_that_there_are(rule: dict[str, Any]) -> None:
    names = expressions.metrics(rule["expr"])
    assert names
    assert names <= served().keys(), names - served().keys()
    known = set().union(*(served()[name] for name in names))
    assert expressions.labels(rule["expr"]) <= known


def test_the_table_has_every_alert_and_no_template() -> None:
    table = rules.alerts_table()
    assert all(f"`{name}`" in table for name in ALERTS)
    assert "{{" not in table
    assert "run ID: worker N has no session with the server" in table
