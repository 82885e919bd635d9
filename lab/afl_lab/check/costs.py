"""What a run will cost: bytes by a dry run with the configured compressors, memory and disk by estimate."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from afl.config import Config
from afl.config.quantities import shown_bytes, shown_seconds
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.compressors import create
from afl.core.disk_usage import MODEL_FILES, disks, keeps_residuals
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.tasks import Task
from afl.wire.settings import RunSettings
from afl_lab.check.findings import Report, blaming
from afl_lab.simulation.driver import metered
from afl_server.federation.counters import Counters
from afl_worker.training.oracle import TaskOracle

DRY_SYNCHRONIZATIONS = 3
"""The second is like all that follow: it brings the update of the first. The evaluation after it, and the
third, which brings none, tell what an evaluation adds."""

SERVER_VECTORS = 6
"""Model, gradient's place, sum, downlink residual, what goes out, and the copy that is being saved."""

WORKER_VECTORS = 4
"""Of a process: model, gradient, autograd's gradients, and what has come in."""

ROUND_LINE_BYTES = 420
"""A round's line of metrics.jsonl."""

EVALUATION_LINE_BYTES = 420
EVALUATION_BYTES_A_WORKER = 80


@dataclass(frozen=True)
class Costs:
    """Of a run; bytes.

    Attributes:
        up: of one synchronization, all workers together.
        down: of one synchronization, each worker a process of its own.
        uncompressed: both ways, with whole vectors.
        whole_run: both ways, with first models and evaluations; as if every round were like the second.
        round_seconds: of the dry run, one worker after the other on this machine.
        server_memory: besides Python and PyTorch.
        worker_memory: of a process with one worker, the largest, besides Python and PyTorch.
        server_disk: at most.
        worker_disk: of one worker's journal.
    """

    up: int
    down: int
    uncompressed: int
    whole_run: int
    round_seconds: float
    server_memory: int
    worker_memory: int
    server_disk: int
    worker_disk: int


@dataclass(frozen=True)
class Point:
    """Where a dry run stood when a step had been closed.

    Attributes:
        ends: whether the step was the last of a synchronization.
        seconds: since the first step was opened.
    """

    ends: bool
    counters: Counters
    seconds: float


def dry_run(report: Report, config: Config, task: Task) -> list[Point]:
    """Take the first steps of a run through the round engine, with all workers; what was counted after each.

    Raises:
        StoppedError: if a step fails.
    """
    assert config.run.seed is not None
    randomness = SharedRandomness.from_int(config.run.seed)
    local_steps = config.algorithm.local_steps or 1
    enough = DRY_SYNCHRONIZATIONS * local_steps
    points: list[Point] = []
    with blaming(report, "the dry run"):
        driver, meter = metered(
            config,
            task,
            randomness,
            rounds=max(config.algorithm.rounds, enough),
            evaluate_every=2 * local_steps,
        )
        points.append(Point(False, meter.counters.copied(), 0.0))
        started = time.monotonic()
        for closed in driver.steps():
            ends = closed.position.phase == driver.engine.algorithm.phases - 1
            seconds = time.monotonic() - started
            points.append(Point(ends and not closed.kind.is_of_evaluation, meter.counters.copied(), seconds))
            if driver.engine.updates_applied >= enough:
                break
    return points


def estimate(
    points: list[Point], config: Config, vector: ParameterVector, *, activations: int, data: int
) -> Costs:
    """What the run will cost, from the points of a dry run.

    Args:
        activations: what a batch's forward pass keeps for its backward pass, bytes.
        data: the largest worker's examples, bytes.
    """
    settings = RunSettings.of_config(config).parameters
    first, second, third = (point for point in points if point.ends)
    # Between the second's end and the third's lies the evaluation, and nothing else that is its own.
    model, one = _sent(points[0]), _sent(second) - _sent(first)
    evaluation = max(0, _sent(third) - _sent(second) - one)
    synchronizations = settings.synchronizations
    evaluations = -(-settings.rounds // config.evaluation.every)
    dim_bytes = 4 * vector.dim
    buffers = 4 * vector.buffers.size + vector.frozen_length
    residuals = _residuals(settings, vector.dim)
    up = second.counters.uplink.total - first.counters.uplink.total
    down = second.counters.downlink.total - first.counters.downlink.total
    held = up if config.absence.leaves_out else config.server.reorder_buffer
    kept = disks(
        dim_bytes + buffers,
        sent=up // config.workers,
        received=down // config.workers,
        residuals=residuals,
        checkpoint_every=config.server.checkpoint_every,
    )
    server_disk = MODEL_FILES * kept.model if config.server.state == "off" else kept.server
    lines = synchronizations * ROUND_LINE_BYTES + evaluations * (
        EVALUATION_LINE_BYTES + config.workers * EVALUATION_BYTES_A_WORKER
    )
    return Costs(
        up=up,
        down=down,
        uncompressed=up + down + second.counters.saved_bytes - first.counters.saved_bytes,
        whole_run=model + synchronizations * one + evaluations * evaluation,
        round_seconds=second.seconds - first.seconds,
        server_memory=SERVER_VECTORS * dim_bytes + buffers + min(held, up),
        worker_memory=(WORKER_VECTORS + residuals[0]) * dim_bytes + buffers + activations + data,
        server_disk=server_disk + lines,
        worker_disk=0 if config.worker.journal == "off" else kept.journal,
    )


def _residuals(settings: AlgorithmSettings, dim: int) -> tuple[bool, bool]:
    """Whether the workers keep residuals, and whether the server does."""
    uplink = create(settings.uplink.name, dim, settings.uplink.options)
    is_same = settings.downlink == settings.uplink
    downlink = uplink if is_same else create(settings.downlink.name, dim, settings.downlink.options)
    return keeps_residuals(uplink, downlink)


def show_costs(report: Report, costs: Costs, config: Config) -> None:
    """Add the costs to a report."""
    steps = config.algorithm.local_steps or 1
    each = "a round" if steps == 1 else f"a synchronization ({steps} rounds)"
    share = costs.uncompressed / (costs.up + costs.down)
    report.facts["Costs"] = {
        f"up, {each}": f"{shown_bytes(costs.up)} from {config.workers} workers",
        f"down, {each}": f"{shown_bytes(costs.down)} to {config.workers} workers, each its own process",
        "uncompressed": f"{shown_bytes(costs.uncompressed)} both ways, {share:.1f} times as much",
        "the whole run": f"about {shown_bytes(costs.whole_run)} in {config.algorithm.rounds} rounds",
        "time": f"{_shown_time(costs.round_seconds)} {each} here, one worker after the other",
        "the server's memory": f"about {shown_bytes(costs.server_memory)}, and some hundred MB for PyTorch",
        "a worker's memory": f"about {shown_bytes(costs.worker_memory)}, and some hundred MB for PyTorch",
        "the server's disk": f"at most about {shown_bytes(costs.server_disk)}",
        "a worker's disk": f"{shown_bytes(costs.worker_disk)} of journal",
    }
    report.values["costs"] = asdict(costs)


def kept_for_backward(task: Task, oracle: TaskOracle, worker: int) -> int:
    """Bytes that a forward pass keeps for its backward pass, each storage once, parameters not counted."""
    module = oracle.module(worker, training=True)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = oracle.minibatch(worker, 1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = task.loss(module, batch)
    del loss
    return sum(storages.values())


def _shown_time(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else shown_seconds(seconds)


def _sent(point: Point) -> int:
    return point.counters.uplink.total + point.counters.downlink.total
