"""Wrong configurations, wrong command lines, broken tasks, and peers that lie.

Two rules: what a person did wrong is named, with the exit code the documents give it; and a federation that
is attacked ends with the bits it would have ended with alone.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from afl._version import __version__
from afl.core.codecs.indices import Coding, encode
from afl.errors import ExitCode
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import PROTOCOL
from support import Federation, Process, Proxy, RawClient, Reference
from support.federation import completed

Change = Callable[[pb.WorkerFrame], object]

DIM, WORKERS, VICTIM = 100, 4, 3
K = 10
CONFIG: dict[str, Any] = {
    "workers": WORKERS,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": 400,
        "eta_w": 0.9,
        "eta_q": 0.3,
        "uplink": {"name": "top-k", "ratio": K / DIM},
    },
    "evaluation": {"every": 100},
    "server": {"handshake_timeout": "2s", "max_sessions": 8},
}


@pytest.fixture(scope="module")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A federation in its first round that waits for the report of worker 3 alone."""
    with Federation(CONFIG, tmp_path_factory.mktemp("besieged")) as federation:
        federation.start("0-2")
        federation.wait_until(lambda status: status["reports_missing"] == [VICTIM])
        yield federation


@pytest.fixture(scope="module")
def link() -> Iterator[Proxy]:
    with Proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def training(besieged: Federation, link: Proxy) -> Federation:
    """The same federation once worker 3 has come; its slow line keeps the rounds slow."""
    link.aim(besieged.port)
    link.delay = 0.05
    besieged.start(str(VICTIM), server=link.address)
    besieged.wait_until(lambda status: status["round"] >= 3)
    return besieged


# A worker that lies in its reports.


