"""What TLS costs: rounds in plaintext and under mutual TLS, run in turn on the same machine.

python -m afl_lab.bench.tls --dim 1000000 --workers 10 --compressor rand-k --ratio 0.1 --repeats 5

Each repeat is one federation of each kind, in alternating order: both see the same load of a shared machine.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from afl.durable import write_whole
from afl.security.issuing import Authority
from afl_lab.bench.rounds import add_options, federation

PLAINTEXT, MUTUAL = "plaintext", "mutual TLS"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, dim=1_000_000, rounds=40)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[float]] = {PLAINTEXT: [], MUTUAL: []}
    for repeat in range(options.repeats):
        kinds = [PLAINTEXT, MUTUAL] if repeat % 2 == 0 else [MUTUAL, PLAINTEXT]
        for kind in kinds:
            found[kind].append(_round_ms(options, kind))
        pair = {kind: times[-1] for kind, times in found.items()}
        print(json.dumps({"repeat": repeat + 1, **pair, "ratio": _ratio(pair)}), flush=True)
    medians = {kind: statistics.median(times) for kind, times in found.items()}
    compressor = options.compressor + ("" if options.compressor == "identity" else f" {options.ratio:g}")
    print(
        json.dumps(
            {
                "dim": options.dim,
                "workers": options.workers,
                "compressor": compressor,
                **{f"{kind}, median of medians, ms": time for kind, time in medians.items()},
                "ratio": _ratio(medians),
            },
            indent=2,
        )
    )


def _ratio(times: dict[str, float]) -> float:
    return round(times[MUTUAL] / times[PLAINTEXT], 3)


def _round_ms(options: argparse.Namespace, kind: str) -> float:
    """The median round of one federation."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == PLAINTEXT:
            figures = federation(options, folder)
        else:
            server, workers = _certificates(folder, options.workers)
            figures = federation(options, folder, server=server, worker_options=lambda id_: workers[id_])
    return float(figures["round_ms (median)"])


def _certificates(folder: Path, workers: int) -> tuple[dict[str, Any], list[list[str]]]:
    """The section ``server`` and each worker's options."""
    now = dt.datetime.now(dt.UTC)
    authority = Authority.make(now)
    ca = folder / "ca.pem"
    ca.write_bytes(authority.own().certificate)
    issued = {"server": authority.for_server(["127.0.0.1"], now, days=1)}
    issued |= {f"worker-{id_}": authority.for_worker(str(id_), now, days=1) for id_ in range(workers)}
    for name, pair in issued.items():
        write_whole(folder / f"{name}.key", pair.key, mode=0o600)
        (folder / f"{name}.pem").write_bytes(pair.certificate)
    tls = {
        "certificate": str(folder / "server.pem"),
        "key": str(folder / "server.key"),
        "client_ca": str(ca),
    }
    options = [
        [
            *("--ca", str(ca)),
            *("--certificate", str(folder / f"worker-{id_}.pem")),
            *("--key", str(folder / f"worker-{id_}.key")),
        ]
        for id_ in range(workers)
    ]
    return {"tls": tls}, options


if __name__ == "__main__":
    main()
