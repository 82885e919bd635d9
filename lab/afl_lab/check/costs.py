"""What a run will cost: bytes by a dry run with the configured compressors, memory and disk by estimate."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from afl.config import Config
from afl.config.quantities import shown_bytes, shown_seconds
from afl.core.algorithms.realizations import Realizations
from afl.core.codecs.payload import expected
from afl.core.disk_usage import MODEL_FILES, disks, keeps_residuals
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.tasks import Task
from afl.wire.accounting import Part
from afl.wire.settings import RunSettings
from afl_lab.check.findings import Report, blaming
from afl_lab.check.integers import Tried
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

# Lines of metrics.jsonl.
ROUND_LINE_BYTES = 420
EVALUATION_LINE_BYTES = 420
EVALUATION_BYTES_A_WORKER = 80

Mark = tuple[Counters, float]
"""What a dry run had counted at some point, and the seconds until then."""


def dry_run(report: Report, config: Config, task: Task) -> list[Mark]:
    """Take a run's first steps with all workers; StoppedError if one fails.

    Returns:
        Where it stood when the first models had been sent, and at the end of each synchronization.
    """
    assert config.run.seed is not None
    randomness = SharedRandomness.from_int(config.run.seed)
    local_steps = config.algorithm.local_steps or 1
    enough = DRY_SYNCHRONIZATIONS * local_steps
    rounds = max(config.algorithm.rounds, enough)
    with blaming(report, "the dry run"):
        driver, meter = metered(config, task, randomness, rounds=rounds, evaluate_every=2 * local_steps)
        marks = [(meter.counters.copied(), 0.0)]
        started = time.monotonic()
        for closed in driver.steps():
            is_last = closed.position.phase == driver.engine.algorithm.phases - 1
            if is_last and not closed.kind.is_of_evaluation:
                marks.append((meter.counters.copied(), time.monotonic() - started))
            if driver.engine.updates_applied >= enough:
                break
    return marks


def check_costs(
    report: Report,
    config: Config,
    marks: list[Mark],
    vector: ParameterVector,
    tried: Tried | None,
    *,
    activations: int,
    data: int,
) -> None:
    """Add what the run will cost, by the marks of a dry run; ``values["costs"]`` has bytes and seconds.

    Args:
        tried: rounds with integers, whose messages vary in length; ``None`` where all rounds are alike.
        activations: what a batch's forward pass keeps for its backward pass, bytes.
        data: the largest worker's examples, bytes.
    """
    (start, _), (first, first_s), (second, second_s), (third, _) = marks
    settings = RunSettings.of_config(config).parameters
    up, down = second.uplink.total - first.uplink.total, second.downlink.total - first.downlink.total
    uncompressed = up + down + second.saved_bytes - first.saved_bytes
    # Between the second's end and the third's lies the evaluation, and nothing else that is its own.
    evaluation = max(0, _sent(third) - _sent(second) - up - down)
    if tried is not None:
        # Integers take more bytes in one round than in another: these are left out, and buffers, which are
        # values too, added again.
        evaluation = _besides_values(third) + _besides_values(first) - 2 * _besides_values(second)
        evaluation = max(0, evaluation) + 8 * config.workers * vector.buffers.size
        up, down = tried.up, tried.down
    evaluations = -(-settings.rounds // config.evaluate_every)
    dim_bytes, buffers = 4 * vector.dim, 4 * vector.buffers.size + vector.frozen_length
    settings = replace(settings, tensors=vector.tensors)
    compressors = Realizations(settings, vector.dim, SharedRandomness.from_int(0))
    residuals = keeps_residuals(compressors.uplink, compressors.downlink)
    sent, received, every = up // config.workers, down // config.workers, config.server.checkpoint_every
    if tried is not None:
        sent, received = (expected(form).total_bytes for form in (compressors.uplink, compressors.down_form))
    size = dim_bytes + buffers
    optimizer = compressors.optimizer.nbytes
    beside = optimizer + buffers + vector.base_length
    lengths = {"sent": sent, "received": received, "optimizer": optimizer}
    kept = disks(size, **lengths, residuals=residuals, checkpoint_every=every)
    held = up if config.absence.leaves_out else config.server.reorder_buffer
    lines = settings.synchronizations * ROUND_LINE_BYTES
    lines += evaluations * (EVALUATION_LINE_BYTES + config.workers * EVALUATION_BYTES_A_WORKER)
    costs = {
        "up": up,
        "down": down,
        "uncompressed": uncompressed,
        "whole_run": _sent(start) + settings.synchronizations * (up + down) + evaluations * evaluation,
        "round_seconds": second_s - first_s,
        "server_memory": SERVER_VECTORS * dim_bytes + beside + min(held, up),
        "worker_memory": (WORKER_VECTORS + residuals[0]) * dim_bytes + beside + activations + data,
        "server_disk": lines + (MODEL_FILES * kept.model if config.server.state == "off" else kept.server),
        "worker_disk": 0 if config.worker.journal == "off" else kept.journal,
    }
    report.values["costs"] = costs
    steps = config.algorithm.local_steps or 1
    about = "" if tried is None else "about "
    each = "a round" if steps == 1 else f"a synchronization ({steps} rounds)"
    seconds = costs["round_seconds"]
    time_shown = f"{1000 * seconds:.2g} ms" if seconds < 0.1 else shown_seconds(seconds)
    shown = {name: shown_bytes(int(value)) for name, value in costs.items() if name != "round_seconds"}
    report.facts["Costs"] = {
        f"up, {each}": f"{about}{shown['up']} from {config.workers} workers",
        f"down, {each}": f"{about}{shown['down']} to {config.workers} workers, each its own process",
        "uncompressed": f"{shown['uncompressed']} both ways, {uncompressed / (up + down):.1f} times as much",
        "the whole run": f"about {shown['whole_run']} in {config.algorithm.rounds} rounds",
        "time": f"{time_shown} {each} here, one worker after the other",
        "the server's memory": f"about {shown['server_memory']}, and some hundred MB for PyTorch",
        "a worker's memory": f"about {shown['worker_memory']}, and some hundred MB for PyTorch",
        "the server's disk": f"at most about {shown['server_disk']}",
        "a worker's disk": f"{shown['worker_disk']} of journal",
    }
    if up + down >= uncompressed and config.algorithm.takes("uplink"):
        what = "it saves nothing: each message is as long as an uncompressed one"
        advice = "rand-k with ratio 0.1 sends a tenth"
        report.note("algorithm.uplink", what, advice)


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


def _sent(counters: Counters) -> int:
    return counters.uplink.total + counters.downlink.total


def _besides_values(counters: Counters) -> int:
    return _sent(counters) - counters.uplink.parts[Part.VALUES] - counters.downlink.parts[Part.VALUES]
