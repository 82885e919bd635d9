"""The built-in algorithms: what each is called, takes, and is made of; imported when it is used."""

# ruff: noqa: PLC0415

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from afl.core.algorithms.algorithm import Algorithm, dual_rule
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.dual import DUAL_OPTIONS
from afl.core.randomness import SharedRandomness

if TYPE_CHECKING:
    from torch import Tensor

    from afl.core.algorithms.base import ServerAlgorithm, WorkerSide

STEPPING: Final = frozenset({"schedule", "optimizer", "weight_decay"})
"""What every algorithm takes in which all copies of the model step along D."""


class AflCom(Algorithm):
    """AFL-Com (Algorithm 2)."""

    name = "afl-com"
    description = "compresses both ways"
    takes = STEPPING | DUAL_OPTIONS | {"dual", "dual_loss", "final_model", "uplink", "downlink"}
    has_theorems = True

    def server(
        self, settings: AlgorithmSettings, params: Tensor, randomness: SharedRandomness
    ) -> ServerAlgorithm:
        """With the dual rule of the settings: KL mirror ascent with restarts, or another."""
        from afl.core.algorithms.afl_com import AflComServer
        from afl.core.secrecy.hidden_weights import HiddenWeights

        dual = HiddenWeights(settings.workers) if settings.hides_losses else dual_rule(settings)
        return AflComServer(settings, params, randomness, dual)


class AflBr(AflCom):
    """AFL-BR (Algorithm 1): AFL-Com with the identity compressor."""

    name = "afl-br"
    description = "sends whole vectors"
    takes = STEPPING | DUAL_OPTIONS | {"dual", "dual_loss", "final_model"}


class Sgda(Algorithm):
    """AFL (Mohri et al. 2019): AFL-BR with projected ascent."""

    name = "sgda"
    description = "AFL-BR with projected ascent on the dual weights"
    takes = STEPPING | {"dual_loss", "eta_q"}

    def server(
        self, settings: AlgorithmSettings, params: Tensor, randomness: SharedRandomness
    ) -> ServerAlgorithm:
        """With projected ascent."""
        from afl.core.algorithms.afl_com import AflComServer
        from afl.core.dual import ProjectedAscent

        dual = ProjectedAscent(settings.workers, settings.eta_q)
        return AflComServer(settings, params, randomness, dual)


class _LocalSteps(Algorithm):
    """Algorithms whose workers take local steps and send models."""

    snapshots = False

    def worker(
        self,
        settings: AlgorithmSettings,
        dim: int,  # noqa: ARG002
        randomness: SharedRandomness,
        workers: Sequence[int],
        *_: Any,
        **__: Any,
    ) -> WorkerSide:
        """Local steps of SGD."""
        from afl.core.algorithms.local_sgd import local_sgd_side

        return local_sgd_side(settings, workers, randomness if self.snapshots else None)


class Drfa(_LocalSteps):
    """DRFA (Deng et al. 2020)."""

    name = "drfa"
    description = (
        "takes local steps between synchronizations, and moves the dual weights by a snapshot's losses"
    )
    takes = frozenset({"dual_loss", "eta_q", "local_steps", "sampled", "schedule", "weight_decay"})
    snapshots = True

    def server(
        self, settings: AlgorithmSettings, params: Tensor, randomness: SharedRandomness
    ) -> ServerAlgorithm:
        """With projected ascent."""
        from afl.core.algorithms.drfa import DrfaServer

        return DrfaServer(settings, params, randomness)


class FedAvg(_LocalSteps):
    """FedAvg (McMahan et al. 2017)."""

    name = "fedavg"
    description = "averages models after local steps; no dual weights"
    takes = frozenset({"local_steps", "weighting", "schedule", "weight_decay", "optimizer", "server_eta"})

    def server(
        self,
        settings: AlgorithmSettings,
        params: Tensor,
        randomness: SharedRandomness,  # noqa: ARG002
    ) -> ServerAlgorithm:
        """The mean of the models: uniform, or by training examples (``weighting: samples``)."""
        from afl.core.algorithms.fedavg import FedAvgServer

        return FedAvgServer(settings, params)


BUILT_IN: Final[tuple[Algorithm, ...]] = (AflBr(), AflCom(), Sgda(), Drfa(), FedAvg())
