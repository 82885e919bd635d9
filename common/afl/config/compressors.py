"""Which compressors a configuration may name, and which options each takes; without importing PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Final

from afl.config.problems import InvalidConfigError, Problem, nearest, shown
from afl.core.messages import BIT_WIDTHS, BITS
from afl.theory import theory_ratio

IDENTITY: Final = "identity"
THEORY: Final = "theory"

OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "top-k": ("ratio",),
    "rand-k": ("ratio", BITS),
    "projection": ("ratio", BITS),
    "dct-projection": ("ratio", BITS),
    IDENTITY: (BITS,),
    "scaled-sign": (),
}
"""The options of the built-in ones that are checked here: ``ratio``, required where it is taken, and, for
the class C_AI, ``bits``. One that is not in this table checks its own."""

RATIO_TAKERS: Final = tuple(name for name, options in OPTIONS.items() if "ratio" in options)

BITS_ACCEPTED: Final = f"a whole number from {BIT_WIDTHS[0]} to {BIT_WIDTHS[-1]}, or no key for float32"

RATIO_ACCEPTED: Final = "a number above 0 and at most 1, or theory"


def check_compressor(name: str, options: Mapping[str, object]) -> None:
    """Check that a compressor is installed and takes these options; one that is not built in checks its own.

    Raises:
        InvalidConfigError: naming each option, missing or wrong; the keys start at the compressor's section.
    """
    problems = list(compressor_problems(name, options))
    if problems:
        raise InvalidConfigError(f"compressor {name}", problems)


def compressor_problems(name: str, options: Mapping[str, object]) -> Iterator[Problem]:
    """What :func:`check_compressor` would raise."""
    installed = _installed()
    if name not in installed:
        names = sorted(installed)
        accepted = f"an installed compressor: {', '.join(names)}"
        yield Problem(("name",), shown(name), accepted, nearest=nearest(name, names))
        return
    if not installed[name] or name not in OPTIONS:
        return
    taken = ["name", *OPTIONS[name]]
    for option, value in options.items():
        if option not in taken:
            found = f"{shown(value)}, under a key that {name} does not take"
            accepted = f"only {' and '.join(taken)} with {name}"
            yield Problem((option,), found, accepted, nearest=nearest(option, taken))
    if "ratio" in taken:
        if "ratio" not in options:
            yield Problem(("ratio",), f"nothing, and {name} needs it", RATIO_ACCEPTED)
        elif not _is_ratio(options["ratio"]):
            yield Problem(("ratio",), shown(options["ratio"]), RATIO_ACCEPTED)
    if BITS in options and BITS in taken and not (type(options[BITS]) is int and options[BITS] in BIT_WIDTHS):
        yield Problem((BITS,), shown(options[BITS]), BITS_ACCEPTED)


def resolved_options(
    name: str, options: Mapping[str, object], *, workers: int, is_exact_down: bool
) -> Mapping[str, object]:
    """A compressor's checked options with ``ratio: theory`` as a number.

    For an additive and idempotent compressor it is Theorem 3's where the downlink has no residual; where it
    has one, Theorem 2 holds for the pair, and its ratio is for this compressor as for top-k.

    Args:
        name: the compressor's name.
        options: without the name.
        workers: m.
        is_exact_down: whether the downlink sends whole vectors or has the uplink's own compressor, with which
            an additive and idempotent one loses nothing.
    """
    if name not in RATIO_TAKERS or options.get("ratio") != THEORY:
        return options
    from afl.core.compressors import compressor_class  # noqa: PLC0415  # with PyTorch

    is_sharper = is_exact_down and compressor_class(name).additive_idempotent
    return {**options, "ratio": theory_ratio("additive-idempotent" if is_sharper else "contractive", workers)}


def _installed() -> dict[str, bool]:
    """The names of all installed compressors; whether each is built in."""
    return {
        point.name: point.value.startswith("afl.core.compressors.")
        for point in entry_points(group="afl.compressors")
    }


def _is_ratio(value: object) -> bool:
    return value == THEORY or (type(value) in {int, float} and 0 < value <= 1)  # type: ignore[operator]
