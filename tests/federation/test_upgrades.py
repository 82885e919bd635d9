"""Server and workers of two releases work together, and a run goes on with another than began it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from afl import __version__
from afl.errors import ExitCode
from afl.runs.export.card import card_of
from afl.runs.export.source import find
from afl.runs.versions import read_versions
from afl.wire.frames import PROTOCOL
from support import Federation, Proxy, result_of, run_together
from support.commands import run_command
from support.process import KIT
from support.releases import Release, last_release, release_of_tree

CONFIG: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": 60,
        "eta_w": 0.3,
        "eta_q": 0.3,
        "uplink": {"name": "rand-k", "ratio": 0.2, "bits": 8},
        "downlink": {"name": "rand-k", "ratio": 0.2, "bits": 8},
        "optimizer": {"name": "momentum"},
    },
    "evaluation": {"every": 20},
    "worker": {"journal": "process"},
}

FRAMES = "common/afl/wire/frames.py"
NEWEST, OLDEST = f"\nPROTOCOL = {PROTOCOL}\n", f"\nOLDEST_PROTOCOL = {PROTOCOL}\n"
"""The lines of the present tree."""
NEXT = f"\nPROTOCOL = {PROTOCOL + 1}\n"

RUNTIME, PAUSE = "worker/afl_worker/runtime.py", "\nVERSION_PAUSE_S = 30.0\n"

PRESENT = Release(__version__, {"PYTHONPATH": str(KIT)})


@pytest.fixture(scope="module", params=["the next release", "the last release"])
def releases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Release, Release]:
    """An older and a newer release, of which one is the present tree."""
    folder = tmp_path_factory.mktemp("release")
    if request.param == "the next release":
        return PRESENT, release_of_tree(folder, "99.0.0", {FRAMES: {NEWEST: NEXT}})
    last = last_release(folder)
    if last is None:
        pytest.skip("there is no tag before this commit, so there was no release yet")
    # After a release its number is the tree's until the next is chosen.
    is_same = last.version == PRESENT.version
    return last, release_of_tree(folder / "next", "99.0.0", {}) if is_same else PRESENT


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """A release that has nothing in common with the present protocol, and looks again quickly."""
    changes = {
        FRAMES: {NEWEST: NEXT, OLDEST: f"\nOLDEST_PROTOCOL = {PROTOCOL + 1}\n"},
        RUNTIME: {PAUSE: "\nVERSION_PAUSE_S = 0.5\n"},
    }
    return release_of_tree(tmp_path_factory.mktemp("later"), "99.1.0", changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return result_of(run_together(CONFIG, tmp_path_factory.mktemp("undisturbed") / "run", ["0", "1"]))


@pytest.fixture
def door() -> Iterator[Proxy]:
    with Proxy() as door:
        yield door


@pytest.mark.parametrize("server", ["older", "newer"])
def test_old_and_new_work_together_to_the_bit(
    tmp_path: Path, door: Proxy, releases: tuple[Release, Release], undisturbed: dict[str, Any], server: str
) -> None:
    older, newer = releases
    of_server = older if server == "older" else newer
    with Federation(CONFIG, tmp_path / "run", environment=of_server.environment) as federation:
        federation.start("0", server=door.address, environment=older.environment)
        federation.start("1", server=door.address, environment=newer.environment)
        door.aim(federation.port)
        assert federation.server.wait_for("listening")["version"] == of_server.version
        federation.finish()
    assert result_of(federation) == undisturbed


def test_a_run_that_the_old_began_goes_on_with_the_new_to_the_bit(
    tmp_path: Path, door: Proxy, releases: tuple[Release, Release], undisturbed: dict[str, Any]
) -> None:
    older, newer = releases
    with Federation(CONFIG, tmp_path / "run", environment=older.environment) as federation:
        for ids in ("0", "1"):
            federation.start(ids, "--journal", f"journal-{ids}", server=door.address)
        door.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 15)
        federation.server.kill()
        federation.workers[1].kill()
        # Worker 0 stays as it is: its site upgrades last.
        federation.start_server(environment=newer.environment)
        federation.start("1", "--journal", "journal-1", server=door.address, environment=newer.environment)
        door.aim(federation.port)
        federation.finish()
        changed = federation.server.wait_for("version_changed")
        assert (changed["before"], changed["version"]) == (older.version, newer.version)
        assert changed["round"] >= 14
    assert result_of(federation) == undisturbed
    versions = [(older.version, 0), (newer.version, changed["round"])]
    written = read_versions(federation.directory)
    assert [(each.version, each.round) for each in written] == versions
    assert not federation.server.logged("arithmetic_changed")
    assert written[0].arithmetic in {"", written[1].arithmetic}, "a release may have written none"
    assert written[1].arithmetic
    shown = f"{older.version}, {newer.version} after round {changed['round']}"
    assert federation.summary()["afl_versions"] == shown
    source = find(federation.directory, "final", tmp_path / "copy.safetensors")
    assert card_of(source, None)["versions"]["trained_with_afl"] == shown
    command = ("-m", "afl_cli", "inspect", str(federation.directory))
    inspected = run_command(*command, environment={"COLUMNS": "200"})
    assert shown in inspected.stdout


def test_a_site_that_upgrades_first_waits_for_the_server(
    tmp_path: Path, door: Proxy, later: Release, undisturbed: dict[str, Any]
) -> None:
    """And the run that the older server began goes on with it."""
    with Federation(CONFIG, tmp_path / "run") as federation:
        early = federation.start("1", server=door.address, environment=later.environment)
        federation.start("0", server=door.address)
        door.aim(federation.port)
        for text in (f"install afl {later.version} at the server", f"speaks protocol {PROTOCOL + 1}"):
            early.wait_for("reconnecting", saying=text)
        federation.server.wait_for("refused", saying=f"install afl {later.version} at the server")
        federation.server.kill()
        federation.workers[1].kill()
        federation.start_server(environment=later.environment)
        federation.start("0", server=door.address, environment=later.environment)
        door.aim(federation.port)
        federation.finish()
        assert early.wait() == ExitCode.OK
    assert result_of(federation) == undisturbed


def test_a_site_that_upgrades_last_is_told_and_gives_up_with_a_code_of_its_own(
    tmp_path: Path, later: Release
) -> None:
    with Federation(CONFIG, tmp_path / "run", environment=later.environment) as federation:
        late = federation.start("0", "--give-up-after", "4s", environment=PRESENT.environment)
        late.expect(ExitCode.VERSION)
        present, other = f"(afl {__version__}) speaks protocol {PROTOCOL}", f"(afl {later.version}) protocol"
        for said in (
            f"this worker {present}, the server {other} {PROTOCOL + 1}: install afl",
            f"install afl {later.version} at the worker",
            "(--give-up-after 4.0 s)",
        ):
            assert said in late.text
        (line,) = late.logged("reconnecting")
        assert line["seconds"] == 30.0


@pytest.mark.long
def test_a_version_that_computes_otherwise_waits_before_it_has_computed(tmp_path: Path) -> None:
    changes = {
        "common/afl/core/algorithms/optimizers.py": {
            "        v += d\n        d[:] = v\n": "        v -= d\n        d[:] = v\n"
        },
        RUNTIME: {PAUSE: "\nVERSION_PAUSE_S = 0.2\n"},
    }
    other = release_of_tree(tmp_path / "other", "99.2.0", changes)
    with Federation(CONFIG, tmp_path / "run") as federation:
        worker = federation.start("0", "--give-up-after", "6s", environment=other.environment)
        worker.expect(ExitCode.VERSION)
        assert "this worker (afl 99.2.0) draws or computes something else" in worker.text
        assert len(federation.server.logged("refused")) > 1
        assert federation.status()["round"] == 0


def test_a_run_that_is_resumed_under_other_arithmetic_goes_on_and_is_told_once(tmp_path: Path) -> None:
    changes = {"common/afl/core/arithmetic.py": {"\nETA_W = 0.125\n": "\nETA_W = 0.25\n"}}
    other = release_of_tree(tmp_path / "other", __version__, changes)
    with Federation(CONFIG, tmp_path / "run") as federation:
        federation.start("0-1")
        federation.wait_until(lambda status: status["round"] >= 15)
        (began,) = read_versions(federation.directory)
        assert began.arithmetic
        federation.workers[0].kill()
        for is_told in (True, False):
            federation.server.kill()
            server = federation.start_server(environment=other.environment)
            server.wait_for("listening")
            assert bool(server.logged("arithmetic_changed")) == is_told
        assert not server.logged("version_changed")
        federation.start("0-1", environment=other.environment)
        federation.finish()
    first, second = read_versions(federation.directory)
    assert first == began
    assert second.version == began.version
    assert second.round >= 14
    assert second.arithmetic != began.arithmetic
