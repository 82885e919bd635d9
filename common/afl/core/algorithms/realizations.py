"""The compressors of a run as server and workers draw them, alike, from the shared randomness, and the step
that every copy of the model takes along what they decode."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afl.core.algorithms.base import Companion
from afl.core.algorithms.optimizers import create_optimizer
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.codecs.integers import probe, sum_bits
from afl.core.compressors import Compressed, Compressor, Realization, create
from afl.core.compressors.on_grid import OnGrid
from afl.core.grid import Grid
from afl.core.messages import Role, ValueType
from afl.core.randomness import Purpose, SharedRandomness


class Realizations:
    """The compressors' realizations by round, each drawn once while it is needed, and the grid of integer
    messages.

    The realization of a round depends on nothing before it, so :meth:`prepare` may draw the next one
    while others wait for the network. The grid does: it is that of the round whose D is applied next.

    Attributes:
        grid: of the downlink's integers, and of the uplink's, whose compressor is then the same; ``None``
            where values are float32.
        optimizer: of this copy of the model.
        companions: what goes with this copy of the model: the grid, and the optimizer's state, as far as
            there are such.
        down_form: the downlink's compressor, with as many bits as an integer of D takes.
    """

    _KEPT = 4

    def __init__(
        self,
        settings: AlgorithmSettings,
        dim: int,
        randomness: SharedRandomness,
        device: torch.device | str = "cpu",
    ) -> None:
        self.uplink = create(settings.uplink.name, dim, settings.uplink.options)
        # What is additive and idempotent loses nothing on its second way with one realization (Theorem 3).
        is_one = settings.downlink == settings.uplink and self.uplink.additive_idempotent
        self.downlink = (
            self.uplink if is_one else create(settings.downlink.name, dim, settings.downlink.options)
        )
        # Earlier versions drew a user's own once in that case, and must not be taken for alike. Those built
        # in that are not additive draw nothing at all.
        is_own = not type(self.uplink).__module__.startswith("afl.")
        self._is_apart = settings.downlink == settings.uplink and not is_one and is_own
        # Only the sum of messages that all lie on one grid is known to all copies of the model.
        assert self.downlink is self.uplink or not self.uplink.bits
        self.grid: Grid | None = None
        self.down_form = self.downlink
        if self.downlink.bits:
            tensors = settings.tensors if self.downlink.in_coordinates and settings.tensors else (dim,)
            assert sum(tensors) == dim
            self._offsets: NDArray[np.int64] = np.cumsum((0, *tensors))
            messages = settings.workers if self.downlink is self.uplink else 1
            is_modular = settings.secure_aggregation
            self.grid = Grid(tensors, self.downlink.bits, messages if is_modular else 1)
            self._grid_material = self._offsets.astype("<i8").tobytes() + self.grid.content() + probe()
            self.downlink.groups = len(tensors)
            self.down_form = copy(self.downlink)
            if is_modular:
                # The sum has no more bits than a message.
                self.uplink.value_type = ValueType.MODULAR
            else:
                self.down_form.bits = sum_bits(self.downlink.bits, messages)
        self.optimizer = create_optimizer(settings, dim, device)
        companions: dict[Role, Companion] = {} if self.grid is None else {Role.GRID: self.grid}
        if self.optimizer.nbytes:
            companions[Role.OPTIMIZER] = self.optimizer
        self.companions: Mapping[Role, Companion] = companions
        self._last = settings.synchronizations
        self._randomness = randomness
        self._device = device
        self._drawn: dict[tuple[int, bool], tuple[Realization, NDArray[np.int64] | None]] = {}
        """By round, and whether it is the uplink's; with integers, how many values each group has."""
        self._latest: tuple[tuple[Realization, bytes], OnGrid] | None = None
        """On the grid as it was then."""

    def of_uplink(self, round_: int, exponents: NDArray[np.int32] | None = None) -> Realization:
        """C_t of the workers.

        Args:
            exponents: the grid's of the round, where it has moved since.
        """
        return self._of(self.uplink, round_, exponents)

    def of_downlink(self, round_: int) -> Realization:
        """C_t of the server."""
        return self._of(self.downlink, round_)

    def apply(self, round_: int, params: Tensor, update: Compressed) -> None:
        """Step along D_t, after which the grid is that of the next round."""
        realization = self.of_downlink(round_)
        self.optimizer.step(round_, params, realization, update)
        if self.grid is not None:
            assert isinstance(realization, OnGrid)
            self.grid.move(update.values, realization.lengths)

    def prepare(self, round_: int) -> None:
        """Draw a round's realizations now, if it is one of the run's."""
        if round_ <= self._last:
            self._draw(self.uplink, round_)
            self._draw(self.downlink, round_)

    def digest_material(self) -> bytes:
        """What a worker must agree on with the server before the first round."""
        stream = self._randomness.stream(Purpose.COMPRESSOR, 1)
        return b"".join(
            (
                stream.words(4).astype("<u8").tobytes(),
                self._draw(self.uplink, 1)[0].digest_material(),
                self._draw(self.downlink, 1)[0].digest_material(),
                b"" if self.grid is None else self._grid_material,
                b"drawn apart" if self._is_apart else b"",
            )
        )

    def _of(
        self, compressor: Compressor, round_: int, exponents: NDArray[np.int32] | None = None
    ) -> Realization:
        drawn, lengths = self._draw(compressor, round_)
        if lengths is None:
            return drawn
        assert self.grid is not None
        # All workers of a process ask for the same in a round.
        key = (drawn, self.grid.content())
        if exponents is None and self._latest is not None and self._latest[0] == key:
            return self._latest[1]
        exact = compressor.in_coordinates
        if exponents is not None:
            return OnGrid(drawn, lengths, self.grid, exponents, is_exact=exact)
        made = OnGrid(drawn, lengths, self.grid, self.grid.exponents, is_exact=exact)
        self._latest = key, made
        return made

    def _draw(self, compressor: Compressor, round_: int) -> tuple[Realization, NDArray[np.int64] | None]:
        key = (round_, compressor is self.uplink)
        if key not in self._drawn:
            # Room is made first: the round asked for may be the oldest of all.
            while len(self._drawn) >= self._KEPT:
                del self._drawn[min(self._drawn)]
            # Any other downlink is independent of what it compresses, as Theorem 2's proof has it.
            purpose = Purpose.COMPRESSOR if compressor is self.uplink else Purpose.DOWNLINK_COMPRESSOR
            stream = self._randomness.stream(purpose, round_)
            drawn, lengths = compressor.realize(stream, self._device), None
            if compressor.bits:
                in_coordinates = compressor.in_coordinates
                lengths = drawn.counts(self._offsets) if in_coordinates else np.array([compressor.count])
            self._drawn[key] = drawn, lengths
        return self._drawn[key]
