"""What the status page says, in words: one place for the document and for what keeps it up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from afl._version import __version__
from afl.config.quantities import shown_bytes, shown_seconds
from afl.runs.task_metrics import own_metrics_line

PHASES = {
    "waiting": "waiting for workers",
    "running": "running",
    "stalled": "waiting for a straggler",
    "finished": "finished",
    "stopped": "stopped, can go on",
    "aborted": "ended early",
}

OVER = frozenset({"finished", "stopped", "aborted"})

WORKER_STATES = {
    "ready": "ready",
    "late": "computing",
    "gone": "not connected",
    "new": "has not come yet",
    "over": "ended",
}

NONE = "\N{EM DASH}"
"""For what is not known."""


def facts(state: Mapping[str, Any]) -> dict[str, str]:
    """What is said of the run's state, by the name of its place in the page."""
    last, best = state["last"], state["best"]
    rate = state["rounds_a_second"]
    return {
        "title": f"{figure(last)} \N{MIDDLE DOT} {state['task']} \N{MIDDLE DOT} afl",
        "task": state["task"],
        "algorithm": state["algorithm"],
        "run_id": state["run_id"],
        "afl_version": __version__,
        "phase_words": PHASES[state["phase"]],
        "headline": state["headline"],
        "round": _grouped(state["round"]),
        "rounds": _grouped(state["rounds"]),
        "percent": f"{100 * state['round'] / state['rounds']:.0f} %",
        "left": NONE
        if state["phase"] in OVER or not state["seconds_left"]
        else shown_seconds(state["seconds_left"]),
        "spent": shown_seconds(state["seconds"]),
        "rate": NONE if rate is None else _rate(rate),
        "ready": f"{state['workers'] - state['missing_count']} of {state['workers']}",
        "measure": "" if not last else "test loss" if last["worst_accuracy"] is None else "test accuracy",
        "worst_figure": figure(last),
        "worst_worker": f"worker {last['worst_worker']}" if last else "not evaluated yet",
        "worst_round": f"after round {_grouped(last['round'])}" if last else "",
        "mean_figure": _mean(last),
        "gap": _gap(last),
        "largest_loss": f"{last['max_loss']:.4g}" if last else NONE,
        "own_metrics": own_metrics_line(last["own_metrics"]) if last else "",
        "worst_weight": _weight(state),
        "best_figure": figure(best),
        "best_where": f"worker {best['worst_worker']}, round {_grouped(best['round'])}" if best else "",
        **_traffic(state),
    }


def figure(standing: Mapping[str, Any] | None) -> str:
    """How the worst worker is served, in one number."""
    if standing is None:
        return NONE
    if standing["worst_accuracy"] is None:
        return f"{standing['max_loss']:.4g}"
    return f"{100 * standing['worst_accuracy']:.1f} %"


def named(workers: Sequence[int]) -> str:
    """Workers in a sentence."""
    if len(workers) == 1:
        return f"worker {workers[0]}"
    head = ", ".join(map(str, workers[:8]))
    return f"{len(workers)} workers ({head}{', ...' if len(workers) > 8 else ''})"


def _mean(standing: Mapping[str, Any] | None) -> str:
    if standing is None:
        return NONE
    if standing["mean_accuracy"] is None:
        return f"{standing['mean_loss']:.4g}"
    return f"{100 * standing['mean_accuracy']:.1f} %"


def _gap(standing: Mapping[str, Any] | None) -> str:
    if standing is None:
        return NONE
    if standing["worst_accuracy"] is None:
        return f"{standing['max_loss'] - standing['mean_loss']:.4g}"
    return f"{100 * (standing['mean_accuracy'] - standing['worst_accuracy']):.1f} points"


def _weight(state: Mapping[str, Any]) -> str:
    weight = state["worst_weight"]
    return NONE if weight is None else f"{weight * state['workers']:.2f} \N{MULTIPLICATION SIGN} even"


def _traffic(state: Mapping[str, Any]) -> dict[str, str]:
    traffic = state["traffic"]
    spent = traffic["up"] + traffic["down"]
    whole = traffic["uncompressed"] or 0
    return {
        "bytes": shown_bytes(spent),
        "bytes_up": shown_bytes(traffic["up"]),
        "bytes_down": shown_bytes(traffic["down"]),
        "uncompressed": shown_bytes(whole) if whole else NONE,
        "share": f"{100 * spent / whole:.1f} % of it is sent" if whole else "",
        "paper": shown_bytes(traffic["paper_up"] + traffic["paper_down"]),
    }


def _rate(rate: float) -> str:
    if rate == 0:
        return "no round closes"
    if rate < 1:
        return f"{60 * rate:.1f} rounds/min"
    return f"{rate:.1f} rounds/s"


def _grouped(number: int) -> str:
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
