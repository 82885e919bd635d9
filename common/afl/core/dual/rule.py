"""What a dual rule is to the rest of the system: one class, registered once, and one pure object a run."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from afl.core.options import AlgorithmOption

DUAL_OPTIONS: Final = frozenset({"block", "eta_q", "largest_weight"})
"""The keys of the configuration's section ``algorithm`` that rules may take besides their own options."""


class DualRule(abc.ABC):
    """Dual weights and how they follow the losses.

    Register a subclass in the entry point group ``afl.dual_rules`` and a configuration can name it in
    ``algorithm.dual``; it is then made as ``Rule(workers, **options)``, with what it :attr:`takes` and its
    own :attr:`options` by name. It must be installed where the server runs.

    Attributes:
        weights: q, float64 ``[m]``, uniform at first.
        factor: what the next update multiplies its step size by; multiplying the losses could overflow.
    """

    name: ClassVar[str]
    """As the configuration names it: that of the entry point."""

    description: ClassVar[str]
    """One line, without a capital at the beginning."""

    takes: ClassVar[frozenset[str]] = frozenset()
    """Which of :data:`DUAL_OPTIONS` it uses; a configuration that gives another is refused."""

    options: ClassVar[tuple[AlgorithmOption, ...]] = ()
    """Its own options: the other keys of ``algorithm.dual``."""

    has_theorems: ClassVar[bool] = False
    """Whether the paper's theorems are about it, so that step sizes may be ``theory``."""

    proven: ClassVar[str] = "nothing is known here of how a run with it converges"
    """What is proven of runs with it and what is not, as ``afl theory`` says it."""

    can_hide: ClassVar[bool] = False
    """Whether the worker can follow its own weight by :mod:`afl.core.secrecy.hidden_weights`."""

    factor: float = 1.0

    def __init__(self, workers: int, **options: Any) -> None:
        assert workers >= 1
        assert not options, f"{type(self).__name__} takes no {', '.join(options)}"
        self.weights: NDArray[np.float64] = np.full(workers, 1.0 / workers)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """What :meth:`restore` takes, for a checkpoint. A subclass that keeps more than the weights adds it
        under a name that begins with ``dual_``."""
        return {"dual_weights": self.weights}

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Continue from a :meth:`state`."""
        assert state["dual_weights"].shape == self.weights.shape
        self.weights = state["dual_weights"].copy()

    @abc.abstractmethod
    def update(self, round_: int, losses: NDArray[np.float64]) -> None:
        """Go from q_t to q_{t+1}.

        Args:
            round_: t, 1-based.
            losses: finite, float64 ``[m]``; the caller has refused any other.
        """
