"""Which compressors a configuration may name, and which options each takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from afl.config.problems import InvalidConfigError, Problem, nearest, shown
from afl.theory import theory_ratio

ENTRY_POINTS: Final = "afl.compressors"
"""The entry point group through which compressors are found, the built-in ones and users' own."""

IDENTITY: Final = "identity"
THEORY: Final = "theory"


@dataclass(frozen=True)
class CompressorOption:
    """An option of a built-in compressor.

    Attributes:
        description: what it means.
        accepts: what it may be.
        default: its default, as shown to a person; None if it is required.
        unit: its unit.
        compressors: the built-in compressors that take it.
    """

    description: str
    accepts: str
    default: str | None
    unit: str
    compressors: tuple[str, ...]


OPTIONS: Final[Mapping[str, CompressorOption]] = {
    "ratio": CompressorOption(
        description="share of the values that is sent: k = max(1, round(ratio * d)) of d;"
        " theory is the least that keeps AFL-BR's rate, from the number of workers",
        accepts="a number above 0 and at most 1, or theory",
        default=None,
        unit="k/d",
        compressors=("top-k", "rand-k", "projection", "dct-projection"),
    ),
}
"""Every option of the built-in compressors."""

_BUILT_IN: Final = (IDENTITY, "scaled-sign", *OPTIONS["ratio"].compressors)
_CONTRACTIVE: Final = frozenset({"top-k"})
"""Of those with a ratio, the ones that are not additive and idempotent."""


def installed_compressors() -> tuple[str, ...]:
    """The names of all installed compressors, ascending."""
    return tuple(sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINTS))}))


def check_compressor(name: str, options: Mapping[str, object]) -> None:
    """Check that a compressor is installed and takes these options.

    The options of a compressor that is not built in are its own to check.

    Args:
        name: the compressor's name.
        options: its options, without the name.

    Raises:
        InvalidConfigError: naming each option, missing or wrong; the keys start at the compressor's section.
    """
    problems = compressor_problems(name, options)
    if problems:
        raise InvalidConfigError(f"compressor {name}", problems)


def compressor_problems(name: str, options: Mapping[str, object]) -> list[Problem]:
    """What :func:`check_compressor` would raise, as a list."""
    installed = installed_compressors()
    if name not in installed:
        accepted = f"an installed compressor: {', '.join(installed)}"
        return [Problem(("name",), shown(name), accepted, nearest=nearest(name, installed))]
    if name not in _BUILT_IN:
        return []
    taken = [option for option, about in OPTIONS.items() if name in about.compressors]
    problems = [
        Problem(
            (option,),
            f"{shown(value)}, under a key that {name} does not take",
            f"only {_listed(['name', *taken])} with {name}",
            nearest=nearest(option, [*taken, "name"]),
        )
        for option, value in options.items()
        if option not in taken
    ]
    for option in taken:
        about = OPTIONS[option]
        if option not in options:
            problems.append(Problem((option,), f"nothing, and {name} needs it", about.accepts))
        elif not _is_ratio(options[option]):
            problems.append(Problem((option,), shown(options[option]), about.accepts))
    return problems


def resolved_options(
    name: str, options: Mapping[str, object], *, workers: int, is_exact_down: bool
) -> Mapping[str, object]:
    """A compressor's options with ``ratio: theory`` as a number.

    For an additive and idempotent compressor it is Theorem 3's where the downlink has no residual; where it
    has one, Theorem 2 holds for the pair, and its ratio is for this compressor as for top-k. The options of a
    compressor that is not built in are its own.

    Args:
        name: the compressor's name.
        options: its options, checked.
        workers: m.
        is_exact_down: whether the downlink sends whole vectors or has the uplink's own compressor, with which
            an additive and idempotent one loses nothing.
    """
    if name not in _BUILT_IN or options.get("ratio") != THEORY:
        return options
    is_sharper = is_exact_down and name not in _CONTRACTIVE
    return {**options, "ratio": theory_ratio("additive-idempotent" if is_sharper else "contractive", workers)}


def _is_ratio(value: object) -> bool:
    if value == THEORY:
        return True
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value <= 1
        and math.isfinite(value)
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
