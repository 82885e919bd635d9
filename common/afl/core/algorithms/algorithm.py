"""What an algorithm is to the rest of the system: one object, registered once.

Nothing here or in :mod:`afl.core.algorithms.builtin` imports PyTorch, so that a configuration can be checked,
and its keys described, without the seconds that takes.
"""

from __future__ import annotations

import abc
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.randomness import SharedRandomness

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from afl.core.algorithms.base import ServerAlgorithm, WorkerSide

SHARED_OPTIONS: Final = frozenset(
    {
        *("block", "dual_loss", "eta_q", "largest_weight", "local_steps", "sampled", "weighting"),
        *("uplink", "downlink", "schedule", "optimizer", "weight_decay", "final_model"),
    }
)
"""The options that several algorithms have; each is described in :class:`afl.config.schema.Algorithm`."""

KEYS: Final = SHARED_OPTIONS | {"name", "rounds", "eta_w", "clip_norm", "smoothness", "sigma_q"}
"""The keys of the configuration's section ``algorithm`` that are no algorithm's own."""


@dataclass(frozen=True)
class AlgorithmOption:
    """An option of your own algorithm: a key of the configuration's section ``algorithm``.

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


class Algorithm(abc.ABC):
    """An algorithm: its name, its options, and its two halves.

    Register an instance, or a class that is made without arguments, in the entry point group
    ``afl.algorithms``; it must be installed where the server and the workers run.
    """

    name: ClassVar[str]
    """As the configuration names it: that of the entry point."""

    description: ClassVar[str]
    """One line, without a capital at the beginning."""

    takes: ClassVar[frozenset[str]] = frozenset()
    """Which of :data:`SHARED_OPTIONS` it uses; a configuration that gives another is refused."""

    options: ClassVar[tuple[AlgorithmOption, ...]] = ()
    """Its own options besides: ``settings.own`` has their values by name."""

    has_theorems: ClassVar[bool] = False
    """Whether the paper's theorems are about it, so that ``eta_w`` and ``eta_q`` may be ``theory``."""

    @abc.abstractmethod
    def server(
        self, settings: AlgorithmSettings, params: Tensor, randomness: SharedRandomness
    ) -> ServerAlgorithm:
        """The server's half, which moves ``params`` (float32 ``[dim]``, on the CPU) in place."""

    def worker(
        self,
        settings: AlgorithmSettings,
        dim: int,
        randomness: SharedRandomness,
        workers: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        resends: bool = True,
        keeps_old: bool = False,  # noqa: ARG002  # AFL-Com's stays in any case
    ) -> WorkerSide:
        """What a process runs for the workers that it hosts.

        By default AFL-Com's: each worker sends its gradient times its dual weight, compressed with error
        feedback where the uplink's compressor loses something, and every copy of the model steps by
        ``w <- w - eta_w D`` with the payload D that the server sends.

        Args:
            resends: whether a report must stay as it is until the worker's next one, to be sent again after
                a cut; otherwise it may share memory with what the next worker computes.
            keeps_old: whether a residual whose sum overflows must stay as it was: a step that has no finite
                answer is then left out, and the next one goes on.
        """
        from afl.core.algorithms.afl_com import afl_com_side  # noqa: PLC0415  # with PyTorch

        return afl_com_side(settings, dim, randomness, workers, device, resends=resends)
