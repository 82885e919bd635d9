"""Which compressors a configuration may name, and which options each takes; without importing PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from afl.config.problems import InvalidConfigError, Problem, nearest, shown
from afl.core.installed import entry_points
from afl.core.messages import BIT_WIDTHS, BITS
from afl.theory import theory_ratio

IDENTITY: Final = "identity"
THEORY: Final = "theory"

OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    IDENTITY: (BITS,),
    "top-k": ("ratio",),
    "rand-k": ("ratio", BITS),
    "projection": ("ratio", BITS),
    "dct-projection": ("ratio", BITS),
    "scaled-sign": (),
}
"""The options of the built-in ones that are checked here: ``ratio``, required where it is taken, and, for
the class C_AI, ``bits``. One that is not in this table checks its own."""

RATIO_TAKERS: Final = tuple(name for name, options in OPTIONS.items() if "ratio" in options)

BITS_TAKERS: Final = tuple(name for name, options in OPTIONS.items() if BITS in options)

BITS_ACCEPTED: Final = f"a whole number from {BIT_WIDTHS[0]} to {BIT_WIDTHS[-1]}, or no key for float32"

_WHY_NO_BITS: Final = (
    "integers are for compressors whose messages add up to one of the same form: "
    f"{', '.join(BITS_TAKERS)}, or an additive one of your own"
)

RATIO_ACCEPTED: Final = "a number above 0 and at most 1, or theory"


def check_compressor(name: str, options: Mapping[str, object]) -> None:
    """Check that a compressor is installed and takes these options; one that is not built in checks its own,
    but for ``bits``.

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
    is_checked_here = installed[name] and name in OPTIONS
    taken = ["name", *OPTIONS.get(name, ())]
    if is_checked_here:
        for option, value in options.items():
            if option not in taken:
                found = f"{shown(value)}, under a key that {name} does not take"
                accepted = f"only {listed(taken)} with {name}"
                note = _WHY_NO_BITS if option == BITS else None
                yield Problem((option,), found, accepted, nearest=nearest(option, taken), note=note)
        if "ratio" in taken:
            if "ratio" not in options:
                yield Problem(("ratio",), f"nothing, and {name} needs it", RATIO_ACCEPTED)
            elif not _is_ratio(options["ratio"]):
                yield Problem(("ratio",), shown(options["ratio"]), RATIO_ACCEPTED)
    if BITS in options and (BITS in taken or not is_checked_here):
        bits = options[BITS]
        if not (type(bits) is int and bits in BIT_WIDTHS):
            is_quoted = isinstance(bits, str) and bits.isdecimal()
            note = "the quotes make it text; leave them out" if is_quoted else None
            yield Problem((BITS,), shown(bits), BITS_ACCEPTED, note=note)


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


def listed(names: Sequence[str]) -> str:
    """``one``, ``one and two``, ``one, two and three``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _is_ratio(value: object) -> bool:
    return value == THEORY or (type(value) in {int, float} and 0 < value <= 1)  # type: ignore[operator]