def packed(indices: Sequence[int]) -> bytes:
    """Indices of 7 bits each, in the order given: 7 bits of every integer, from the lowest bit on."""
    value = sum(index << (7 * place) for place, index in enumerate(indices))
    return value.to_bytes((7 * len(indices) + 7) // 8, "little")


def honest_report(dual_weight: float, *, coded: bytes | None = None) -> pb.WorkerFrame:
    """A report for round 1 that the server would take, of values that are nobody's gradient."""
    data = packed(range(K)) if coded is None else coded
    payload = pb.Payload(
        role="ROLE_UPDATE",
        encoding="ENCODING_INDEXED",
        value_type="VALUE_TYPE_FLOAT32",
        dim=DIM,
        count=K,
        index_coding="INDEX_CODING_PACKED",
        index_bytes=len(data),
        value_bytes=4 * K,
    )
    report = pb.Report(
        worker=VICTIM, position=pb.Position(round=1), loss=dual_weight, examples=8, payloads=[payload]
    )
    values = np.full(K, 1e3, dtype="<f4").tobytes()
    return pb.WorkerFrame(reports=[report], chunks=[pb.Chunk(worker=VICTIM, data=data + values)])


def with_values(frame: pb.WorkerFrame, value: float) -> None:
    chunk = frame.chunks[0]
    chunk.data = chunk.data[: -4 * K] + np.array([1.0] * (K - 1) + [value], dtype="<f4").tobytes()


def with_indices(indices: Sequence[int]) -> Change:
    def change(frame: pb.WorkerFrame) -> None:
        chunk = frame.chunks[0]
        chunk.data = packed(indices) + chunk.data[-4 * K :]

    return change


def with_bitmap(frame: pb.WorkerFrame) -> None:
    """A bitmap of nine ones for ten values."""
    data = encode(np.arange(K - 1), DIM, Coding.BITMAP).data[:9]
    payload, chunk = frame.reports[0].payloads[0], frame.chunks[0]
    payload.index_coding = pb.INDEX_CODING_BITMAP
    payload.index_bytes = len(data)
    chunk.data = data + chunk.data[-4 * K :]


def field(path: str, value: Any) -> Change:
    """Set ``reports[0].loss`` and the like."""

    def change(frame: pb.WorkerFrame) -> None:
        target: Any = frame
        *steps, last = re.findall(r"\w+", path)
        for step in steps:
            target = target[int(step)] if step.isdecimal() else getattr(target, step)
        setattr(target, last, value)

    return change


HUGE = 1 << 60
BAD_REPORTS: dict[str, tuple[Change, str]] = {
    "too few bytes announced": (field("reports.0.payloads.0.value_bytes", 4 * K - 4), "value_bytes is 36"),
    "payload longer than announced": (
        lambda frame: setattr(frame.chunks[0], "data", frame.chunks[0].data + b"\0"),
        "a chunk of 50 bytes at byte 0 of a payload of 49 bytes",
    ),
    "empty chunk": (field("chunks.0.data", b""), "a chunk of 0 bytes"),
    "indices not ascending": (with_indices([9, 8, *range(8)]), "ascending"),
    "repeated index": (with_indices([0, 0, *range(1, 9)]), "ascending"),
    "index out of range": (with_indices([*range(9), 120]), "120"),
    "bitmap with too few ones": (with_bitmap, "bitmap"),
    "unknown index coding": (field("reports.0.payloads.0.index_coding", 77), "77"),
    "a round to come": (field("reports.0.position.round", 2), "round 2"),
    "a phase to come": (field("reports.0.position.phase", 1), "phase 1"),
    "value not a number": (lambda frame: with_values(frame, float("nan")), "not finite"),
    "infinite value": (lambda frame: with_values(frame, float("inf")), "not finite"),
    "loss not a number": (field("reports.0.loss", float("nan")), "loss"),
    "infinite loss": (field("reports.0.loss", float("-inf")), "loss"),
    "no examples": (field("reports.0.examples", 0), "0 examples"),
    "a residual of negative norm": (field("reports.0.residual_norm", -1.0), "a residual of norm -1.0"),
    "a residual without a norm": (field("reports.0.residual_norm", float("nan")), "a residual of norm nan"),
    "a tensor's residual of negative norm": (
        lambda frame: frame.reports[0].tensor_residual_norms.extend([0.5, -1.0]),
        "a residual of norm -1.0",
    ),
    "norms where there are no integers": (
        lambda frame: frame.reports[0].tensor_residual_norms.extend([0.5]),
        "1 norms of its residual by tensor; here there are 0",
    ),
    "no payload": (lambda frame: frame.reports[0].ClearField("payloads"), "0 payloads; 1 are due"),
    "two payloads": (
        lambda frame: frame.reports[0].payloads.append(frame.reports[0].payloads[0]),
        "2 payloads; 1 are due",
    ),
    "payload of 2^60 bytes": (field("reports.0.payloads.0.value_bytes", HUGE), str(HUGE)),
    "indices of 2^60 bytes": (field("reports.0.payloads.0.index_bytes", HUGE), str(HUGE)),
    "2^60 values": (field("reports.0.payloads.0.count", HUGE), str(HUGE)),
    "dimension 2^60": (field("reports.0.payloads.0.dim", HUGE), str(HUGE)),
    "another dimension": (field("reports.0.payloads.0.dim", DIM + 1), "dim is 101"),
    "chunk at byte 2^60": (field("chunks.0.offset", HUGE), str(HUGE)),
    "chunk of payload 5": (field("chunks.0.payload", 5), "payload 5"),
    "another worker's report": (field("reports.0.worker", 1), "worker 1 is not one of this session's"),
    "another worker's chunk": (field("chunks.0.worker", 1), "worker 1 is not one of this session's"),
    "worker 2^31": (field("reports.0.worker", 1 << 31), "is not one of this session's"),
    "unknown role": (field("reports.0.payloads.0.role", 99), "role of a payload: 99"),
    "unknown encoding": (field("reports.0.payloads.0.encoding", 99), "encoding of a payload: 99"),
    "unknown value type": (field("reports.0.payloads.0.value_type", 99), "value type of a payload: 99"),
    "a model instead of an update": (field("reports.0.payloads.0.role", pb.ROLE_MODEL), "role is MODEL"),
    "values without indices": (
        field("reports.0.payloads.0.encoding", pb.ENCODING_SEEDED),
        "encoding is SEEDED",
    ),
    "metrics given twice": (
        lambda frame: frame.reports[0].metrics.extend([pb.Metric(name="loss", value=1)] * 2),
        "a metric twice",
    ),
    "a metric not a number": (
        lambda frame: frame.reports[0].metrics.append(pb.Metric(name="loss", value=float("nan"))),
        "metric loss is nan",
    ),
    "a thousand metrics": (
        lambda frame: frame.reports[0].metrics.extend(
            pb.Metric(name=f"m{number}", value=1) for number in range(1000)
        ),
        "1000 metrics",
    ),
}


@pytest.mark.parametrize("what", BAD_REPORTS)
def test_a_bad_report_is_refused_and_counts_for_nothing(besieged: Federation, what: str) -> None:
    goodbye = refused(besieged, *BAD_REPORTS[what])
    assert besieged.server.wait_for("refused", saying=goodbye.reason)


def refused(besieged: Federation, change: Change, reason: str) -> pb.Goodbye:
    """What the server answers to an honest report that was changed; the report does not count."""
    with RawClient(besieged.port) as liar:
        liar.handshake([VICTIM])
        frame = honest_report(0.1)
        change(frame)
        liar.send(frame)
        goodbye = liar.goodbye()
    assert goodbye.status == pb.Goodbye.STATUS_REFUSED
    assert reason in goodbye.reason
    assert besieged.status()["reports_missing"] == [VICTIM]
    return goodbye


def copies(part: str, count: int) -> Change:
    def change(frame: pb.WorkerFrame) -> None:
        parts = getattr(frame, part)
        parts.extend([parts[0]] * (count - 1))

    return change


SWARMS: dict[str, tuple[Change, str]] = {
    "two reports of one worker": (copies("reports", 2), "a frame of 2 reports in a session of 1 workers"),
    "340000 empty reports": (
        lambda frame: frame.CopyFrom(pb.WorkerFrame(reports=[pb.Report(worker=VICTIM)] * 340_000)),
        "a frame of 340000 reports in a session of 1 workers",
    ),
    "300000 empty chunks": (
        lambda frame: frame.CopyFrom(pb.WorkerFrame(chunks=[pb.Chunk(worker=VICTIM)] * 300_000)),
        "a frame of 300000 chunks; 1028 are the most",
    ),
    "300000 payloads": (
        lambda frame: frame.reports[0].payloads.extend([pb.Payload(dim=1)] * 299_999),
        "300000 payloads; 16 are the most",
    ),
    "300000 others": (
        lambda frame: frame.reports[0].others.extend([pb.Share()] * 300_000),
        "300000 others in its report; 1023 are the most",
    ),
    "300000 metrics": (
        lambda frame: frame.reports[0].metrics.extend([pb.Metric()] * 300_000),
        "300000 metrics; 64 are the most",
    ),
}


@pytest.mark.parametrize("what", SWARMS)
def test_a_frame_of_countless_parts_is_refused_before_it_costs_time(besieged: Federation, what: str) -> None:
    refused(besieged, *SWARMS[what])


SMALL_WINDOW = {"grpc__http2__lookahead_bytes": 1 << 16, "grpc__http2__bdp_probe": 0}
"""So that what a client has not read is waiting at the server."""


def test_a_peer_that_reads_no_answers_is_cut_off(besieged: Federation) -> None:
    """It asks, by reports of the past or by heartbeats, for more than may wait to be taken."""
    late = pb.WorkerFrame(reports=[pb.Report(worker=VICTIM)]).SerializeToString()
    beat = pb.WorkerFrame(heartbeat=pb.Heartbeat(reply_wanted=True)).SerializeToString()
    for question, count in ((late, 5_000), (beat, 60_000)):
        with RawClient(besieged.port, **SMALL_WINDOW) as deaf:
            deaf.handshake([VICTIM])
            deaf.takes.clear()
            before = len(besieged.server.logged("not_reading"))
            for _ in range(count):
                deaf.send(question)
            besieged.server.wait_for("not_reading", count=before + 1, workers=f"[{VICTIM}]")
            deaf.takes.set()
            assert deaf.wait_for_end() is grpc.StatusCode.UNAVAILABLE
    besieged.wait_until(lambda status: status["reports_missing"] == [VICTIM])


def test_a_peer_that_takes_not_even_its_goodbye_is_cut_off(tmp_path: Path) -> None:
    """It is sent a model that it does not read, says nothing, and is given up; nothing of it stays."""
    config = {
        **CONFIG,
        "workers": 1,
        "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 1_000_000, "examples": 16}},
        "server": {"heartbeat": "100ms", "peer_timeout": "1s"},
    }
    with Federation(config, tmp_path / "f") as federation:
        with RawClient(federation.port) as first:
            ready = first.ready_message(first.join([0]))
        federation.server.wait_for("session_ended")
        before = len(list(Path(f"/proc/{federation.server.pid}/fd").iterdir()))
        with RawClient(federation.port, **SMALL_WINDOW) as deaf:
            deaf.join([0])
            deaf.takes.clear()
            deaf.send(ready=ready)
            federation.server.wait_for("peer_timeout", workers="[0]")
            federation.server.wait_for("not_reading", workers="[0]")
            deaf.takes.set()
            assert deaf.wait_for_end() is grpc.StatusCode.UNAVAILABLE
            federation.wait_until(
                lambda _: len(list(Path(f"/proc/{federation.server.pid}/fd").iterdir())) <= before
            )
        assert federation.metrics()["afl_sessions"] == 0


def test_a_chunk_without_a_report_is_passed_over(besieged: Federation) -> None:
    """It may belong to a report that was answered as a duplicate; it moves nothing."""
    with RawClient(besieged.port) as liar:
        liar.handshake([VICTIM])
        frame = honest_report(0.1)
        frame.ClearField("reports")
        liar.send(frame)
        liar.send(heartbeat=pb.Heartbeat(reply_wanted=True))
        liar.receive_part("heartbeat")
    assert besieged.status()["reports_missing"] == [VICTIM]


def test_half_a_report_and_a_cut_count_for_nothing(besieged: Federation) -> None:
    with RawClient(besieged.port) as liar:
        liar.handshake([VICTIM])
        frame = honest_report(0.1)
        frame.chunks[0].data = frame.chunks[0].data[:20]
        liar.send(frame)
        liar.send(heartbeat=pb.Heartbeat(reply_wanted=True))
        liar.receive_part("heartbeat")
    assert besieged.status()["reports_missing"] == [VICTIM]


def test_peers_that_hang_up_before_they_are_answered_leave_no_traceback(besieged: Federation) -> None:
    for attempt in range(90):
        with RawClient(besieged.port) as client:
            client.send(join=client.join_message([VICTIM]))
            if attempt % 2:
                client.send(goodbye=pb.Goodbye(reason="it goes"))
            client.end()
            time.sleep(0.001 * (attempt % 6))
    with RawClient(besieged.port) as client:
        client.join([VICTIM])
    assert not besieged.server.unexpected


# A peer that lies about who it is.


def joined(**changes: Any) -> Callable[[RawClient], None]:
    def attack(client: RawClient) -> None:
        client.send(join=client.join_message([VICTIM], **changes))

    return attack


def readied(**changes: Any) -> Callable[[RawClient], None]:
    def attack(client: RawClient) -> None:
        client.send(ready=client.ready_message(client.join([VICTIM]), **changes))

    return attack


def twice(client: RawClient) -> None:
    client.join([VICTIM])
    client.send(join=client.join_message([VICTIM]))


def ready_first(client: RawClient) -> None:
    client.send(ready=pb.Ready(dim=DIM))


def ready_twice(client: RawClient) -> None:
    ready = client.ready_message(client.join([VICTIM]))
    client.send(ready=ready)
    client.send(ready=ready)


def report_first(client: RawClient) -> None:
    client.join([VICTIM])
    client.send(honest_report(0.1))


LIES: dict[str, tuple[Callable[[RawClient], None], str]] = {
    "another run": (joined(run_id="20200101-000000-abcdef"), "belongs to run 20200101-000000-abcdef"),
    "another task": (joined(task="fashion-mnist"), "'fashion-mnist'"),
    "a task that does not exist": (joined(task="no-such-task"), "'no-such-task'"),
    "another layout at once": (joined(layout_hash=b"x" * 16), "the model's layout"),
    "another layout after loading": (readied(layout_hash=b"x" * 16, dim=7), "has 7 trainable parameters"),
    "another realization": (readied(realization_digest=b"x" * 16), "shared randomness differs"),
    "no digest": (readied(realization_digest=b""), "shared randomness differs"),
    "an id out of range": (joined(workers=[WORKERS]), f"worker {WORKERS} is out of range"),
    "an id of 2^32 - 1": (joined(workers=[2**32 - 1]), "out of range"),
    "no worker": (joined(workers=[]), "names no worker"),
    "a worker twice": (joined(workers=[3, 3]), "each named once"),
    "workers not ascending": (joined(workers=[3, 2]), "ascending"),
    "seventy thousand workers": (joined(workers=[*range(70_000)]), "out of range"),
    "a second Join": (twice, "a second Join"),
    "a Ready first": (ready_first, "must be a Join"),
    "a second Ready": (ready_twice, "a Ready that does not follow a Join"),
    "a report before it is ready": (report_first, "before the session is ready"),
    "a chunk first": (lambda client: client.send(chunks=[pb.Chunk(data=b"x")]), "must be a Join"),
    "a heartbeat first": (lambda client: client.send(heartbeat=pb.Heartbeat()), "must be a Join"),
    "an empty frame": (lambda client: client.send(b""), "must be a Join"),
    "garbage": (lambda client: client.send(b"\xff" * 999), "a frame of 999 bytes that cannot be parsed"),
    "a name that is no text": (
        lambda client: client.send(b"\x0a\x04\x12\x02\xff\xfe"),
        "a frame of 6 bytes that cannot be parsed",
    ),
    "a frame cut short": (
        lambda client: client.send(pb.WorkerFrame(join=client.join_message([0])).SerializeToString()[:-3]),
        "cannot be parsed",
    ),
    "silence": (lambda client: None, "no Join within 2 s"),
}


@pytest.mark.parametrize("what", LIES)
def test_a_liar_is_refused_and_told_why(besieged: Federation, what: str) -> None:
    attack, reason = LIES[what]
    before = besieged.metrics()["afl_refused_sessions_total"]
    with RawClient(besieged.port) as liar:
        attack(liar)
        goodbye = liar.goodbye()
    assert goodbye.status == pb.Goodbye.STATUS_REFUSED
    assert reason in goodbye.reason
    assert besieged.metrics()["afl_refused_sessions_total"] == before + 1


@pytest.mark.parametrize(
    ("newest", "oldest", "reason"),
    [
        (99, 98, "speaks protocols 98 to 99, the server"),
        (99, 0, "speaks protocol 99, the server"),
        (2, 0, "speaks protocol 2, the server"),
        (2, 9, "speaks protocols 9 to 2, the server"),
    ],
)
def test_a_worker_without_a_common_protocol_is_told_to_wait(
    besieged: Federation, newest: int, oldest: int, reason: str
) -> None:
    with RawClient(besieged.port) as stranger:
        stranger.send(join=stranger.join_message([VICTIM], protocol=newest, oldest_protocol=oldest))
        goodbye = stranger.goodbye()
    assert goodbye.status == pb.Goodbye.STATUS_OTHER_VERSION
    assert reason in goodbye.reason


@pytest.mark.parametrize(
    ("version", "status"),
    [("9.9.9", pb.Goodbye.STATUS_OTHER_VERSION), (__version__, pb.Goodbye.STATUS_REFUSED)],
)
def test_who_computes_otherwise_waits_only_where_an_upgrade_may_help(
    besieged: Federation, version: str, status: int
) -> None:
    with RawClient(besieged.port) as other:
        welcome = other.join([VICTIM], package_version=version)
        other.send(ready=other.ready_message(welcome, realization_digest=b"x" * 16))
        goodbye = other.goodbye()
    assert goodbye.status == status
    assert f"this worker (afl {version}) draws or computes something else" in goodbye.reason


@pytest.mark.parametrize(("newest", "oldest"), [(PROTOCOL, 0), (PROTOCOL, 1), (99, PROTOCOL)])
def test_a_worker_with_a_common_protocol_is_welcome_whatever_its_version(
    besieged: Federation, newest: int, oldest: int
) -> None:
    with RawClient(besieged.port) as other:
        welcome = other.join([VICTIM], package_version="9.9.9", protocol=newest, oldest_protocol=oldest)
        assert welcome.protocol == PROTOCOL


def test_refusals_that_are_alike_write_one_line_a_second(besieged: Federation) -> None:
    """Each is told why, and counted; the log is not filled."""
    before = besieged.metrics()["afl_refused_sessions_total"]
    lines = len(besieged.server.logged("refused", reason="a frame of 77 bytes that cannot be parsed"))
    assert lines == 0
    for _ in range(100):
        with RawClient(besieged.port) as liar:
            liar.send(b"\xff" * 77)
            assert "77 bytes" in liar.goodbye().reason
    assert besieged.metrics()["afl_refused_sessions_total"] == before + 100
    found = besieged.server.logged("refused", reason="a frame of 77 bytes that cannot be parsed")
    seconds = {line["time"][:19] for line in found}
    assert len(found) <= len(seconds) + 1
    assert found[0]["left_out"] == 0
    assert len(found) + sum(line["left_out"] for line in found) <= 100


def test_fields_of_the_future_are_passed_over(besieged: Federation) -> None:
    with RawClient(besieged.port) as client:
        unknown_field = b"\xfa\x3e\x03abc"
        client.send(pb.WorkerFrame(join=client.join_message([VICTIM])).SerializeToString() + unknown_field)
        assert client.receive_part("welcome").run_id
        client.send(goodbye=pb.Goodbye(status=pb.Goodbye.STATUS_LEAVING))
        assert client.wait_for_end() is grpc.StatusCode.OK


def test_a_failure_of_unknown_cause_is_logged(besieged: Federation) -> None:
    with RawClient(besieged.port) as client:
        client.join([VICTIM])
        failure = pb.Failure(worker=VICTIM, message="odd", traceback="Traceback: here")
        failure.cause = 55  # type: ignore[assignment]
        client.send(failure=failure)
        line = besieged.server.wait_for("worker_failed", worker=VICTIM)
    besieged.server.expect_traceback("Traceback: here")
    assert "Traceback: here" in line["message"]


# While it trains.


def test_too_many_sessions_are_asked_to_come_later(training: Federation) -> None:
    with contextlib.ExitStack() as silent:
        # Each holds its place until the handshake timeout; on a busy machine it may take a second try.
        for _ in range(3):
            for _ in range(CONFIG["server"]["max_sessions"] - 2):
                silent.enter_context(RawClient(training.port))
            with RawClient(training.port) as one_too_many:
                goodbye = one_too_many.goodbye()
            if goodbye.status == pb.Goodbye.STATUS_TRY_LATER:
                break
    assert goodbye.status == pb.Goodbye.STATUS_TRY_LATER
    assert "as many as server.max_sessions allows" in goodbye.reason


def test_a_message_over_the_limit_ends_its_own_stream_only(training: Federation) -> None:
    with RawClient(training.port) as giant:
        giant.send(b"\0" * (64 << 20))
        assert giant.wait_for_end() in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
    assert training.server.is_running


@pytest.mark.parametrize("what", ["garbage", "another run", "a chunk first", "an id out of range", "silence"])
def test_liars_while_it_trains(training: Federation, what: str) -> None:
    attack, reason = LIES[what]
    with RawClient(training.port) as liar:
        attack(liar)
        goodbye = liar.goodbye()
    assert goodbye.status == pb.Goodbye.STATUS_REFUSED
    assert reason in goodbye.reason


def test_a_second_process_with_the_same_id_is_refused(training: Federation) -> None:
    with RawClient(training.port) as liar:
        liar.send(join=liar.join_message([VICTIM]))
        goodbye = liar.goodbye()
    assert goodbye.status == pb.Goodbye.STATUS_REFUSED
    assert f"worker {VICTIM} is taken" in goodbye.reason


def test_commands_that_do_not_belong(training: Federation, tmp_path: Path) -> None:
    """Real processes, all at once."""
    twin = training.start("2")
    stranger = training.start("9")
    other_task = training.start("2", "--task", "digits")
    second = server_process(
        tmp_path, {**CONFIG, "server": {"listen": f"127.0.0.1:{training.port}"}}, "second server"
    )
    try:
        for process, reason in (
            (twin, "worker 2 is taken"),
            (stranger, "worker 9 is out of range"),
            (other_task, "the task 'digits'"),
        ):
            process.expect(ExitCode.REFUSED)
            (end,) = process.logged("ended")
            assert plain(end["message"]).startswith(f"the server refused this worker: {reason}")
            assert end["code"] == ExitCode.REFUSED
            assert process.text.count("the server refused this worker") == 1, "said once"
        assert other_task.logged("ended")[0]["message"].endswith(
            "the run's is 'synthetic'. Start it with --task synthetic, or without --task"
        )
        second.expect(ExitCode.PORT)
        taken = f"server.listen: cannot listen on 127.0.0.1:{training.port}: another process listens there"
        assert second.text == f"afl-server: {taken}; name another port, or end that process\n"
        assert not (tmp_path / "run").exists(), "a run that never was has taken its directory"
    finally:
        second.close()


def plain(text: str) -> str:
    return re.sub(r"this worker was started for the task", "the task", text)


def test_the_attacked_run_ends_with_the_right_bits(training: Federation, link: Proxy) -> None:
    link.delay = 0.0
    training.finish()
    reference = Reference.of(CONFIG)
    assert training.model("final")["w"].numpy().tobytes() == reference.weights[-1].tobytes()
    assert training.summary()["result"] == "ok"


def test_a_report_begun_by_one_process_and_made_by_another(tmp_path: Path) -> None:
    """With rand-k the first process's part is in the sum already: the round is summed again."""
    config = {
        **CONFIG,
        "workers": 2,
        "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 30_000, "examples": 16}},
        "algorithm": {**CONFIG["algorithm"], "rounds": 8, "uplink": {"name": "rand-k", "ratio": 0.1}},
        "server": {"chunk_bytes": "4KiB"},
    }
    count = 3000
    with Proxy() as door, Federation(config, tmp_path / "run") as federation:
        federation.start("0", server=door.address)
        federation.start("1")
        federation.wait_until(lambda status: status["reports_missing"] == [0])
        with RawClient(federation.port, answers=True) as first:
            first.handshake([0])
            payload = pb.Payload(
                role="ROLE_UPDATE",
                encoding="ENCODING_SEEDED",
                value_type="VALUE_TYPE_FLOAT32",
                dim=30_000,
                count=count,
                value_bytes=4 * count,
            )
            report = pb.Report(position=pb.Position(round=1), loss=5.0, examples=8, payloads=[payload])
            values = np.full(1000, 7.0, dtype="<f4").tobytes()
            first.send(reports=[report], chunks=[pb.Chunk(data=values)])
            first.send(heartbeat=pb.Heartbeat(reply_wanted=True))
            first.receive_part("heartbeat")
        federation.server.wait_for("session_ended")
        door.aim(federation.port)
        federation.finish()
        assert federation.server.logged("round_restarted", worker=0)
    reference = Reference.of(config)
    assert federation.model("final")["w"].numpy().tobytes() == reference.weights[-1].tobytes()


# What a person may get wrong.


def server_process(folder: Path, config: dict[str, Any], name: str) -> Process:
    """A server that is expected to refuse its configuration; no federation is made of it."""
    import yaml  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(completed(config, folder / "run")), encoding="utf-8")
    return Process(name, ["-m", "afl_server", "--config", str(path)], folder=folder)


