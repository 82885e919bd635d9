"""``afl capture``: what it finds in what a worker has sent."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from afl.core.codecs.modular import modular
from afl.core.codecs.plain import Plain
from afl.core.messages import Encoding, Kind, Payload, Position, Report, Role
from afl.errors import ConfigError, DataError
from afl.v1 import federation_pb2 as pb
from afl.wire.capture import Capture, captured
from afl.wire.frames import report_frames
from afl_cli.main import main

COUNT = 400


def update(residues: NDArray[Any], bits: int = 16) -> Payload:
    return modular(Encoding.SEEDED, bits).whole(residues, Role.UPDATE, 4000)


def share(rng: np.random.Generator) -> Payload:
    return modular(Encoding.DENSE, 64).whole(rng.integers(0, 1 << 63, 2, dtype=np.uint64), Role.WEIGHT, 2)


def frames_of(round_: int, payloads: list[Payload], **told: Any) -> list[bytes]:
    headers = tuple(payload.header for payload in payloads)
    report = Report(0, Position(round_, 0), told.pop("loss", 0.0), 8, headers, **told)
    return [frame.data for frame in report_frames(report, Kind.TRAIN, payloads, 256)]


def opening(epoch: int = 1) -> list[bytes]:
    join = pb.Join(protocol=3, workers=[0], task="digits")
    ready = pb.Ready(dim=4000, keys=pb.KeyOffer(epoch=epoch, workers=[0]))
    return [pb.WorkerFrame(join=join).SerializeToString(), pb.WorkerFrame(ready=ready).SerializeToString()]


def written(path: Path, frames: Iterable[bytes]) -> Path:
    capture = Capture(path)
    for frame in frames:
        capture.write(frame)
    return path


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def masked(rng: np.random.Generator, rounds: Iterable[int] = range(1, 21), **told: Any) -> list[bytes]:
    return [
        frame
        for round_ in rounds
        for frame in frames_of(round_, [update(rng.integers(0, 1 << 16, COUNT, dtype=np.uint16))], **told)
    ]


def said(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = main(["capture", str(path), *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_masked_messages_pass_and_what_is_in_clear_is_listed(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "sent", [*opening(), *masked(rng, loss=0.5)])
    code, out, _ = said(path, capsys)
    assert code == 0
    assert "20 payloads" in out
    assert "told in reports.loss" in out
    code, out, _ = said(path, capsys, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["wrong"] == []
    assert found["masked"] == [{"role": "UPDATE", "bits": 16, "payloads": 20, "bytes": 20 * 2 * COUNT}]
    assert found["bytes"] == path.stat().st_size
    assert found["in_clear"]["reports.loss"] == {"times": 20, "values": ["0.5"]}
    assert found["in_clear"]["join.task"] == {"times": 1, "values": ["digits"]}
    assert "chunks.data" not in found["in_clear"]


def test_plain_values_fail_by_their_type(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Plain(Encoding.DENSE).whole(rng.normal(size=COUNT).astype(np.float32), Role.BUFFERS, COUNT)
    path = written(tmp_path / "sent", [*opening(), *masked(rng), *frames_of(21, [plain])])
    code, _, err = said(path, capsys)
    assert code == 7
    assert "BUFFERS payloads are of type FLOAT32, which can be read" in err


def test_residues_without_a_mask_fail_by_their_looks(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [update(np.rint(rng.normal(0, 300, COUNT)).astype(np.int64).astype(np.uint16)) for _ in range(20)]
    frames = [frame for round_, payload in enumerate(small, 1) for frame in frames_of(round_, [payload])]
    code, _, err = said(written(tmp_path / "sent", [*opening(), *frames]), capsys)
    assert code == 7
    assert "UPDATE of 16 bits are not as random as masks make them: highest bits" in err


def test_a_message_that_is_sent_again_counts_once_and_another_in_its_place_is_found(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [*opening(), *masked(rng, range(1, 20))]
    last = frames_of(20, [update(rng.integers(0, 1 << 16, COUNT, dtype=np.uint16))])
    again = written(tmp_path / "again", [*before, *last, *opening(), *last])
    code, out, _ = said(again, capsys, "--json")
    assert (code, json.loads(out)["masked"][0]["payloads"]) == (0, 20)
    other = frames_of(20, [update(rng.integers(0, 1 << 16, COUNT, dtype=np.uint16))])
    code, _, err = said(written(tmp_path / "other", [*before, *last, *opening(), *other]), capsys)
    assert code == 7
    assert "two different messages for round 20, phase 0 under the same keys" in err
    # Under other keys the masks are others.
    code, _, _ = said(written(tmp_path / "epoch", [*before, *last, *opening(epoch=2), *other]), capsys)
    assert code == 0
    code, _, err = said(written(tmp_path / "back", [*before, *last, *masked(rng, [3])]), capsys)
    assert code == 7
    assert "round 3, phase 0 comes after a later message" in err


def test_a_part_that_goes_on_after_a_cut_belongs_to_its_message(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = update(rng.integers(0, 1 << 16, 200_000, dtype=np.uint16))
    report = Report(0, Position(1, 0), 0.0, 8, (payload.header,))
    whole = [frame.data for frame in report_frames(report, Kind.TRAIN, [payload], 1000)]
    rest = [frame.data for frame in report_frames(report, Kind.TRAIN, [payload], 1000, (0, 90_500))]
    path = written(tmp_path / "sent", [*opening(), *whole[:100], *opening(), *rest])
    code, out, _ = said(path, capsys, "--json")
    assert (code, json.loads(out)["masked"][0]["bytes"]) == (0, 400_000)


def test_losses_that_are_told_where_they_should_be_hidden(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    def frames(**told: Any) -> list[bytes]:
        return [
            frame
            for round_ in range(1, 21)
            for frame in frames_of(
                round_, [update(rng.integers(0, 1 << 16, COUNT, dtype=np.uint16)), share(rng)], **told
            )
        ]

    assert said(written(tmp_path / "hidden", [*opening(), *frames(metrics={"loss": 0.0})]), capsys)[0] == 0
    code, _, err = said(written(tmp_path / "loss", [*opening(), *frames(loss=0.5)]), capsys)
    assert code == 7
    assert "losses are hidden, and these fields tell of them: reports.loss" in err
    shown = written(tmp_path / "shown", [*opening(), *masked(rng, loss=0.5)])
    assert said(shown, capsys)[0] == 0
    assert said(shown, capsys, "--losses", "hidden")[0] == 7


def test_fields_of_another_version_and_bytes_that_nothing_announces_are_found(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = pb.WorkerFrame(heartbeat=pb.Heartbeat()).SerializeToString() + b"\xf2\x01\x03abc"
    code, _, err = said(written(tmp_path / "field", [*opening(), *masked(rng), unknown]), capsys)
    assert code == 7
    assert "fields that this version does not know" in err
    stray = pb.WorkerFrame(chunks=[pb.Chunk(worker=5, data=b"abc")]).SerializeToString()
    code, _, err = said(written(tmp_path / "bytes", [*opening(), *masked(rng), stray]), capsys)
    assert code == 7
    assert "bytes that no report announces" in err


@pytest.mark.parametrize("rounds", [range(0), range(1, 2)])
def test_what_shows_nothing_does_not_pass(
    rounds: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [frame for round_ in rounds for frame in frames_of(round_, [update(np.zeros(9, dtype=np.uint16))])]
    code, _, err = said(written(tmp_path / "sent", [*opening(), *few]), capsys)
    assert code == 7
    assert ("too few values" if len(rounds) else "no masked update") in err


def test_two_captures_are_compared(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (written(tmp_path / name, [*opening(), *masked(rng)]) for name in ("one", "two"))
    code, out, _ = said(one, capsys, "--against", str(two), "--json")
    assert code == 0
    assert sum("against the other" in test["test"] for test in json.loads(out)["tests"]) == 3


def test_a_capture_goes_on_where_a_killed_process_has_left_it(tmp_path: Path) -> None:
    path = written(tmp_path / "sent", [b"first", b"second"])
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:-2])
    written(path, [b"third"])
    assert list(captured(path)) == [b"first", b"third"]


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("some text, and no messages")
    with pytest.raises(ConfigError, match="holds something else"):
        Capture(tmp_path / "text")
    assert (tmp_path / "text").read_text() == "some text, and no messages"
    with pytest.raises(ConfigError, match="--capture"):
        Capture(tmp_path / "none" / "sent")
    with pytest.raises(DataError, match="none that afl-worker"):
        list(captured(tmp_path / "text"))
    assert said(tmp_path / "missing", capsys)[0] == 7
    (tmp_path / "zeros").write_bytes(b"\0\0\0\0\x02\xff\xff")
    code, _, err = said(tmp_path / "zeros", capsys)
    assert code == 7
    assert "none that afl-worker --capture has written" in err
