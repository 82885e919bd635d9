"""The options that an algorithm or a dual rule has of its own, as a configuration gives them."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class AlgorithmOption:
    """An option of your own algorithm: a key of the configuration's section ``algorithm``; or of your own
    dual rule: a key of ``algorithm.dual``.

    Attributes:
        name: the key.
        description: what it means, in the docs' words; no capital at the beginning.
        kind: ``number`` (a float), ``count`` (a whole number), ``flag`` or ``text``.
        default: what it is where the configuration has none; ``None`` if it must be given.
        least: of a number or count.
        most: of a number or count.
        choices: of a text, if only some are right.
        unit: empty where it has none.
    """

    name: str
    description: str
    kind: Literal["number", "count", "flag", "text"] = "number"
    default: float | bool | str | None = None
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    unit: str = ""

    def __post_init__(self) -> None:
        assert self.name.isidentifier(), self.name
        assert self.description, self.name
        assert self.default is None or self.takes(self.default), f"{self.name}: {self.default!r}"

    def takes(self, value: Any) -> bool:
        """Whether it may have the value, as read from YAML or JSON."""
        match self.kind:
            case "flag":
                return isinstance(value, bool)
            case "text":
                return isinstance(value, str) and (not self.choices or value in self.choices)
            case "count":
                return type(value) is int and self.least <= value <= self.most
            case "number":
                is_finite = type(value) in {int, float} and abs(value) <= sys.float_info.max
                return is_finite and self.least <= value <= self.most

    @property
    def accepted(self) -> str:
        """What it may be, in words: ``a number from 0 to 1``."""
        kinds = {"number": "a number", "count": "a whole number", "flag": "true or false", "text": "text"}
        if self.choices:
            return " or ".join(self.choices)
        low = f" from {self.least:g}" if self.least > -math.inf else ""
        high = f" to {self.most:g}" if low and self.most < math.inf else ""
        if not low and self.most < math.inf:
            high = f" of at most {self.most:g}"
        return kinds[self.kind] + low + high
