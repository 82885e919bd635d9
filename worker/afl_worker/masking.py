"""What a process sends of its workers' messages where only their sum may be read."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from afl.core.aggregation import joint_reports
from afl.core.codecs.modular import modular
from afl.core.codecs.payload import unpack
from afl.core.messages import (
    BUFFERS_PHASE,
    NOWHERE,
    Kind,
    Payload,
    Position,
    Report,
    ValueType,
)
from afl.core.participant import Answer, epoch_of
from afl.core.secrecy.keyring import Keyring
from afl.core.secrecy.keys import KeyOffer
from afl.core.secrecy.masks import Masks
from afl.errors import PeerError, ProtocolError
from afl_worker.keys import Standing


class Masking:
    """Masks, bound to what the process was shown, and what keeps one from being used for two messages.

    Args:
        sent: by worker, the last report that an earlier process of it may have sent.
        unsure: workers of which an earlier process may have sent what is not known here.
        metrics: whether the reports of evaluations are masked too.
    """

    def __init__(
        self,
        keyring: Keyring,
        sent: Mapping[int, tuple[Report, Iterable[Payload]]],
        unsure: Collection[int],
        *,
        metrics: bool,
    ) -> None:
        self._keyring = keyring
        self._masks_metrics = metrics
        self._masks: Masks | None = None
        self._epoch = 0
        self._last = {worker: _Sent.of(report, payloads) for worker, (report, payloads) in sent.items()}
        """By worker: the last message that was masked."""
        self._unsure = set(unsure)
        self._is_resumed = True

    def offer(self, due: int, standings: Mapping[int, Standing], held: Collection[int]) -> KeyOffer:
        """The process's keys for a session.

        Args:
            due: the epoch that the server waits for.
            held: workers whose report for the open position is here, to be sent again as it was.
        """
        used = [worker for worker, standing in standings.items() if self._is_used(worker, standing, held)]
        offer = self._keyring.offer(due, used)
        self._last = {worker: last for worker, last in self._last.items() if last.epoch == offer.epoch}
        if used:
            self._unsure = set()
        if offer.epoch != self._epoch:
            self._epoch, self._masks = offer.epoch, None
        return offer

    def _is_used(self, worker: int, standing: Standing, held: Collection[int]) -> bool:
        """Whether a mask that is asked for may have been used for another message."""
        last = self._last.get(worker, _NOTHING_SENT).position
        is_masked = self._masks_metrics or standing.open.phase < BUFFERS_PHASE
        is_unknown = standing.is_held and is_masked and last != standing.open
        if worker in self._unsure or last > standing.open or is_unknown:
            return True
        # A journal that the run has gone past is a copy of an older one.
        is_behind = self._is_resumed and last != NOWHERE and last.round + 1 < standing.open.round
        return is_behind or (last == standing.open and worker not in held)

    def take(self, epoch: int, offers: Iterable[KeyOffer]) -> None:
        """Go by a roster.

        Raises:
            PeerError: if it cannot be believed; nothing is sent then.
        """
        self._masks = self._keyring.take(epoch, tuple(offers))

    def sent(self, answers: Iterable[tuple[Kind, Answer]]) -> Iterator[tuple[Kind, Answer]]:
        """What leaves the process of its workers' answers to a step.

        Raises:
            PeerError: if a mask would be used twice, or something would leave without one.
            ProtocolError: if no roster has come.
        """
        if self._masks is None:
            raise ProtocolError("a step before the roster of all workers' keys")
        for kind, (report, payloads) in joint_reports(self._watched(answers)):
            masked = [
                self._masked(self._masks, report, index, payload) for index, payload in enumerate(payloads)
            ]
            yield kind, (report, masked)

    def _watched(self, answers: Iterable[tuple[Kind, Answer]]) -> Iterator[tuple[Kind, Answer]]:
        histories = set()
        for kind, (report, payloads) in answers:
            if kind not in {Kind.TRAIN, Kind.EVALUATE} or (kind is Kind.TRAIN and not payloads):
                raise PeerError(
                    f"the server asks worker {report.worker} for {kind.name} without a mask, which no run "
                    "with secure aggregation needs"
                )
            if payloads:
                histories.add(report.history)
                if len(histories) > 1:
                    raise PeerError(
                        f"worker {report.worker} was shown something else than the other workers of this "
                        "process; one mask for all their messages would tell what it sends"
                    )
                worker, position = report.worker, report.position
                last, sent = self._last.get(worker, _NOTHING_SENT), _Sent.of(report, payloads)
                if position < last.position or (position == last.position and sent.digest != last.digest):
                    raise PeerError(
                        f"the server asks worker {worker} for another message for round {position.round}, "
                        f"phase {position.phase}, which was sent already: two messages under one mask can be "
                        "read"
                    )
                self._last[worker] = sent
                self._is_resumed = False
            yield kind, (report, payloads)

    @staticmethod
    def _masked(masks: Masks, report: Report, index: int, payload: Payload) -> Payload:
        header = payload.header
        if header.value_type is not ValueType.MODULAR:
            raise PeerError(
                f"a {header.role.name} payload would leave worker {report.worker} without a mask; the run "
                "has secure aggregation"
            )
        residues = unpack(header, payload.data).values
        mask = masks.draw(
            report.position, index, header.count, header.bits, report.workers, shown=report.history
        )
        np.add(mask, residues, out=mask)
        return modular(header.encoding, header.bits).whole(mask, header.role, header.dim)


class _Sent(NamedTuple):
    """A message, as much of it as must be remembered."""

    epoch: int
    position: Position
    digest: bytes

    @classmethod
    def of(cls, report: Report, payloads: Iterable[Payload]) -> _Sent:
        content = hashlib.blake2b(digest_size=16)
        for payload in payloads:
            content.update(payload.data)
        return cls(epoch_of(report.history), report.position, content.digest())


_NOTHING_SENT = _Sent(0, NOWHERE, b"")
