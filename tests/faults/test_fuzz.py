"""Messages that were changed at random, through the decoders and over the socket."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from faults_cases import GROUPS, TASK, config_of

from afl.config import config_from_mapping
from afl.core.codecs.payload import check_header, expected, pack, unpack
from afl.core.compressors import Compressed, Compressor, create
from afl.core.messages import EVALUATION_PHASE, Kind, Position, Report, Step
from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import NonFiniteError, ProtocolError
from afl.runs.durable import DamagedError, read_record, record_head
from afl.v1 import federation_pb2 as pb
from afl.wire.assembler import StepAssembler
from afl.wire.fast_chunk import lone_chunk_of_server, lone_chunk_of_worker
from afl.wire.frames import (
    chunk_frames,
    commit_frame,
    parse_server_frame,
    parse_worker_frame,
    report_frame,
    report_of,
    step_frame,
)
from afl.wire.settings import RunSettings
from support import Federation, RawClient, result_of
from support.fuzz import mutated, rss_kb
from support.identities import Identities

DIM = 100
LARGEST_GROWTH_KB = 200 * 1024
"""A decoder that believed a length would take gigabytes."""

MOST_LOG_BYTES = 1_000_000

Refusals = (ProtocolError, NonFiniteError, DamagedError)


def compressed(name: str) -> tuple[Compressor, Compressed]:
    compressor = create(name, DIM, {} if name in {"identity", "scaled-sign"} else {"ratio": 0.3})
    realization = compressor.realize(SharedRandomness.from_int(1).stream(Purpose.COMPRESSOR, 1), "cpu")
    return compressor, realization.split(torch.linspace(-1, 1, DIM))


def integers(bits: int, scale: float) -> tuple[Compressor, Compressed]:
    compressor = create("identity", DIM, {"bits": bits})
    limit = 2 ** (bits - 1) - 1
    values = np.rint(scale * np.linspace(-1, 1, DIM) ** 5).clip(-limit, limit)
    return compressor, Compressed(values.astype(np.int32))


def wide_sums() -> tuple[Compressor, Compressed]:
    """Of a thousand workers of one process."""
    compressor = create("identity", DIM, {"bits": 24})
    compressor.bits += 10
    return compressor, Compressed(2**32 + np.arange(DIM) % 5)


def worker_frames() -> list[bytes]:
    compressor, message = compressed("top-k")
    payload = pack(compressor, message)
    report = Report(2, Position(1, 0), 0.5, 8, (payload.header,))
    evaluation = Report(2, Position(7, EVALUATION_PHASE), 0.5, 8, (), {"loss": 0.5}, b"d" * 16)
    return [
        report_frame(report, Kind.TRAIN).data,
        report_frame(evaluation, Kind.EVALUATE).data,
        *(frame.data for frame in chunk_frames(pb.WorkerFrame, payload, 64, worker=2)),
        pb.WorkerFrame(
            join=pb.Join(protocol=2, package_version="0.1.0", incarnation=b"i" * 16, workers=[2])
        ).SerializeToString(),
        pb.WorkerFrame(heartbeat=pb.Heartbeat(reply_wanted=True)).SerializeToString(),
        pb.WorkerFrame(failure=pb.Failure(worker=2, message="m", traceback="t")).SerializeToString(),
    ]


def read_worker_frame(data: bytes) -> None:
    chunk = lone_chunk_of_worker(data)
    if chunk is not None:
        assert len(chunk.data) <= len(data)
        return
    for report in parse_worker_frame(data).reports:
        report_of(report)


def server_frames() -> list[bytes]:
    compressor, message = compressed("rand-k")
    payload = pack(compressor, message)
    step = Step(Position(2, 0), Kind.TRAIN, (payload.header,))
    settings = RunSettings.of_config(config_from_mapping(config_of("top-k")))
    return [
        step_frame(step).data,
        *(frame.data for frame in chunk_frames(pb.ServerFrame, payload, 64)),
        commit_frame(step.position, step.kind, [0.25], ()).data,
        pb.ServerFrame(welcome=pb.Welcome(run_id="r", settings=settings.to_message())).SerializeToString(),
    ]


def server_reader() -> Callable[[bytes], None]:
    """A worker's end, which every other message begins anew."""
    assembler, turn = StepAssembler((2,), largest=16 * DIM), 0

    def read(data: bytes) -> None:
        nonlocal assembler, turn
        turn += 1
        if turn % 7 == 0:
            assembler = StepAssembler((2,), largest=16 * DIM)
        chunk = lone_chunk_of_server(data)
        if chunk is not None:
            assembler.add(chunk)
            return
        frame = parse_server_frame(data)
        if frame.HasField("welcome"):
            RunSettings.of_message(frame.welcome.settings)
        assembler.feed(frame)

    return read


