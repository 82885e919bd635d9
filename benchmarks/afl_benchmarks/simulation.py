"""What an update costs in simulation, beside a bare script that does the same arithmetic and nothing else.

AFL_DATA=DIR python -m afl_benchmarks.simulation --updates 400

Fashion-MNIST, ten workers, batches of 64, AFL-BR: the script draws a minibatch a worker with torch's own
generator, sums the weighted gradients with PyTorch's own functions, and keeps no record, so its models are
others. One thread, slices of each in turn, and CPU time, so that both see the same load of the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator

import torch

from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.messages import Kind
from afl.core.randomness import SharedRandomness
from afl.tasks import Task, TaskContext
from afl.tasks.base import example_count, take_batch
from afl.tasks.initialization import build_vector
from afl.tasks.registry import load_task
from afl_lab.simulation.driver import Driver
from afl_lab.simulation.meter import WireMeter

WORKERS = 10
BATCH = 64
ETA_W = 0.01
ETA_Q = 0.3
BLOCK = 45
WARM_UP = 10
"""Updates of each before anything is timed."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=400, help="of each, in all")
    parser.add_argument("--slice", type=int, default=20, help="updates of one before it is the other's turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = load_task("fashion-mnist", {})
    randomness = SharedRandomness.from_int(1)
    updates = WARM_UP + options.updates
    contenders = {
        "script": script(task, randomness),
        "simulation": simulation(task, randomness, updates, batched=False),
        "simulation, batched": simulation(task, randomness, updates, batched=True),
    }
    for contender in contenders.values():
        seconds(contender, WARM_UP)
    slices: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.updates // options.slice):
        for name, contender in contenders.items():
            slices[name].append(seconds(contender, options.slice) / options.slice)
    medians = {name: statistics.median(taken) for name, taken in slices.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(taken, slices["script"], strict=True))
        for name, taken in slices.items()
    }
    for name in contenders:
        line = {"what": name, "ms_an_update": round(1e3 * medians[name], 2), "ratio": round(ratios[name], 3)}
        print(json.dumps(line))


def seconds(contender: Iterator[None], updates: int) -> float:
    """CPU time of that many updates."""
    start = time.process_time()
    for _ in range(updates):
        next(contender)
    return time.process_time() - start


def simulation(task: Task, randomness: SharedRandomness, updates: int, *, batched: bool) -> Iterator[None]:
    """Updates as ``afl simulate`` makes them, bytes counted; without evaluations, which both would have."""
    settings = AlgorithmSettings(workers=WORKERS, rounds=updates + 1, eta_w=ETA_W, eta_q=ETA_Q, block=BLOCK)
    driver = Driver(
        task,
        settings,
        randomness,
        batch_size=BATCH,
        evaluation_batch_size=1024,
        evaluate_every=updates + 1,
        batched=batched,
        meter=WireMeter(chunk_bytes=1 << 20, sends_dual_weights=True),
    )
    for step in driver.steps():
        if step.kind is Kind.TRAIN:
            yield


def script(task: Task, randomness: SharedRandomness) -> Iterator[None]:
    """AFL-BR in as few lines as it takes."""
    vector = build_vector(task, randomness)
    module, parameters = vector.module, tuple(vector.module.parameters())
    context = TaskContext(WORKERS, randomness)
    data = [task.data(worker, context).train for worker in range(WORKERS)]
    generator = torch.Generator().manual_seed(1)
    dual = [1 / WORKERS] * WORKERS
    round_ = 0
    while True:
        total = [torch.zeros_like(parameter) for parameter in parameters]
        losses = []
        for weight, examples in zip(dual, data, strict=True):
            chosen = torch.randint(example_count(examples), (BATCH,), generator=generator)
            loss = task.loss(module, take_batch(examples, chosen))
            gradients = torch.autograd.grad(loss, parameters)
            torch._foreach_add_(total, gradients, alpha=weight)
            losses.append(loss.item())
        with torch.no_grad():
            torch._foreach_add_(parameters, total, alpha=-ETA_W)
        grown = [weight * math.exp(ETA_Q * loss) for weight, loss in zip(dual, losses, strict=True)]
        round_ += 1
        dual = [1 / WORKERS] * WORKERS if round_ % BLOCK == 0 else [w / sum(grown) for w in grown]
        yield


if __name__ == "__main__":
    main()
