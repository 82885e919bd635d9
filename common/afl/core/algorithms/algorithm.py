"""What an algorithm is to the rest of the system: one object, registered once.

Nothing here or in :mod:`afl.core.algorithms.builtin` imports PyTorch, so that a configuration can be checked,
and its keys described, without the seconds that takes.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.dual import DualRule, rule_named
from afl.core.options import AlgorithmOption
from afl.core.randomness import SharedRandomness

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from afl.core.algorithms.base import ServerAlgorithm, WorkerSide

SHARED_OPTIONS: Final = frozenset(
    {
        *("block", "dual", "dual_loss", "eta_q", "largest_weight", "local_steps", "sampled", "weighting"),
        *("uplink", "downlink", "schedule", "optimizer", "weight_decay", "final_model", "server_eta"),
    }
)
"""The options that several algorithms have; each is described in :class:`afl.config.schema.Algorithm`."""

KEYS: Final = SHARED_OPTIONS | {"name", "rounds", "eta_w", "clip_norm", "smoothness", "sigma_q"}
"""The keys of the configuration's section ``algorithm`` that are no algorithm's own."""


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


def dual_rule(settings: AlgorithmSettings) -> DualRule:
    """The rule that moves the dual weights, as the configuration's ``algorithm.dual`` names it, at q_1.

    It is for an algorithm that ``takes`` the option ``dual`` and all of :data:`afl.core.dual.DUAL_OPTIONS`.
    """
    rule = rule_named(settings.dual.name)
    shared = {option: getattr(settings, option) for option in rule.takes}
    return rule(settings.workers, **shared, **settings.dual.options)
