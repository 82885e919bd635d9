"""The exchange of keys: whatever is lost, all workers come to one roster, or one of them says no."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afl.core.messages import Position
from afl.core.secrecy.exchange import KeyExchange
from afl.core.secrecy.keyring import Keyring
from afl.core.secrecy.keys import LARGEST_EPOCH, KeyOffer, OwnKey, roster_digest
from afl.core.secrecy.neighbours import COMPLETE_UP_TO
from afl.errors import PeerError, ProtocolError

RUN = "a-run"


class Store:
    """Keys that outlive their keyring."""

    def __init__(self) -> None:
        self.kept: dict[int, OwnKey] = {}

    def read(self) -> Mapping[int, OwnKey]:
        return dict(self.kept)

    def write(self, keys: Mapping[int, OwnKey]) -> None:
        self.kept.update(keys)


_COUNT = itertools.count()


def fresh(size: int) -> bytes:
    return hashlib.sha256(next(_COUNT).to_bytes(8, "big")).digest()[:size]


def signature(statement: bytes) -> bytes:
    return hashlib.sha256(b"signed " + statement).digest()


def check(offer: KeyOffer) -> None:
    if offer.signature != signature(offer.statement(RUN)):
        raise PeerError(f"workers {offer.workers}: the signature does not fit")


def keyring(hosted: list[int], store: Store, workers: int = 3, least: int = 2) -> Keyring:
    return Keyring(
        RUN,
        hosted,
        workers,
        least=least,
        sign=lambda statement: (signature(statement), (), b"key"),
        verify=check,
        random=fresh,
        store=store,
    )


def agreed(workers: int = 3) -> tuple[list[Keyring], list[Store], KeyExchange]:
    stores = [Store() for _ in range(workers)]
    rings = [keyring([worker], store, workers) for worker, store in enumerate(stores)]
    exchange = KeyExchange(RUN, workers)
    for ring in rings:
        assert not exchange.add(ring.offer(exchange.epoch))
    return rings, stores, exchange


def test_masks_of_one_roster_cancel() -> None:
    rings, _, exchange = agreed()
    masks = [ring.take(exchange.epoch, exchange.roster) for ring in rings]
    drawn = [one.draw(Position(1, 0), 0, 50, 64, [worker]) for worker, one in enumerate(masks)]
    assert all(one.any() for one in drawn)
    assert not sum(drawn).any()  # type: ignore[union-attr]


def test_a_process_that_has_its_keys_still_changes_nothing() -> None:
    rings, stores, exchange = agreed()
    roster = exchange.roster
    for ring in rings:
        ring.take(1, roster)
    again = keyring([1], stores[1]).offer(exchange.epoch)
    assert not exchange.add(again)
    assert exchange.epoch == 1
    assert {offer.public_keys for offer in exchange.roster} == {offer.public_keys for offer in roster}
    # Neither does a server that knows nothing any more.
    fresh_server = KeyExchange(RUN, 3)
    for ring in rings:
        fresh_server.add(ring.offer(fresh_server.epoch))
    assert (fresh_server.epoch, fresh_server.is_complete) == (1, True)


def test_a_process_without_its_keys_begins_an_epoch_for_all() -> None:
    rings, _, exchange = agreed()
    for ring in rings:
        ring.take(1, exchange.roster)
    newcomer = keyring([1], Store())
    assert exchange.add(newcomer.offer(exchange.epoch))
    assert (exchange.epoch, exchange.is_complete, exchange.missing()) == (2, False, [0, 1, 2])
    for ring in (rings[0], newcomer, rings[2]):
        exchange.add(ring.offer(exchange.epoch))
    for ring in (rings[0], newcomer, rings[2]):
        ring.take(2, exchange.roster)


def test_keys_that_were_lost_while_the_server_was_away_begin_an_epoch_too() -> None:
    rings, _, exchange = agreed()
    for ring in rings:
        ring.take(1, exchange.roster)
    server = KeyExchange(RUN, 3)
    newcomer = keyring([1], Store())
    results = [server.add(ring.offer(server.epoch)) for ring in (newcomer, rings[0], rings[2])]
    assert results == [False, False, True]
    assert server.epoch == 2


def test_a_mask_that_may_be_used_ends_the_epoch() -> None:
    rings, _, exchange = agreed()
    for ring in rings:
        ring.take(1, exchange.roster)
    assert exchange.add(rings[0].offer(exchange.epoch, used=[0]))
    assert exchange.epoch == 2


Change = Callable[[tuple[KeyOffer, ...]], tuple[KeyOffer, ...]]


def swapped(offers: tuple[KeyOffer, ...]) -> tuple[KeyOffer, ...]:
    """The server's own key in place of worker 1's, under worker 1's signature."""
    return tuple(replace(one, public_keys=(fresh(32),)) if one.workers == (1,) else one for one in offers)


