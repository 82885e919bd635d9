"""Durations and sizes as they are written in a configuration: ``250ms``, ``64 KiB``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_QUANTITY: Final = re.compile(
    r"([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s*([a-z]*)", re.IGNORECASE | re.ASCII
)

_SECONDS: Final = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}

_BYTES: Final = {
    "b": Fraction(1),
    **{f"{prefix}b": Fraction(1000**power) for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": Fraction(1024**power) for power, prefix in enumerate("kmgt", start=1)},
}


class _Quantity:
    """A number that remembers how it was written; ``str`` gives back the text."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validated by the constructor, serialized as text."""
        return core_schema.no_info_plain_validator_function(
            cls, serialization=core_schema.to_string_ser_schema(when_used="always")
        )


class Duration(_Quantity, float):
    """A length of time in seconds: a ``float`` wherever one is needed.

    Args:
        value: text such as ``30s``, ``5m``, ``1h`` or ``250ms``, or a number of seconds.

    Raises:
        ValueError: if it is neither, or negative, or not finite.
    """

    def __new__(cls, value: object) -> Self:
        """Read the text or number."""
        text = _text(value, "s")
        self = super().__new__(cls, float(_number(text, _SECONDS, "ms, s, m or h")))
        self.text = text
        return self


class Size(_Quantity, int):
    """A number of bytes: an ``int`` wherever one is needed.

    Args:
        value: text such as ``1MiB`` (2^20), ``64 KiB`` or ``2GB`` (2 * 10^9), or a number of bytes.

    Raises:
        ValueError: if it is neither, or negative, or not a whole number of bytes.
    """

    def __new__(cls, value: object) -> Self:
        """Read the text or number."""
        text = _text(value, "B")
        size = _number(text, _BYTES, "B, KiB, MiB, GiB, KB, MB or GB")
        if size.denominator != 1:
            raise ValueError(f"{text!r} is not a whole number of bytes")
        self = super().__new__(cls, size.numerator)
        self.text = text
        return self


def _text(value: object, unit: str) -> str:
    """The text of a quantity; a bare number gets ``unit``."""
    if isinstance(value, str | _Quantity):
        return str(value).strip()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("neither text nor a number")  # noqa: TRY004  # a TypeError would escape the validation
    if not 0 <= value < 1e15:
        raise ValueError("out of range")
    return f"{float(value):.9f}".rstrip("0").rstrip(".") + unit


def _number(text: str, units: Mapping[str, Fraction], known: str) -> Fraction:
    """The quantity, in the unit whose factor is 1; those of bytes are written in either case."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number followed by a unit")
    number, unit = match.groups()
    factor = units.get(unit.lower() if units is _BYTES else unit)
    if factor is None:
        raise ValueError(f"the unit {unit!r} is not {known}" if unit else f"{text!r} needs a unit: {known}")
    return Fraction("0" + number) * factor


def shown_bytes(count: float) -> str:
    """A number of bytes for people: ``1.50 MB``; decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def shown_seconds(seconds: float) -> str:
    """A duration for people: ``3.2 s``, ``4 min 10 s``, ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
