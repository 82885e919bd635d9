"""A worker's side of the conversation, without sockets: what a Welcome means, and what is sent again."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from afl.config import config_from_mapping
from afl.config.address import Address
from afl.core.algorithms.registry import server_half
from afl.core.codecs.payload import unpack
from afl.core.messages import (
    NOWHERE,
    Ack,
    AckStatus,
    CommittedStep,
    FailureCause,
    Kind,
    Position,
    Report,
    Step,
)
from afl.core.randomness import SharedRandomness
from afl.core.record_privacy import RecordPrivacy
from afl.errors import ConfigError, ExitCode, ProtocolError
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl.tasks.synthetic import Synthetic
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import Frame, parse_worker_frame, position_message, report_of
from afl.wire.settings import RunSettings
from afl_server.federation.broadcast import model_payloads
from afl_worker.conversation import CannotGoOnError, Conversation
from afl_worker.options import WorkerOptions
from afl_worker.training.timings import Spent

SEED = 7
DIM = 100_000
FIRST = Position(1, 0)


def settings_of(name: str, **algorithm: Any) -> RunSettings:
    return RunSettings.of_config(
        config_from_mapping(
            {
                "workers": 3,
                "worker": {"journal": "off"},
                "task": {"name": "synthetic", "batch_size": 4, "options": {"dim": DIM}},
                "algorithm": {"name": name, "rounds": 10, "eta_w": 0.05, "eta_q": 0.1, **algorithm},
                "faults": {"non_finite": "skip"} if algorithm else {},
            }
        )
    )


SETTINGS = settings_of("afl-br")
INTEGERS = settings_of("afl-com", uplink={"name": "rand-k", "ratio": 0.5, "bits": 8})


def welcome(
    of: RunSettings,
    run_id: str = "run-1",
    expected: Sequence[tuple[int, Position, bool]] = (),
    begun: pb.Expectation | None = None,
) -> pb.Welcome:
    """What a server says; ``begun`` is added to what it says of the first worker that it expects."""
    message = pb.Welcome(
        run_id=run_id,
        settings=of.to_message(),
        seed=SharedRandomness.from_int(SEED).seed,
        workers=[
            pb.Expectation(worker=worker, position=position_message(position), held=held)
            for worker, position, held in expected
        ],
    )
    if begun is not None:
        message.workers[0].MergeFrom(begun)
    return message


def conversation(folder: Path, workers: tuple[int, ...] = (0, 1)) -> Conversation:
    options = WorkerOptions(workers, Address("127.0.0.1", 1), journal=folder / "journals")
    return Conversation(options, torch.device("cpu"), Spent())


def model(of: RunSettings = SETTINGS) -> CommittedStep:
    vector = build_vector(
        load_task("synthetic", {"dim": DIM}, allow_path=True), SharedRandomness.from_int(SEED)
    )
    algorithm = server_half(
        replace(of.parameters, tensors=vector.tensors), vector.values, SharedRandomness.from_int(SEED)
    )
    payloads = list(model_payloads(vector, vector.values, algorithm.companions))
    step = Step(FIRST, Kind.MODEL, tuple(payload.header for payload in payloads))
    return CommittedStep(step, tuple(payload.data for payload in payloads), {})


def trained(
    folder: Path,
    workers: tuple[int, ...] = (0, 1),
    of: RunSettings = SETTINGS,
    weights: Mapping[int, float] | None = None,
) -> tuple[Conversation, list[list[Frame]]]:
    """One that was welcomed and has answered the first step; with the frames of its reports."""
    one = conversation(folder, workers)
    ready = one.welcome(welcome(of), of)
    assert ready.dim == DIM
    assert not made(one.step(model(of)))
    weights = weights or dict.fromkeys(workers, 0.5)
    return one, made(one.step(CommittedStep(Step(FIRST, Kind.TRAIN), (), weights)))


def made(reports: Iterable[Iterable[Frame]]) -> list[list[Frame]]:
    return [list(frames) for frames in reports]


def data_of(frames: Sequence[Frame]) -> bytes:
    return b"".join(chunk.data for frame in frames for chunk in parse_worker_frame(frame.data).chunks)


def test_a_worker_that_joins_again_says_what_it_has(tmp_path: Path) -> None:
    one, _ = trained(tmp_path)
    join = one.join()
    assert (join.run_id, join.applied) == ("run-1", position_message(FIRST))
    assert (conversation(tmp_path).join().run_id, conversation(tmp_path).join().applied) == (
        "",
        position_message(NOWHERE),
    )
    ready = one.welcome(welcome(SETTINGS), SETTINGS)
    assert ready.layout_hash == join.layout_hash
    assert not list(tmp_path.iterdir()), "no journal is kept where the run keeps none"
    assert [(each.worker, each.reported) for each in ready.workers] == [
        (worker, position_message(FIRST)) for worker in (0, 1)
    ]


def test_only_what_the_server_lacks_is_sent_again_in_chunks_of_its_present_size(tmp_path: Path) -> None:
    one, reports = trained(tmp_path)
    assert [len(frames) for frames in reports] == [2, 2], "an opening, and a chunk"
    again = replace(SETTINGS, chunk_bytes=65536, heartbeat=0.5, peer_timeout=7.0)
    message = welcome(again, expected=[(0, FIRST, True), (1, FIRST, False)])
    one.welcome(message, again)
    (second,) = made(one.sent_again(message))
    assert max(len(frame.data) for frame in second) < 66000
    assert data_of(second) == data_of(reports[1])
    assert parse_worker_frame(second[0].data).reports[0].worker == 1
    for open_position in (Position(2, 0), NOWHERE):
        message = welcome(again, expected=[(worker, open_position, False) for worker in (0, 1)])
        assert not made(one.sent_again(message))


@pytest.mark.parametrize("status", [AckStatus.ACCEPTED, AckStatus.LATE])
def test_a_report_that_was_answered_is_not_sent_again(
    tmp_path: Path, status: AckStatus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one, _ = trained(tmp_path)
    one.answered(Ack(1, FIRST, status, "" if status is AckStatus.ACCEPTED else "the round is over"))
    message = welcome(SETTINGS, expected=[(0, FIRST, False), (1, FIRST, False)])
    one.welcome(message, SETTINGS)
    (first,) = made(one.sent_again(message))
    assert parse_worker_frame(first[0].data).reports[0].worker == 0
    logged = [record.event for record in caplog.records if hasattr(record, "event")]
    assert ("put_back" in logged) is (status is AckStatus.LATE)


def test_other_settings_than_those_it_was_built_for_are_refused_by_name_and_the_server_told(
    tmp_path: Path,
) -> None:
    one, _ = trained(tmp_path)
    changed = replace(SETTINGS, parameters=replace(SETTINGS.parameters, eta_w=0.08), batch_size=3)
    with pytest.raises(CannotGoOnError) as refused:
        one.welcome(welcome(changed), changed)
    said = str(refused.value.error)
    assert "not those that this worker began with: batch_size is" in said
    assert "eta_w is 0.05 here and 0.08 at the server" in said
    assert "start this worker again" in said
    assert refused.value.error.exit_code == ExitCode.CONFIG
    assert "eta_w is 0.05" in refused.value.told.message


def test_a_failure_names_the_worker_whose_step_it_was(tmp_path: Path) -> None:
    one = conversation(tmp_path, (0, 1, 2))
    one.welcome(welcome(SETTINGS), SETTINGS)
    made(one.step(model()))
    step = CommittedStep(Step(FIRST, Kind.TRAIN), (), {0: 0.5, 2: float("inf")}, frozenset({0, 2}))
    reports = one.step(step)
    assert parse_worker_frame(next(iter(next(reports))).data).reports[0].worker == 0
    with pytest.raises(CannotGoOnError) as failed:
        next(reports)
    assert failed.value.told.worker == 2
    assert FailureCause(int(failed.value.told.cause)) is FailureCause.NON_FINITE
    assert str(failed.value.error).startswith("worker 2, round 1: ")


def test_what_a_task_says_in_an_error_of_ours_is_not_told_where_records_are_protected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(*_: object) -> Never:
        raise ConfigError("patient 7")

    records = RecordPrivacy(clip=1.0, loss_clip=5.0, delta=1e-5, noise=1.0)
    protected = replace(SETTINGS, parameters=replace(SETTINGS.parameters, records=records))
    one = conversation(tmp_path)
    one.welcome(welcome(protected), protected)
    made(one.step(model()))
    monkeypatch.setattr(Synthetic, "loss", loss)
    with pytest.raises(CannotGoOnError) as failed:
        made(one.step(CommittedStep(Step(FIRST, Kind.TRAIN), (), {0: 0.5, 1: 0.5})))
    assert "patient 7" in str(failed.value.error)
    assert "patient 7" not in str(failed.value.told)


@pytest.mark.parametrize("run_id", ["", "../elsewhere", "/etc", "a/b", "..", "a\n", "a" * 200])
def test_a_run_id_that_leads_out_of_the_folder_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ProtocolError, match="run id"):
        conversation(tmp_path).welcome(welcome(SETTINGS, run_id), SETTINGS)
    assert list(tmp_path.iterdir()) == []


# Joint reports.


def report_in(frames: Sequence[Frame]) -> Report:
    (opening,) = parse_worker_frame(frames[0].data).reports
    return report_of(opening)


def values_in(frames: Sequence[Frame]) -> NDArray[np.int32]:
    (header,) = report_in(frames).payloads
    values: NDArray[np.int32] = unpack(header, data_of(frames)).values
    return values


def test_workers_whose_messages_are_integers_report_together(tmp_path: Path) -> None:
    _, (joint,) = trained(tmp_path / "together", (0, 1, 2), INTEGERS)
    alone = [trained(tmp_path / str(worker), (worker,), INTEGERS)[1][0] for worker in range(3)]
    report = report_in(joint)
    assert report.workers == (0, 1, 2)
    assert [(own.loss, own.examples) for own in report.of_each()] == [
        (report_in(frames).loss, report_in(frames).examples) for frames in alone
    ]
    assert np.array_equal(values_in(joint), sum(map(values_in, alone)))


def test_a_worker_without_anything_finite_reports_alone(tmp_path: Path) -> None:
    weights = {0: 0.5, 1: math.inf, 2: 0.5}
    _, reports = trained(tmp_path, (0, 1, 2), INTEGERS, weights)
    missing, joint = map(report_in, reports)
    assert (missing.worker, missing.others, missing.payloads) == (1, (), ())
    assert missing.missing
    assert joint.workers == (0, 2)


@pytest.mark.parametrize(
    ("others", "first"), [((1, 2), 1000), ((1,), 0), ((), 0)], ids=["its own", "of fewer", "alone"]
)
@pytest.mark.parametrize("is_new", [False, True], ids=["cut", "killed"])
def test_a_joint_report_goes_on_where_it_was_cut_if_it_stands_for_the_same_workers(
    tmp_path: Path, others: tuple[int, ...], first: int, is_new: bool
) -> None:
    journalled = replace(INTEGERS, journal="process")
    one, (whole,) = trained(tmp_path, (0, 1, 2), journalled)
    if is_new:
        shutil.copytree(tmp_path, tmp_path / "left")
        one.finished("run-1")
        one = conversation(tmp_path / "left", (0, 1, 2))
    begun = pb.Expectation(offset=1000, others=others)
    expected = [(worker, FIRST, False) for worker in range(3)]
    message = welcome(journalled, expected=expected, begun=begun)
    one.welcome(message, journalled)
    (again,) = made(one.sent_again(message))
    one.finished("run-1")
    assert report_in(again) == report_in(whole)
    assert data_of(again) == data_of(whole)[first:]


def test_only_those_that_the_server_lacks_are_joined_again(tmp_path: Path) -> None:
    one, (whole,) = trained(tmp_path, (0, 1, 2), INTEGERS)
    message = welcome(INTEGERS, expected=[(worker, FIRST, worker == 1) for worker in range(3)])
    one.welcome(message, INTEGERS)
    (again,) = made(one.sent_again(message))
    assert report_in(again).workers == (0, 2)
    _, (second,) = trained(tmp_path / "alone", (1,), INTEGERS)
    assert np.array_equal(values_in(again) + values_in(second), values_in(whole))


@pytest.mark.parametrize("status", AckStatus)
def test_an_answer_is_for_all_workers_of_a_joint_report(
    tmp_path: Path, status: AckStatus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one, _ = trained(tmp_path, (0, 1, 2), INTEGERS)
    reason = "" if status is AckStatus.ACCEPTED else "why"
    for _ in range(2):
        one.answered(Ack(0, FIRST, status, reason, (1, 2)))
    logged = [record.event for record in caplog.records if hasattr(record, "event")]
    assert logged.count("put_back") == (3 if status is AckStatus.LATE else 0), "each once"
    assert logged.count("report_answered") == (0 if status is AckStatus.ACCEPTED else 6)
    message = welcome(INTEGERS, expected=[(worker, FIRST, False) for worker in range(3)])
    one.welcome(message, INTEGERS)
    is_kept = status in {AckStatus.DUPLICATE, AckStatus.REFUSED}
    assert bool(made(one.sent_again(message))) is is_kept


def test_nothing_can_be_answered_before_a_welcome(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="can only follow a Welcome"):
        conversation(tmp_path).answered(Ack(0, FIRST, AckStatus.LATE, "late"))


def test_a_failure_that_quotes_a_whole_array_is_told_within_the_server_s_limit(tmp_path: Path) -> None:
    one, _ = trained(tmp_path)
    told = one.broken(ValueError("é" * 3_000_000)).told
    assert told.ByteSize() < 200_000
    assert told.traceback.startswith("ValueError: é")
    assert "characters left out" in told.traceback
