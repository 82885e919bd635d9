"""The server's part in the exchange of keys: it gathers the offers of an epoch, and sees when another is due.

It keeps nothing: workers know the epoch, and offer their keys again to a server that has been started again.
"""

from __future__ import annotations

from afl.core.secrecy.keys import KeyOffer, all_keys, roster_digest


class KeyExchange:
    """The keys of one run.

    Attributes:
        epoch: the newest that anybody has offered keys of, or that is due.
    """

    def __init__(self, run_id: str, workers: int) -> None:
        self.epoch = 1
        self._run_id = run_id
        self._workers = workers
        self._offers: list[KeyOffer] = []
        """The newest last."""
        self._digest = b""
        """Of the roster that was complete."""

    @property
    def is_complete(self) -> bool:
        """Whether all workers' keys of the epoch are known, and those that all go by."""
        return bool(self._digest)

    @property
    def roster(self) -> tuple[KeyOffer, ...]:
        """As few offers as hold all workers' keys, the newest first."""
        assert self.is_complete
        chosen: list[KeyOffer] = []
        covered: set[int] = set()
        for offer in reversed(self._offers):
            if not covered.issuperset(offer.workers):
                chosen.append(offer)
                covered.update(offer.workers)
        return tuple(chosen)

    def missing(self) -> list[int]:
        """The workers whose keys of the epoch are not known."""
        known = {worker for offer in self._offers for worker in offer.workers}
        return [worker for worker in range(self._workers) if worker not in known]

    def ends_epoch(self, offer: KeyOffer) -> bool:
        """Whether all keys that have been offered would be void by an offer.

        Raises:
            ProtocolError: if it is none that can be meant.
        """
        known = all_keys(self._offers)
        others = any(known.get(worker, key) != key for worker, key in offer.keys().items())
        return bool(known) and (offer.epoch > self.epoch or (offer.epoch == self.epoch and others))

    def add(self, offer: KeyOffer) -> bool:
        """Take a process's offer; whether all others' keys are void by it: another epoch has begun.

        An offer of an older epoch than is due changes nothing.

        Raises:
            ProtocolError: if it is none that can be meant.
        """
        own = offer.keys()
        if offer.epoch < self.epoch:
            return False
        is_void = offer.epoch > self.epoch
        if is_void:
            self._begin(offer.epoch)
        known = all_keys(self._offers)
        if any(known.get(worker, key) != key for worker, key in own.items()):
            # Somebody who has used masks of this epoch may meet them again under another key.
            self._begin(self.epoch + 1)
            return True
        replaced = set(own)
        self._offers = [earlier for earlier in self._offers if not replaced.issuperset(earlier.workers)]
        self._offers.append(offer)
        if self.missing():
            return is_void
        keys = all_keys(self._offers)
        digest = roster_digest(self._run_id, self.epoch, [keys[worker] for worker in range(self._workers)])
        if any(offer.roster not in {b"", digest} for offer in self._offers):
            self._begin(self.epoch + 1)
            return True
        self._digest = digest
        return is_void

    def _begin(self, epoch: int) -> None:
        self.epoch, self._offers, self._digest = epoch, [], b""