def signed_by_another(offers: tuple[KeyOffer, ...]) -> tuple[KeyOffer, ...]:
    return tuple(replace(one, workers=(1,)) if one.workers == (2,) else one for one in offers)


def without_a_neighbour(offers: tuple[KeyOffer, ...]) -> tuple[KeyOffer, ...]:
    return tuple(one for one in offers if one.workers != (2,))


def with_one_twice(offers: tuple[KeyOffer, ...]) -> tuple[KeyOffer, ...]:
    other = keyring([2], Store()).offer(1)
    return (*offers, other)


def with_one_more(offers: tuple[KeyOffer, ...]) -> tuple[KeyOffer, ...]:
    return (*offers, keyring([3], Store(), 4).offer(1))


def of_the_epoch_before(offers: tuple[KeyOffer, ...]) -> tuple[KeyOffer, ...]:
    return tuple(replace(one, epoch=0) if one.workers == (1,) else one for one in offers)


def with_a_foreign_key_of_its_own(offers: tuple[KeyOffer, ...]) -> tuple[KeyOffer, ...]:
    other = keyring([0], Store()).offer(1)
    return tuple(other if one.workers == (0,) else one for one in offers)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swapped, "the signature does not fit"),
        (signed_by_another, "the signature does not fit"),
        (without_a_neighbour, "lacks worker 2; the workers are 0 to 2"),
        (with_one_twice, "two keys of worker 2"),
        (with_one_more, "names worker 3; the workers are 0 to 2"),
        (of_the_epoch_before, "has keys of epoch 0"),
        (with_a_foreign_key_of_its_own, "another key of worker 0 than its own"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_roster_that_is_not_the_workers_own_is_refused(change: Change, said: str) -> None:
    rings, _, exchange = agreed()
    with pytest.raises(PeerError, match=said):
        rings[0].take(1, change(exchange.roster))


def test_another_roster_in_the_same_epoch_is_refused_also_after_a_restart() -> None:
    rings, stores, exchange = agreed()
    rings[0].take(1, exchange.roster)
    other = keyring([1], Store()).offer(1)
    changed = tuple(other if one.workers == (1,) else one for one in exchange.roster)
    for ring in (rings[0], keyring([0], stores[0])):
        with pytest.raises(PeerError, match="keys change only with the epoch"):
            ring.take(1, changed)


def test_an_old_epochs_roster_is_refused() -> None:
    rings, _, exchange = agreed()
    old = exchange.roster
    rings[0].take(1, old)
    rings[0].offer(2)
    with pytest.raises(PeerError, match="another key of worker 0 than its own"):
        rings[0].take(1, old)


def test_too_few_workers_are_refused() -> None:
    with pytest.raises(PeerError, match="2 workers, and this worker takes part with 3 or more"):
        keyring([0], Store(), workers=2, least=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workers": (1, 0), "public_keys": (bytes(32), bytes(32))}, "ascending"),
        ({"workers": (0, 1)}, "each with one key"),
        ({"public_keys": (bytes(31),)}, "32 bytes"),
        ({"roster": b"x"}, "digest of 1 bytes"),
    ],
)
def test_an_offer_that_cannot_be_meant_is_refused(change: dict[str, object], said: str) -> None:
    offer = replace(keyring([0], Store()).offer(1), **change)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=said):
        KeyExchange(RUN, 3).add(offer)