def payload_reader(compressor: Compressor, message: Compressed) -> tuple[bytes, Callable[[bytes], None]]:
    payload = pack(compressor, message)
    most = expected(compressor)

    def read(data: bytes) -> None:
        header = payload.header
        if compressor.bits:
            header = replace(header, value_bytes=len(data))
            check_header(header, most)
        found = unpack(header, data)
        assert len(found.values) <= max(most.count, 1)
        assert bool(np.isfinite(found.values).all())

    return bytes(payload.data), read


def record() -> bytes:
    return record_head({"position": [3, 0]}, [b"x" * 40]) + b"x" * 40


def readers() -> Iterator[tuple[str, list[bytes], Callable[[bytes], object]]]:
    yield "worker frames", worker_frames(), read_worker_frame
    yield "server frames", server_frames(), server_reader()
    for name in ("top-k", "rand-k", "scaled-sign", "identity"):
        seed, read = payload_reader(*compressed(name))
        yield f"payloads of {name}", [seed], read
    seed, read = payload_reader(*wide_sums())
    yield "sums beyond 32 bits", [seed], read
    for bits, scale in ((4, 2.0), (4, 50.0), (8, 30.0), (24, 1e6)):
        seed, read = payload_reader(*integers(bits, scale))
        yield f"integers of {bits} bits", [seed], read
    yield "records", [record()], lambda data: read_record(memoryview(data))


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_decoders_take_or_refuse_whatever_comes(count: int):
    chance = random.Random(count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    everything = list(readers())
    taken = refused = 0
    for _ in range(count):
        _name, seeds, read = chance.choice(everything)
        data = mutated(chance, chance.choice(seeds))
        try:
            read(data)
            taken += 1
        except Refusals:
            refused += 1
    assert taken > count // 100, "nearly everything is refused: the messages are not near enough to right"
    assert refused > count // 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LARGEST_GROWTH_KB


@pytest.mark.parametrize(
    "count", [2_000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_a_server_under_fuzz_serves_the_others(tmp_path: Path, undisturbed, count: int):
    """Peers without an identity, and sessions that never become ready, send what they like; the run is the
    undisturbed one."""
    chance = random.Random(count)
    seeds, ours = worker_frames(), Identities(tmp_path / "pki")
    of_first, of_second, insider = (ours.token(ids) for ids in (*GROUPS, "2"))
    token = insider.read_text(encoding="utf-8").strip()
    server = {"handshake_timeout": "2s", "tokens": str(ours.tokens)}
    with Federation(config_of("top-k", **server), tmp_path / "run") as federation:
        first = federation.start(GROUPS[0], "--task", TASK, "--token-file", str(of_first))
        federation.server.wait_for("worker_ready")
        memory = rss_kb(federation.server.pid)
        sent = 0
        while sent < count:
            is_known = chance.random() < 0.8
            with RawClient(federation.port, token=token if is_known else "") as client:
                if is_known and chance.random() < 0.6:
                    client.join([2])
                for _ in range(chance.randrange(1, 60)):
                    client.send(mutated(chance, chance.choice(seeds)))
                    sent += 1
        assert federation.server.is_running, federation.server.text[-4000:]
        assert rss_kb(federation.server.pid) - memory < LARGEST_GROWTH_KB
        assert len(federation.server.text) < MOST_LOG_BYTES
        assert len(first.logged("joined")) == 1
        assert not first.logged("joined_again"), "a healthy worker was cut off"
        federation.start(GROUPS[1], "--task", TASK, "--token-file", str(of_second))
        federation.finish()
    assert "Traceback" not in federation.server.text.replace("failed: m\\nt", "")
    assert result_of(federation) == undisturbed("top-k")