def worker_process(folder: Path, *arguments: str) -> Process:
    return Process("worker", ["-m", "afl_worker", *arguments], folder=folder)


def test_servers_that_cannot_start(tmp_path: Path) -> None:
    misspelt: dict[str, Any] = {
        **CONFIG,
        "algorithm": {
            **CONFIG["algorithm"],
            "etaw": 0.1,
            "uplink": {"name": "rand-k", "ratio": 1.5},
        },
    }
    processes = {
        "misspelt": server_process(tmp_path, misspelt, "misspelt"),
        "normalized": server_process(
            tmp_path / "n", {**CONFIG, "task": {"name": "tests_tasks:Normalized"}}, "normalized"
        ),
        "frozen": server_process(
            tmp_path / "f", {**CONFIG, "task": {"name": "tests_tasks:Frozen"}}, "frozen"
        ),
    }
    try:
        for process in processes.values():
            process.expect(ExitCode.CONFIG)
            assert "Traceback" not in process.text
        for said in ("misspelt.yaml", "algorithm.etaw", "eta_w", "algorithm.uplink.ratio", "1.5"):
            assert said in processes["misspelt"].text
        assert "a number above 0 and at most 1" in processes["misspelt"].text
        for said in ("BatchNorm1d", "1.running_mean", "GroupNorm", 'buffers = "local"'):
            assert said in processes["normalized"].text
        assert "has no trainable parameter (2 parameters, all frozen or empty)" in processes["frozen"].text
    finally:
        for process in processes.values():
            process.close()
    assert not (tmp_path / "run").exists()


