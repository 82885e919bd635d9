"""What ``afl theory`` answers, in plain values: what ``--json`` prints and what is shown to people."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from afl.theory import (
    FEWEST_ROUNDS,
    FEWEST_WORKERS,
    Bound,
    CompressorClass,
    Constants,
    Theorem,
    block_length,
    bound,
    complexities,
    dual_step,
    is_covered,
    primal_step,
    rounds_needed,
    theory_ratio,
)
from afl_cli.theory.question import Question


def answer(question: Question) -> dict[str, Any]:
    """Everything that the theory says of what is known."""
    workers, rounds = question.workers, question.rounds
    smoothness, sigma_q = question.smoothness, question.sigma_q
    constants = _constants(question)
    compression = question.compression
    found = None
    if isinstance(constants, Constants) and compression is not None:
        found = bound(compression.theorem, constants, workers=workers, rounds=rounds, delta=compression.delta)
    missing = [] if isinstance(constants, Constants) else constants
    return {
        "workers": workers,
        "rounds": rounds,
        "dim": question.dim,
        "covered": is_covered(rounds, workers),
        "warnings": [*_warnings(question), *question.warnings],
        "step_sizes": {
            "block": block_length(rounds),
            "eta_w": None if smoothness is None else primal_step(rounds, smoothness),
            "eta_q": None if sigma_q is None else dual_step(rounds, workers, sigma_q),
        },
        "constants": {
            "smoothness": smoothness,
            "sigma_q": sigma_q,
            "gradient_bound": question.gradient_bound,
            "sigma_w": question.sigma_w,
            "delta_phi": question.delta_phi,
        },
        "ratios": [
            _ratio("top-k", "contractive", workers, question.dim),
            _ratio("rand-k", "additive-idempotent", workers, question.dim),
        ],
        "compression": None if compression is None else asdict(compression),
        "bound": _bound(found, constants, question) if found else None,
        "missing": missing + ([] if compression is not None else ["--dim"]),
        "epsilon": question.epsilon,
        "communication_unit": "entries" if question.dim is not None else "entries / d",
        "complexities": [asdict(row) for row in complexities(workers, question.dim or 1, question.epsilon)],
    }


def _warnings(question: Question) -> list[str]:
    few = [
        f"{name} {value} (at least {least})"
        for name, value, least in (
            ("m =", question.workers, FEWEST_WORKERS),
            ("T =", question.rounds, FEWEST_ROUNDS),
        )
        if value < least
    ]
    if not few:
        return []
    return [f"the theorems do not cover {' and '.join(few)}: the values below prove nothing"]


def _constants(question: Question) -> Constants | list[str]:
    """The constants, or the options that are missing."""
    values = {
        name: getattr(question, name)
        for name in ("smoothness", "gradient_bound", "sigma_w", "sigma_q", "delta_phi")
    }
    missing = [f"--{name.replace('_', '-')}" for name, value in values.items() if value is None]
    return missing or Constants(**values)


def _ratio(example: str, kind: CompressorClass, workers: int, dim: int | None) -> dict[str, Any]:
    ratio = theory_ratio(kind, workers)
    k = None if dim is None else max(1, round(ratio * dim))
    return {"example": example, "class": kind, "ratio": ratio, "k": k}


def _bound(found: Bound, constants: Constants | list[str], question: Question) -> dict[str, Any]:
    assert isinstance(constants, Constants)

    def first(epsilon: float) -> int:
        return rounds_needed(
            found.theorem, constants, workers=question.workers, epsilon=epsilon, delta=found.delta
        )

    return {
        "theorem": int(found.theorem),
        "subject": Theorem(found.theorem).subject,
        "delta": found.delta,
        "terms": [asdict(term) for term in found.terms],
        "value": found.value,
        "norm": found.norm,
        "trivial": found.trivial,
        "vacuous": found.is_vacuous,
        "rounds_until_informative": first(constants.gradient_bound),
        "rounds_for_epsilon": first(question.epsilon),
    }
