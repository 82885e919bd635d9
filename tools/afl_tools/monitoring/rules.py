"""The alerts of deploy/prometheus, and the same as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "prometheus"
RULES = FOLDER / "alerts.yaml"


def groups() -> list[dict[str, Any]]:
    """The groups of the rule file."""
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return found


def alerts() -> list[dict[str, Any]]:
    """The alerts, in order."""
    return [rule for group in groups() for rule in group["rules"]]


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