def test_servers_that_are_not_there(tmp_path: Path) -> None:
    with Proxy() as nobody:
        port = nobody.port
    processes = {
        "wrong port": worker_process(
            tmp_path, "--id", "0", "--server", f"127.0.0.1:{port}", "--give-up-after", "2s"
        ),
        "no such host": worker_process(
            tmp_path,
            *("--id", "0", "--server", "no-such-host.invalid:50051", "--give-up-after", "2s", "--insecure"),
        ),
        "plaintext": worker_process(tmp_path, "--id", "0", "--server", "no-such-host.invalid:50051"),
        "wildcard": worker_process(tmp_path, "--id", "0", "--server", "0.0.0.0:50051"),
        "no port": worker_process(tmp_path, "--id", "0", "--server", "localhost"),
    }
    expected = {
        "wrong port": (ExitCode.LOST_SERVER, f"the server at 127.0.0.1:{port} for"),
        "no such host": (ExitCode.LOST_SERVER, "the last try: no such host: no-such-host.invalid"),
        "plaintext": (ExitCode.CONFIG, "--insecure if the network itself is trusted"),
        "wildcard": (ExitCode.CONFIG, "localhost:50051"),
        "no port": (
            ExitCode.CONFIG,
            "--server: 'localhost' has no port; write host:port, for example localhost:50051",
        ),
    }
    try:
        for name, (status, said) in expected.items():
            processes[name].expect(status)
            assert processes[name].text.count(said) == 1
            assert "Traceback" not in processes[name].text
        refused = f"worker 0: no session with 127.0.0.1:{port} (nothing listens at 127.0.0.1:{port}; is the"
        assert all(
            line["message"].startswith(refused) and (line["ids"], line["run_id"]) == ("0", None)
            for line in processes["wrong port"].logged("reconnecting")
        )
        (end,) = processes["wrong port"].logged("ended")
        assert end["message"].endswith(
            f"the last try: nothing listens at 127.0.0.1:{port}; is the server running, and is this its "
            "server.listen?"
        )
    finally:
        for process in processes.values():
            process.close()


