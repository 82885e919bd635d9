"""What a run takes on the wire and on disks, measured, beside the formulas of docs/guide.md."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest

from afl.core.codecs.payload import codec_of
from afl.core.compressors import Compressor, create
from afl.core.disk_usage import disks, keeps_residuals
from afl.core.messages import Encoding
from support import Federation

DIM, WORKERS, ROUNDS, CHECKPOINT_EVERY = 200_000, 2, 30, 10
NOOP = ("--task", "afl_benchmarks.noop:Noop")
IDENTITY = {"name": "identity"}
RAND_K = {"name": "rand-k", "ratio": 0.1}
TOP_K = {"name": "top-k", "ratio": 0.05}
SIGN = {"name": "scaled-sign"}

SMALL = 192 * 1024
"""Heads and a model's other contents: nothing that grows with the model."""


def create_from(section: dict[str, Any]) -> Any:
    options = dict(section)
    return create(options.pop("name"), DIM, options)


def payload_bytes(compressor: Compressor) -> int:
    """Values exactly; indices as the entropy of so many out of d, which their coding exceeds by up to 5 %."""
    values = codec_of(compressor).value_bytes(compressor.count)
    share = compressor.count / DIM
    bits = -share * math.log2(share) - (1 - share) * math.log2(1 - share) if share < 1 else 0.0
    return values + (math.ceil(DIM * bits / 8) if compressor.encoding is Encoding.INDEXED else 0)


@pytest.mark.parametrize(
    ("up", "down"),
    [
        (RAND_K, RAND_K),
        pytest.param(TOP_K, TOP_K, marks=pytest.mark.long),
        *(
            pytest.param(up, down, marks=pytest.mark.slow)
            for up, down in ((IDENTITY, IDENTITY), (TOP_K, RAND_K), (SIGN, SIGN))
        ),
    ],
    ids=lambda section: section["name"],
)
def test_a_run_takes_what_the_formulas_say(up: dict[str, Any], down: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "workers": WORKERS,
        "task": {"name": NOOP[1], "batch_size": 1, "options": {"dim": DIM}},
        "algorithm": {
            "name": "afl-com",
            "rounds": ROUNDS,
            "eta_w": 1e-6,
            "eta_q": 0.01,
            "uplink": up,
            "downlink": down,
        },
        "evaluation": {"every": ROUNDS},
        "server": {"checkpoint_every": CHECKPOINT_EVERY},
    }
    uplink = create_from(up)
    downlink = uplink if up == down else create_from(down)
    said = disks(
        4 * DIM,
        sent=payload_bytes(uplink),
        received=payload_bytes(downlink),
        residuals=keeps_residuals(uplink, downlink),
        checkpoint_every=CHECKPOINT_EVERY,
    )
    with Federation(config, tmp_path) as federation:
        federation.start("1", *NOOP)
        dies = federation.start("0", *NOOP, environment={"AFL_FAULT_POINTS": "worker.after-journal:3:kill"})
        dies.expect(-signal.SIGKILL)
        (journal,) = tmp_path.glob("afl-journal/*/worker-0.journal")
        journal_bytes = journal.stat().st_size
        federation.workers.remove(dies)
        dies.close()
        federation.start("0", *NOOP)
        federation.finish()
    parts = federation.summary()["communication"]["uplink"]["payload_bytes_by_part"]
    sent = sum(parts[part] for part in ("values", "indices") if part in parts)
    assert sent / (ROUNDS * WORKERS) == pytest.approx(payload_bytes(uplink), rel=0.05)
    assert journal_bytes == pytest.approx(said.journal, rel=0.02, abs=SMALL)
    sizes = {path.name: path.stat().st_size for path in federation.directory.rglob("*") if path.is_file()}
    checkpoints = [size for name, size in sizes.items() if name.startswith("checkpoint-")]
    assert checkpoints == pytest.approx([said.checkpoint] * 2, abs=SMALL)
    logs = [size for name, size in sizes.items() if name.startswith("log-")]
    assert 0.9 * said.log - SMALL <= max(logs) <= 1.05 * said.log + SMALL
    for name in ("best", "final", "random"):
        assert sizes[f"model-{name}.safetensors"] == pytest.approx(said.model, abs=SMALL)
    assert sum(sizes.values()) <= said.server + SMALL
