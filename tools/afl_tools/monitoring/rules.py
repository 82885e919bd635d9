"""The alerts of deploy/prometheus: the same for the Prometheus operator, and as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "prometheus"
RULES = FOLDER / "alerts.yaml"
OPERATOR_RULES = FOLDER / "prometheus-rule.yaml"

_HEAD: Final = """\
# Made from alerts.yaml by `make docs`: change that file. A Prometheus of the operator takes it if the labels
# are those that its ruleSelector asks for.
"""


class _Dumper(yaml.SafeDumper):
    """Expressions of several lines stay as they are."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def groups() -> list[dict[str, Any]]:
    """The groups of the rule file."""
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return found


def alerts() -> list[dict[str, Any]]:
    """The alerts, in order."""
    return [rule for group in groups() for rule in group["rules"]]


def operator_rules() -> str:
    """The PrometheusRule with the same groups."""
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "afl",
            "labels": {"app.kubernetes.io/name": "afl", "app.kubernetes.io/component": "server"},
        },
        "spec": {"groups": groups()},
    }
    return _HEAD + yaml.dump(resource, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)


def alerts_table() -> str:
    """What fires, after how long, and where it says what to do."""
    rows = ["| alert, and what to do | severity | after | what it says |", "|---|---|---|---|"]
    for rule in alerts():
        notes = rule["annotations"]
        summary = " ".join(notes["summary"].split()).replace("|", "\\|")
        page, _, anchor = notes["runbook_url"].partition("#")
        link = f"[`{rule['alert']}`]({Path(page).name}#{anchor})"
        severity, after = rule["labels"]["severity"], rule.get("for", "at once")
        rows.append(f"| {link} | {severity} | {after} | {_readable(summary)} |")
    return "\n".join(rows) + "\n"


def _readable(summary: str) -> str:
    """A summary with its templates shortened to what they stand for."""
    shown, rest = "", summary
    while "{{" in rest:
        before, _, rest = rest.partition("{{")
        template, _, rest = rest.partition("}}")
        shown += before + _stands_for(template.strip())
    return shown + rest


def _stands_for(template: str) -> str:
    if template.startswith("$labels."):
        return template.removeprefix("$labels.").replace("run_id", "ID").replace("worker", "N").upper()
    if template.startswith(".Labels."):
        return "N"
    return "X" if "$value" in template else ""