def test_a_server_that_takes_the_connection_and_says_nothing(tmp_path: Path) -> None:
    """The worker's own limit ends the try, long before the silence that ends a connection does."""
    with Proxy() as mute:
        worker = worker_process(
            tmp_path, "--id", "0", "--server", f"127.0.0.1:{mute.port}", "--give-up-after", "1s"
        )
        try:
            worker.expect(ExitCode.LOST_SERVER)
            (end,) = worker.logged("ended")
            assert end["message"].endswith("(--give-up-after 1.0 s); the last try: no answer")
            assert not worker.logged("reconnecting")
        finally:
            worker.close()


def test_workers_whose_data_or_task_is_wrong(tmp_path: Path) -> None:
    """Each says what is wrong and ends; the server logs it and waits on, with worker 0 still there."""
    config = {**CONFIG, "workers": 6, "task": {"name": "tests_tasks:Troubled", "batch_size": 8}}
    with Federation(config, tmp_path / "run") as federation:
        port = federation.port
        well, empty, small, raising = (
            federation.start(ids, "--task", "tests_tasks:Troubled", server=f"127.0.0.1:{port}")
            for ids in "0123"
        )
        for process in (raising, federation.server):
            process.expect_traceback("RuntimeError: no luck today")
        unnamed = federation.start("4", server=f"127.0.0.1:{port}")
        other = federation.start("5", "--task", "digits", server=f"127.0.0.1:{port}")
        named = "--task tests_tasks:Troubled"
        for process, status, said in (
            (unnamed, ExitCode.CONFIG, f"only if this machine's own command line names it: add {named}"),
            (
                other,
                ExitCode.REFUSED,
                f"the task 'digits'; the run's is 'tests_tasks:Troubled'. Start it with {named}",
            ),
            (empty, ExitCode.DATA, "worker 1 has no training examples (0 training, 4 test)"),
            (small, ExitCode.DATA, "worker 2 has 3 training examples, fewer than task.batch_size (8)"),
            (
                raising,
                ExitCode.CONFIG,
                "worker 3, round 1: the task's code raised RuntimeError: no luck today",
            ),
        ):
            process.expect(status)
            assert said in process.text
            assert "round 0" not in process.text
            assert "without --task" not in process.text
        line = federation.server.wait_for("worker_failed", worker=4)
        assert line["message"].startswith("worker 4, before its first round failed: task tests_tasks:Troub")
        assert line["round"] is None
        line = federation.server.wait_for("worker_failed", worker=3)
        assert "RuntimeError: no luck today" in line["message"]
        assert "tests_tasks.py" in line["message"], "the traceback names the place"
        assert (
            "fewer than task.batch_size" in federation.server.wait_for("worker_failed", worker=2)["message"]
        )
        federation.server.wait_for("worker_failed", worker=1)
        assert federation.server.is_running
        assert well.is_running
        assert federation.metrics()["afl_worker_failures_total"] == 4


