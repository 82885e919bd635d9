"""What secure aggregation takes of a round, all parties in one process, beside AES's own speed.

python -m afl_benchmarks.masks --dim 10000000 --workers 10 --compressor rand-k --ratio 0.1 --bits 16

*Keys* are agreed once a run: an offer, the check of the roster, a secret with each neighbour; signatures are
left out. *Digest of the model* is what a mask is bound to, once a process. *Masking* is a digest of the
message, the mask drawn and added, packing; *AES alone* writes as many bytes of each neighbour's stream where
they stay in cache. CPU time; the shortest of all rounds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from afl.core.aggregation import ModularSum, sum_of
from afl.core.algorithms.realizations import Realizations
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.codecs.modular import word_type
from afl.core.codecs.payload import pack, unpack
from afl.core.compressors import Compressed
from afl.core.error_feedback import ErrorFeedback
from afl.core.messages import NOWHERE, Kind, Position, Report
from afl.core.model.parameters import ParameterVector
from afl.core.participant import Answer
from afl.core.randomness import SharedRandomness
from afl.core.secrecy.keyring import Keyring
from afl.core.secrecy.masks import BLOCK_BYTES, SECRET_BYTES
from afl_benchmarks.rounds import add_options, compressor_of
from afl_worker.keys import KeysInMemory, Standing
from afl_worker.masking import Masking

AGREEMENT = "keys of all, once a run"
FLOOR = "AES alone: a worker"


class Times:
    """The shortest CPU time of each part, in milliseconds."""

    def __init__(self) -> None:
        self.shortest: dict[str, float] = defaultdict(lambda: float("inf"))

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Time a block, once of many."""
        start = time.process_time()
        yield
        self.shortest[part] = min(self.shortest[part], 1e3 * (time.process_time() - start))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, dim=100_000, rounds=30)
    parser.set_defaults(masked=True, bits=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = Times()
    sent = _rounds(options, times)
    print(f"{options.workers} workers, {options.compressor}, d {options.dim}, {options.bits} bits")
    print(f"{'bytes up, a worker and round':42}{sent:12}")
    whole = sum(
        milliseconds * (options.workers if part.endswith("a worker") or "one message" in part else 1)
        for part, milliseconds in times.shortest.items()
        if part not in {AGREEMENT, FLOOR}
    )
    for part, milliseconds in [*times.shortest.items(), ("a round, all parties", whole)]:
        print(f"{part + ', ms':42}{milliseconds:12.3f}")


def _rounds(options: argparse.Namespace, times: Times) -> int:
    """Time the parts of all rounds; a message's bytes.

    Raises:
        AssertionError: if the masks do not cancel.
    """
    choice, workers = compressor_of(options), options.workers
    settings = AlgorithmSettings(
        workers, options.rounds, 1, 0.01, 0.1, choice, choice, secure_aggregation=True
    )
    realizations = Realizations(settings, options.dim, SharedRandomness.from_int(1))
    gradients = [torch.randn(options.dim) * 0.01 for _ in range(workers)]
    feedback = [ErrorFeedback(options.dim) for _ in range(workers)]
    vector = ParameterVector(torch.nn.Linear(options.dim, 1, bias=False))
    models = [torch.zeros(options.dim) for _ in range(workers + 1)]
    with times.of(AGREEMENT):
        maskings = _agreed(workers)
    total = sum_of(realizations.uplink, workers, lambda: realizations.of_uplink(1))
    assert isinstance(total, ModularSum)
    sent = 0
    for round_ in range(1, options.rounds + 1):
        realizations.prepare(round_)
        realization = realizations.of_uplink(round_)
        total.reset()
        clear = np.zeros_like(total.total)
        for worker in range(workers):
            with times.of("residual, message, packing: a worker"):
                compressed = feedback[worker].compress(gradients[worker], realization)
                payload = pack(realizations.uplink, compressed)
            clear += unpack(payload.header, payload.data).values
            with times.of("digest of the model: a worker"):
                shown = vector.digest()
            report = Report(worker, Position(round_, 0), 1.0, 1, payloads=(payload.header,), history=shown)
            answer: Answer = (report, [payload])
            with times.of("masking: a worker"):
                ((_, (_, (masked,))),) = maskings[worker].sent([(Kind.TRAIN, answer)])
            with times.of("adding one message: the server"):
                total.add(worker, masked.header, masked.data)
            sent = masked.header.total_bytes
        assert (total.total == clear).all()
        with times.of(FLOOR):
            _aes(realizations.uplink.count * word_type(options.bits)().itemsize, workers - 1)
        with times.of("D: the server"):
            update = Compressed(total.checked("here", "updates"))
            pack(realizations.down_form, update)
        for model in models[1:]:
            with times.of("step: a worker"):
                realization.step(model, update, 0.01)
        realizations.apply(round_, models[0], update)
    return sent


def _agreed(workers: int) -> list[Masking]:
    """Of each worker, once all have each other's keys."""
    maskings = [
        Masking(
            Keyring(
                "benchmark",
                [worker],
                workers,
                least=2,
                sign=lambda _: (b"", (), b""),
                verify=lambda _: None,
                random=os.urandom,
                store=KeysInMemory(),
            ),
            {},
            (),
            metrics=False,
        )
        for worker in range(workers)
    ]
    begun = Standing(NOWHERE, is_held=False)
    offers = [masking.offer(1, {worker: begun}, ()) for worker, masking in enumerate(maskings)]
    for masking in maskings:
        masking.take(1, offers)
    return maskings


def _aes(size: int, streams: int) -> None:
    """Write so many bytes of each stream, a block at a time."""
    zeros, scratch = memoryview(bytes(BLOCK_BYTES)), bytearray(BLOCK_BYTES + 15)
    encryptors = [Cipher(AES(bytes(SECRET_BYTES)), CTR(bytes(16))).encryptor() for _ in range(streams)]
    for start in range(0, size, BLOCK_BYTES):
        for encryptor in encryptors:
            encryptor.update_into(zeros[: size - start], scratch)


if __name__ == "__main__":
    main()
