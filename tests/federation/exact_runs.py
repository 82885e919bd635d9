"""Runs that are held against the independent numpy script to the bit, and deaths of their processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import Federation, Reference, final_values
from support.drill import SERVER

GROUPS = ("0", "1-2", "3")


def config_of(algorithm: Mapping[str, Any], **server: Any) -> dict[str, Any]:
    return {
        "workers": 4,
        "task": {"name": "synthetic", "batch_size": 8},
        "algorithm": {"name": "afl-com", "rounds": 60, "eta_w": 0.9, **algorithm},
        "evaluation": {"every": 20},
        "run": {"seed": 7},
        "server": server,
    }


def killed(
    case: Mapping[str, Any], rounds: int, folder: Path, deaths: Sequence[tuple[int, str]]
) -> tuple[Federation, Reference]:
    """A run whose server, or a process of workers, is killed and started again in some rounds; its model is
    the reference's."""
    config = config_of({**case, "rounds": rounds}, checkpoint_every=7, heartbeat="100ms")
    with Federation(config, folder) as federation:
        workers = {ids: federation.start(ids) for ids in GROUPS}
        for round_, dies in deaths:
            federation.wait_until(lambda status, round_=round_: status["round"] >= round_)  # type: ignore[misc]
            if dies == SERVER:
                port = federation.port
                federation.server.kill()
                federation.start_server("--set", f"server.listen=127.0.0.1:{port}")
            else:
                workers[dies].kill()
                federation.start(dies)
        federation.finish()
    reference = Reference.of(config)
    assert final_values(federation.directory) == reference.weights[-1].tobytes()
    assert not federation.server.logged("digest_mismatch")
    return federation, reference