def test_data_that_is_missing_or_does_not_divide(tmp_path: Path) -> None:
    skewed = {
        **CONFIG,
        "task": {"name": "digits", "batch_size": 8, "options": {"partition": "label-skew"}},
    }
    missing = {**CONFIG, "workers": 10, "task": {"name": "fashion-mnist", "batch_size": 8}}
    empty = tmp_path / "no data"
    empty.mkdir()
    with (
        Federation(skewed, tmp_path / "skewed") as four_workers,
        Federation(missing, tmp_path / "missing", environment={"AFL_DATA": str(empty)}) as fashion,
    ):
        no_division = four_workers.start("0")
        no_data = fashion.start("0")
        no_division.expect(ExitCode.CONFIG)
        assert "4 workers and 10 classes" in no_division.text
        no_data.expect(ExitCode.DATA)
        assert "train-images-idx3-ubyte" in no_data.text
        assert "Download the files from" in no_data.text
        assert str(empty) in no_data.text
        assert "Fashion-MNIST was not found" in fashion.server.wait_for("worker_failed")["message"]


def test_paths_of_workers_that_cannot_be_asked_about(tmp_path: Path) -> None:
    """A journal or data below a name that is too long, and data in a folder whose name is not UTF-8."""
    config = {**CONFIG, "workers": 10, "task": {"name": "fashion-mnist", "batch_size": 8}}
    with (
        Federation(CONFIG, tmp_path / "journal") as journals,
        Federation(config, tmp_path / "data") as fashion,
    ):
        no_journal = journals.start("0", "--journal", "x" * 300)
        too_long = fashion.start("0", environment={"AFL_DATA": "x" * 300})
        foreign = fashion.start("1", environment={"AFL_DATA": "\udcff"})
        for process, code, said in (
            (no_journal, ExitCode.STORAGE, "xxx cannot be used (File name too long): the journal must"),
            (too_long, ExitCode.DATA, "/train-images-idx3-ubyte: File name too long; a name has at most 255"),
            (foreign, ExitCode.DATA, "Fashion-MNIST was not found: looked for"),
        ):
            process.expect(code)
            assert said in process.text
        for worker, said in ((0, "File name too long"), (1, r"/\udcff/FashionMNIST")):
            line = fashion.server.wait_for("worker_failed", worker=worker)
            assert said in line["message"]
        assert fashion.server.is_running


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "workers": 2,
        "task": {"name": "tests_tasks:Diverging", "batch_size": 8},
    }
    with Federation(config, tmp_path / "run") as federation:
        other = federation.start("0", "--task", "tests_tasks:Diverging")
        diverging = federation.start("1", "--task", "tests_tasks:Diverging")
        federation.server.expect(ExitCode.DIVERGED)
        diverging.expect(ExitCode.DIVERGED)
        other.expect(ExitCode.ABORTED)
    reason = (
        "worker 1, round 5: the loss is nan; lower algorithm.eta_w, or look for NaN in the data (`afl "
        "check` does)"
    )
    assert federation.summary()["reason"] == reason
    assert federation.summary()["result"] == "diverged"
    assert reason in diverging.text
    assert reason in other.text
    assert federation.model_metadata("final")["rounds_applied"] == "4"
