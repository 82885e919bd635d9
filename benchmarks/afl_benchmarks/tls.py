"""What TLS costs: rounds in plaintext and under mutual TLS, in turn on the same machine.

python -m afl_benchmarks.tls --dim 1000000 --workers 10 --compressor rand-k --ratio 0.1

Both federations are there from the start; one is stopped (SIGSTOP) while the other runs for a few seconds.
So both see the same load of a machine that has other things to do, and the ratio can be trusted where the
times cannot.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from afl.runs.durable import write_whole
from afl.security.issuing import Authority
from afl_benchmarks.daemons import Daemons
from afl_benchmarks.metrics_tail import MetricsTail
from afl_benchmarks.rounds import TASK, add_options, config_of

PATIENCE = "1h"
"""A federation that is stopped is silent for longer than any real one."""

_POLL_S = 0.05


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, dim=1_000_000, rounds=1_000_000)
    parser.add_argument("--slice", type=float, default=4.0, help="seconds that one of them runs for")
    parser.add_argument("--slices", type=int, default=20, help="of each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        kinds = []
        for name in ("plaintext", "mutual TLS"):
            kinds.append(_Kind(name, options, Path(folder) / name.replace(" ", "-")))
            stack.callback(kinds[-1].daemons.close)
            kinds[-1].start()
        for number in range(options.slices):
            # In turn, which of them is first.
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                kind.run_for(options.slice)
    plaintext, mutual = kinds
    compressor = options.compressor + ("" if options.compressor == "identity" else f" {options.ratio:g}")
    ratios = [b / a for a, b in zip(plaintext.medians, mutual.medians, strict=True)]
    print(
        json.dumps(
            {
                "dim": options.dim,
                "workers": options.workers,
                "compressor": compressor,
                **{f"{kind.name}: rounds": len(kind.seconds) for kind in kinds},
                **{
                    f"{kind.name}: median round, ms": round(1e3 * statistics.median(kind.seconds), 2)
                    for kind in kinds
                },
                "ratio of medians": round(
                    statistics.median(mutual.seconds) / statistics.median(plaintext.seconds), 3
                ),
                "ratio slice by slice, median": round(statistics.median(ratios), 3),
                "ratio slice by slice, quartiles": [
                    round(value, 3) for value in statistics.quantiles(ratios, n=4)[::2]
                ],
            },
            indent=2,
        )
    )


class _Kind:
    """A federation that runs by slices.

    Attributes:
        seconds: of each round that began and ended in one slice.
        medians: of each slice.
    """

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.medians: list[float] = []
        folder.mkdir()
        own: dict[str, Any] = {"peer_timeout": PATIENCE, "handshake_timeout": PATIENCE}
        self._workers: list[Sequence[str]] = [() for _ in range(options.workers)]
        if name != "plaintext":
            own["tls"], self._workers = _certificates(folder, options.workers)
        self.daemons = Daemons(config_of(options, folder, **own), folder, options.set)
        self._metrics = MetricsTail(folder / "run")

    def start(self) -> None:
        """Until its first rounds are over, then stop it."""
        self.daemons.open()
        for worker, options in enumerate(self._workers):
            address = f"127.0.0.1:{self.daemons.port}"
            self.daemons.start_worker(str(worker), address, ["--task", TASK, *options])
        self._rounds(3)
        self.daemons.pause()

    def run_for(self, seconds: float) -> None:
        """Go on, for so long and for at least two rounds."""
        # What was closed before it was stopped, then the round that was open meanwhile.
        self._metrics.new()
        self.daemons.resume()
        self._rounds(1)
        end = time.monotonic() + seconds
        found = self._rounds(2)
        while time.monotonic() < end:
            found += self._rounds(1)
        self.daemons.pause()
        self.seconds += found
        self.medians.append(statistics.median(found))

    def _rounds(self, count: int) -> list[float]:
        """The seconds of the next rounds, at least ``count``."""
        found: list[float] = []
        while len(found) < count:
            self.daemons.check()
            found += [line["seconds"] for line in self._metrics.new() if line["event"] == "round"]
            if len(found) < count:
                time.sleep(_POLL_S)
        return found


def _certificates(folder: Path, workers: int) -> tuple[dict[str, Any], list[Sequence[str]]]:
    """The section ``server.tls``, and each worker's options."""
    now = dt.datetime.now(dt.UTC)
    authority = Authority.make(now)
    ca = folder / "ca.pem"
    ca.write_bytes(authority.own().certificate)
    issued = {"server": authority.for_server(["127.0.0.1"], now, days=1)}
    issued |= {f"worker-{id_}": authority.for_worker(str(id_), now, days=1) for id_ in range(workers)}
    for name, pair in issued.items():
        write_whole(folder / f"{name}.key", pair.key, mode=0o600)
        (folder / f"{name}.pem").write_bytes(pair.certificate)

    def files(name: str) -> tuple[str, str]:
        return str(folder / f"{name}.pem"), str(folder / f"{name}.key")

    certificate, key = files("server")
    options: list[Sequence[str]] = []
    for id_ in range(workers):
        own, own_key = files(f"worker-{id_}")
        options.append(("--ca", str(ca), "--certificate", own, "--key", own_key))
    return {"certificate": certificate, "key": key, "client_ca": str(ca)}, options


if __name__ == "__main__":
    main()
