"""What leaves a worker: within the policy, and in the log before its frames are made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_worker_conversation import (
    DIM,
    FIRST,
    INTEGERS,
    SETTINGS,
    data_of,
    made,
    model,
    settings_of,
    welcome,
)

from afl.config.address import Address
from afl.core.messages import CommittedStep, Kind, Position, Step
from afl.errors import ExitCode, PolicyError
from afl.site.audit import digest_of, read_log
from afl.site.policy import Policy, SitePolicy
from afl.wire.settings import RunSettings
from afl_worker.conversation import CannotGoOnError, Conversation
from afl_worker.departures import NOT_LOGGED
from afl_worker.options import WorkerOptions
from afl_worker.training.timings import Spent

EVALUATION = CommittedStep(Step(Position(1, 255), Kind.EVALUATE), (), {})


def conversation(folder: Path, workers: tuple[int, ...] = (0, 1), **limits: Any) -> Conversation:
    policy = SitePolicy(Policy(audit=folder / "audit.jsonl", **limits))
    options = WorkerOptions(workers, Address("127.0.0.1", 1), journal=folder / "journals", policy=policy)
    return Conversation(options, torch.device("cpu"), Spent())


def entries(folder: Path) -> list[Mapping[str, Any]]:
    return [link.entry for link in read_log(folder / "audit.jsonl")]


def begun(folder: Path, of: RunSettings, workers: tuple[int, ...] = (0, 1), **limits: Any) -> Conversation:
    one = conversation(folder, workers, **limits)
    one.welcome(welcome(of), of)
    assert not made(one.step(model(of)))
    return one


def train(weights: Mapping[int, float]) -> CommittedStep:
    return CommittedStep(Step(FIRST, Kind.TRAIN), (), weights)


def test_every_report_is_in_the_log_before_its_frames_are_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one = begun(tmp_path, SETTINGS)
    assert "audit_opened" in [getattr(record, "event", "") for record in caplog.records]
    (joined,) = entries(tmp_path)
    assert (joined["kind"], joined["workers"], joined["run"]) == ("joined", [0, 1], "run-1")
    assert joined["told"] == {
        "server": "127.0.0.1:1",
        "task": "synthetic",
        "task_options": {"dim": DIM},
        "batch_size": 4,
        "algorithm": "afl-br",
        "rounds": 10,
        "of": 3,
    }
    reports = one.step(train({0: 0.5, 1: 0.5}))
    for count, frames in enumerate(reports):
        entry = entries(tmp_path)[-1]
        assert len(entries(tmp_path)) == 2 + count
        data = data_of(list(frames))
        assert (
            (entry["bytes"], entry["digest"]) == (len(data), digest_of([data])) == (4 * DIM, entry["digest"])
        )
        assert (entry["kind"], entry["workers"], entry["round"]) == ("train", [count], 1)
        assert entry["told"].keys() == {"losses", "examples"}
        assert entry["epsilon"] is None
    made(one.step(EVALUATION))
    last = entries(tmp_path)[-1]
    assert (last["kind"], last["phase"], last["bytes"], last["digest"]) == ("evaluate", 255, 0, None)
    assert last["told"]["metrics"] == ["loss"]


def test_a_joint_report_is_one_line(tmp_path: Path) -> None:
    one = begun(tmp_path, INTEGERS)
    (frames,) = made(one.step(train({0: 0.5, 1: 0.5})))
    entry = entries(tmp_path)[-1]
    assert entry["workers"] == [0, 1]
    assert entry["digest"] == digest_of([data_of(frames)])
    assert len(entry["told"]["losses"]) == 2


def test_what_leaves_again_is_marked_whichever_process_sends_it(tmp_path: Path) -> None:
    of = replace(SETTINGS, journal="process")
    message = welcome(of, expected=[(0, FIRST, False)])
    for process in range(2):
        one = conversation(tmp_path, (0,))
        one.welcome(message, of)
        if not process:
            made(one.step(model(of)))
            made(one.step(train({0: 0.5})))
        made(one.sent_again(message))
        one._trained.journals.close()  # noqa: SLF001  # as the process's end does
    trained = [entry for entry in entries(tmp_path) if entry["kind"] == "train"]
    assert [entry["again"] for entry in trained] == [False, True, True]
    assert len({entry["digest"] for entry in trained}) == 1


def test_a_server_that_asks_for_a_round_more_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    of = settings_of("afl-br", rounds=2)
    for _ in range(2):
        one = begun(tmp_path, of, (0,), max_rounds=2)
        # The same round, at another weight: the payload is another.
        made(one.step(train({0: 0.25 if len(entries(tmp_path)) < 3 else 0.5})))
    other = begun(tmp_path, of, (0,), max_rounds=2)
    with pytest.raises(PolicyError, match=r"worker 0 is asked for its answer no\. 3"):
        made(other.step(train({0: 0.75})))
    assert sum(entry["kind"] == "train" for entry in entries(tmp_path)) == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_policy_forbids_is_refused_whenever_settings_come(tmp_path: Path, is_first: bool) -> None:
    one = conversation(tmp_path, max_rounds=10)
    if not is_first:
        one.welcome(welcome(SETTINGS), SETTINGS)
    before = entries(tmp_path)
    more = replace(SETTINGS, parameters=replace(SETTINGS.parameters, rounds=11))
    with pytest.raises(PolicyError, match="11 rounds"):
        one.welcome(welcome(more), more)
    assert entries(tmp_path) == before


def test_minibatches_that_are_too_small_are_refused_before_anything_is_kept(tmp_path: Path) -> None:
    of = replace(SETTINGS, journal="process")
    with pytest.raises(PolicyError, match="minibatches of 4; worker 0 has 256 examples"):
        conversation(tmp_path, min_batch=5).welcome(welcome(of), of)
    assert not (tmp_path / "journals").exists()
    assert not entries(tmp_path)


def test_another_run_does_not_take_the_first_one_s_place(tmp_path: Path) -> None:
    one = begun(tmp_path, SETTINGS)
    with pytest.raises(CannotGoOnError, match="run_id is 'run-1' here and 'run-2' at the server"):
        one.welcome(welcome(SETTINGS, "run-2"), SETTINGS)


def test_what_is_told_of_a_failure_is_logged_and_what_cannot_be_logged_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = begun(tmp_path, SETTINGS)
    failed = one.broken(ValueError("a secret"))
    text = (failed.told.message + failed.told.traceback).encode()
    entry = entries(tmp_path)[-1]
    assert (entry["kind"], entry["told"]) == ("failure", {"bytes": len(text), "digest": digest_of([text])})
    monkeypatch.setattr(os, "write", lambda *_: 0)
    with pytest.raises(CannotGoOnError) as caught:
        made(one.step(train({0: 0.5, 1: 0.5})))
    assert (caught.value.told.message, caught.value.told.traceback) == (NOT_LOGGED, "")
    assert caught.value.error.exit_code is ExitCode.STORAGE


def test_a_line_that_was_cut_off_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path, SETTINGS)
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b"{")
    conversation(tmp_path)
    assert "audit_cut" in [getattr(record, "event", "") for record in caplog.records]
    assert len(entries(tmp_path)) == 1
