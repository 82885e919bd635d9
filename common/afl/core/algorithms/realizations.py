"""The compressors of a run as server and workers draw them, alike, from the shared randomness."""

from __future__ import annotations

import torch

from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.compressors import Compressor, Realization, create
from afl.core.randomness import Purpose, SharedRandomness


class Realizations:
    """The compressors' realizations by round, each drawn once while it is needed.

    The realization of a round depends on nothing before it, so :meth:`prepare` may draw the next one
    while others wait for the network.
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
        self.downlink = (
            self.uplink
            if settings.downlink == settings.uplink
            else create(settings.downlink.name, dim, settings.downlink.options)
        )
        self._last = settings.synchronizations
        self._randomness = randomness
        self._device = device
        self._drawn: dict[tuple[int, bool], Realization] = {}

    def of_uplink(self, round_: int) -> Realization:
        """C_t of the workers."""
        return self._draw(self.uplink, round_)

    def of_downlink(self, round_: int) -> Realization:
        """C_t of the server: the same object where the compressors are the same."""
        return self._draw(self.downlink, round_)

    def prepare(self, round_: int) -> None:
        """Draw a round's realizations now, if it is one of the run's."""
        if round_ <= self._last:
            self.of_uplink(round_)
            self.of_downlink(round_)

    def digest_material(self) -> bytes:
        """What a worker must agree on with the server before the first round."""
        stream = self._randomness.stream(Purpose.COMPRESSOR, 1)
        return b"".join(
            (
                stream.words(4).astype("<u8").tobytes(),
                self.of_uplink(1).digest_material(),
                self.of_downlink(1).digest_material(),
            )
        )

    def _draw(self, compressor: Compressor, round_: int) -> Realization:
        key = (round_, compressor is self.uplink)
        if key not in self._drawn:
            # Room is made first: the round asked for may be the oldest of all.
            while len(self._drawn) >= self._KEPT:
                del self._drawn[min(self._drawn)]
            # A downlink of its own is independent of what it compresses, as Theorem 2's proof has it.
            purpose = Purpose.COMPRESSOR if compressor is self.uplink else Purpose.DOWNLINK_COMPRESSOR
            stream = self._randomness.stream(purpose, round_)
            self._drawn[key] = compressor.realize(stream, self._device)
        return self._drawn[key]
