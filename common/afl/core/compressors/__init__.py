"""Compressors and their registry: the entry point group ``afl.compressors``, so that a user can add one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from afl.core.compressors.base import Compressed, Compressor, Realization
from afl.core.installed import entry_points
from afl.core.messages import BIT_WIDTHS, BITS, ValueType
from afl.errors import ConfigError

__all__ = ["Compressed", "Compressor", "Realization", "compressor_class", "compressor_names", "create"]


@cache
def compressor_names() -> tuple[str, ...]:
    """The names that are installed, sorted."""
    return tuple(sorted(point.name for point in entry_points(group="afl.compressors")))


@cache
def compressor_class(name: str) -> type[Compressor]:
    """The class registered under ``name``.

    Raises:
        ConfigError: if there is none, with the nearest name, or if it is not a compressor.
    """
    for point in entry_points(group="afl.compressors"):
        if point.name == name:
            found = point.load()
            if not (isinstance(found, type) and issubclass(found, Compressor)):
                raise ConfigError(
                    f"the entry point {name!r} of afl.compressors is {point.value}, "
                    "which is not a subclass of afl.Compressor"
                )
            return found
    near = difflib.get_close_matches(name, compressor_names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"no compressor is called {name!r}{hint} Installed: {', '.join(compressor_names())}")


def create(name: str, dim: int, options: Mapping[str, Any]) -> Compressor:
    """The compressor ``name`` over vectors of dimension ``dim``.

    Args:
        options: ``bits`` for integers, which any compressor of the class C_AI takes, and its own.

    Raises:
        ConfigError: if the name or an option is wrong.
    """
    own = {option: value for option, value in options.items() if option != BITS}
    compressor = compressor_class(name)(dim, own)
    if BITS in options:
        bits = options[BITS]
        if not compressor.additive_idempotent:
            raise ConfigError(
                f"{name}: it takes no `bits`, since a sum of its messages is no message of its own; integers "
                "are for compressors that are additive and idempotent"
            )
        if type(bits) is not int or bits not in BIT_WIDTHS:
            least, most = BIT_WIDTHS[0], BIT_WIDTHS[-1]
            raise ConfigError(f"{name}: bits is {bits!r}; it must be a whole number from {least} to {most}")
        compressor.bits, compressor.value_type, compressor.lossless = bits, ValueType.INTEGER, False
    return compressor