@given(data=st.data())
def test_whatever_is_lost_all_come_to_one_roster(data: st.DataObject) -> None:
    """A server and processes that start again at any time, with their keys or without, in any grouping."""
    workers = 4
    stores = {worker: Store() for worker in range(workers)}

    class Several(Store):
        def __init__(self, hosted: list[int]) -> None:
            super().__init__()
            self._hosted = hosted

        def read(self) -> Mapping[int, OwnKey]:
            return {worker: stores[worker].kept[worker] for worker in self._hosted if stores[worker].kept}

        def write(self, keys: Mapping[int, OwnKey]) -> None:
            for worker, key in keys.items():
                stores[worker].write({worker: key})

    def processes() -> list[Keyring]:
        split = data.draw(st.integers(1, workers))
        hosted = [list(range(split)), list(range(split, workers))]
        return [keyring(each, Several(each), workers) for each in hosted if each]

    server, rings = KeyExchange(RUN, workers), processes()
    for _ in range(data.draw(st.integers(0, 12))):
        match data.draw(st.sampled_from(["offer", "lose", "server", "regroup", "take", "used"])):
            case "offer":
                server.add(data.draw(st.sampled_from(rings)).offer(server.epoch))
            case "used":
                server.add(data.draw(st.sampled_from(rings)).offer(server.epoch, range(workers)))
            case "lose":
                stores[data.draw(st.integers(0, workers - 1))].kept.clear()
                rings = processes()
            case "server":
                server = KeyExchange(RUN, workers)
            case "regroup":
                rings = processes()
            case "take" if server.is_complete:
                ring = data.draw(st.sampled_from(rings))
                if ring.offer(server.epoch).epoch == server.epoch:
                    server.add(ring.offer(server.epoch))
                if server.is_complete:
                    ring.take(server.epoch, server.roster)
    for _ in range(8):
        # Whoever comes is told which epoch is due; who offers an older one is told again.
        for ring in rings:
            server.add(ring.offer(server.epoch))
        if server.is_complete:
            break
    for ring in rings:
        ring.take(server.epoch, server.roster)
    digests = {store.kept[worker].roster for worker, store in stores.items()}
    keys = {worker: key for one in server.roster for worker, key in one.keys().items()}
    assert digests == {roster_digest(RUN, server.epoch, [keys[worker] for worker in range(workers)])}


def test_workers_of_one_process_that_go_by_different_rosters_begin_an_epoch() -> None:
    store = Store()
    store.kept = {worker: OwnKey(3, fresh(32), roster=bytes([worker]) * 32) for worker in (0, 1)}
    assert keyring([0, 1], store).offer(3).epoch == 4


def test_there_is_a_last_epoch() -> None:
    with pytest.raises(PeerError, match=f"waits for keys of epoch {LARGEST_EPOCH + 1}"):
        keyring([0], Store()).offer(LARGEST_EPOCH + 1)
    last = keyring([0], Store())
    assert last.offer(LARGEST_EPOCH).epoch == LARGEST_EPOCH
    with pytest.raises(PeerError, match="the last is"):
        last.offer(LARGEST_EPOCH, used=[0])
    for epoch in (0, LARGEST_EPOCH + 1):
        with pytest.raises(ProtocolError, match=f"keys of epoch {epoch}; they are 1 to"):
            KeyExchange(RUN, 3).add(replace(keyring([0], Store()).offer(1), epoch=epoch))


def test_a_roster_is_looked_at_once_however_often_it_comes() -> None:
    looked: list[tuple[int, ...]] = []
    rings, _, exchange = agreed()

    def verify(offer: KeyOffer) -> None:
        looked.append(offer.workers)
        check(offer)

    rings[0]._verify = verify  # noqa: SLF001
    masks = rings[0].take(1, exchange.roster)
    assert sorted(looked) == [(0,), (1,), (2,)]
    assert rings[0].take(1, exchange.roster) is masks
    # One that signs the same key again is looked at; the masks are the same.
    exchange.add(replace(rings[1].offer(1), certificates=(b"another",)))
    assert rings[0].take(1, exchange.roster) is masks
    assert looked[3:] == [(1,)]
    with pytest.raises(PeerError, match="the signature does not fit"):
        rings[0].take(1, [replace(offer, signature=b"") for offer in exchange.roster])


def test_a_roster_of_many_offers_costs_nothing() -> None:
    rings, _, exchange = agreed()
    rings[0]._verify = lambda _: pytest.fail("looked at")  # noqa: SLF001
    with pytest.raises(PeerError, match="more than the keys of 3 workers"):
        rings[0].take(1, exchange.roster * 1000)


def test_masks_cancel_around_the_ring_of_many_workers() -> None:
    workers = COMPLETE_UP_TO + 6
    hosted = [[*range(30)], *([worker] for worker in range(30, workers))]
    rings = [keyring(each, Store(), workers) for each in hosted]
    exchange = KeyExchange(RUN, workers)
    for ring in rings:
        exchange.add(ring.offer(1))
    total = np.zeros(40, dtype=np.uint64)
    alone = np.zeros(40, dtype=np.uint64)
    for each, ring in zip(hosted, rings, strict=True):
        masks = ring.take(1, exchange.roster)
        total += masks.draw(Position(1, 0), 0, 40, 64, each)
        for worker in each:
            alone += masks.draw(Position(1, 0), 0, 40, 64, [worker])
    assert not total.any()
    assert not alone.any()
