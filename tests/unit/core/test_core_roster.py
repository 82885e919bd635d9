"""Who may speak for a worker when several claim it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from afl_server import roster as roster_module
from afl_server.network.authentication import Identity
from afl_server.roster import Roster
from afl_server.session import Session, State


def session(workers: tuple[int, ...], incarnation: bytes) -> Session:
    made = Session(cast("Any", None), incarnation.decode(), Identity())
    made.workers, made.incarnation, made.state = workers, incarnation, State.READY
    return made


def test_of_two_newcomers_for_a_silent_session_the_second_meets_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roster_module, "PROBE_TIMEOUT_S", 0.05)

    async def claim_twice() -> tuple[Session | None, Session | None, Session]:
        roster = Roster(1)
        silent, quick = session((0,), b"silent"), session((0,), b"quick")
        roster.add(silent)
        roster.give(silent)
        claims = [asyncio.create_task(roster.rival(0, b"quick"))]
        await asyncio.sleep(0.02)
        claims.append(asyncio.create_task(roster.rival(0, b"late")))
        first = await claims[0]
        roster.remove(silent)
        roster.give(quick)
        return first, await claims[1], quick

    first, second, quick = asyncio.run(claim_twice())
    assert first is None
    assert second is quick


def test_a_session_that_answers_keeps_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "PROBE_TIMEOUT_S", 5.0)

    async def claim() -> tuple[Session | None, Session]:
        roster = Roster(1)
        alive = session((0,), b"alive")
        roster.add(alive)
        roster.give(alive)
        claiming = asyncio.create_task(roster.rival(0, b"other"))
        await asyncio.sleep(0)
        alive.heard.set()
        return await claiming, alive

    rival, alive = asyncio.run(claim())
    assert rival is alive


def test_how_long_a_worker_has_been_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(roster_module.time, "monotonic", lambda: now)

    async def come_and_go() -> list[float | None]:
        nonlocal now
        roster = Roster(2)
        absences = [roster.absence(0)]

        def come(incarnation: bytes, *, ready: bool) -> Session:
            made = session((0,), incarnation)
            roster.add(made)
            roster.give(made)
            if ready:
                roster.remember(made)
            return made

        roster.remove(come(b"never ready", ready=False))
        absences.append(roster.absence(0))
        roster.remove(come(b"first", ready=True))
        now = 103.0
        # One that comes and does not get ready does not make the worker less missing.
        roster.remove(come(b"second", ready=False))
        now = 105.0
        absences.append(roster.absence(0))
        third = come(b"third", ready=True)
        now = 200.0
        roster.remove(third)
        now = 201.0
        absences += [roster.absence(0), roster.absence(1)]
        return absences

    assert asyncio.run(come_and_go()) == [None, None, 5.0, 1.0, None]


def test_the_same_process_replaces_its_own_session() -> None:
    async def come_back() -> Session | None:
        roster = Roster(1)
        old = session((0,), b"same")
        roster.add(old)
        roster.give(old)
        return await roster.rival(0, b"same")

    assert asyncio.run(come_back()) is None


def test_a_worker_is_expected_back_for_a_while_after_it_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(roster_module.time, "monotonic", lambda: now)
    roster = Roster(3)
    steady, lost = session((0,), b"steady"), session((1,), b"lost")
    for each in (steady, lost):
        roster.add(each)
        roster.give(each)
        roster.remember(each)
    assert roster.returning() == [2], "it may be starting, as this process was"
    now += 60.0
    assert roster.returning() == []
    roster.remove(lost)
    now += 9.0
    assert roster.returning() == [1]
    now += 2.0
    assert roster.returning() == []
