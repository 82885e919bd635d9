"""What a worker process trains with: built once the server has said what the run is."""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from afl.core.algorithms.registry import worker_side
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.messages import BUFFERS_PHASE, EVALUATION_PHASE, Position
from afl.core.participant import Kept, Participant, epoch_of
from afl.core.randomness import SharedRandomness
from afl.core.record_privacy import Account
from afl.core.secrecy.keys import KeyStore
from afl.daemon import events
from afl.errors import ConfigError, DataError, PeerError
from afl.outside import words
from afl.security.identity import WorkerIds
from afl.tasks.base import TaskContext, example_count
from afl.tasks.initialization import build_vector, realization_digest, worker_data
from afl.tasks.registry import load_task
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import position_of
from afl.wire.settings import RunSettings
from afl_worker.journal import Journals
from afl_worker.keys import KeyFiles, KeysInMemory
from afl_worker.options import WorkerOptions
from afl_worker.training.private import make_oracle
from afl_worker.training.timings import Spent

if TYPE_CHECKING:
    from afl_worker.masking import Masking

LOG = logging.getLogger("afl.worker")


@dataclass(frozen=True)
class Training:
    """The hosted workers over their model, and where they keep what must outlive the process; ``digest`` is
    16 bytes over what the first round draws, which the server must have too."""

    participant: Participant
    journals: Journals | None
    digest: bytes
    masking: Masking | None


def set_up(
    options: WorkerOptions, device: torch.device, welcome: pb.Welcome, settings: RunSettings, spent: Spent
) -> Training:
    """Build the task, its data and its model, and go on from the workers' journals if there are any.

    The welcome's seed and run id were checked. Raises whatever the task's own code raises, and an AflError if
    the task, the algorithm's compressors or the journals cannot be used; a PolicyError if minibatches are too
    small.
    """
    run, workers, skips = settings.parameters, options.workers, settings.skips_non_finite
    level = settings.journal
    key_files = KeyFiles(options.journal, welcome.run_id, workers, level, hides_losses=run.hides_losses)
    key_files.check(is_masked=run.secure_aggregation)
    randomness = SharedRandomness(welcome.seed)
    torch.set_num_threads(settings.threads)
    task = load_task(
        options.task or settings.task,
        settings.task_options,
        allow_path=options.task is not None,
        local=options.task_options,
    )
    vector = build_vector(task, randomness, device)
    _check_frozen(options, type(task).__name__, vector.frozen_digest, welcome.frozen_digest)
    context = TaskContext(run.workers, randomness)
    data = {worker: worker_data(task, worker, context) for worker in workers}
    oracle = make_oracle(
        task,
        vector,
        data,
        randomness,
        run,
        batched=settings.batch_oracles,
        batch_size=settings.batch_size,
        evaluation_batch_size=settings.evaluation_batch_size,
        spent=spent,
    )
    for worker in workers:
        # What is held out counts as examples that there are: a server could hold out all but one.
        examples = {worker: example_count(data[worker].train)}
        options.policy.check_batch(oracle.batch_size(worker), examples)
        if worker in oracle.accounts:
            _open(options, worker, oracle.accounts[worker])
    run = replace(run, tensors=vector.tensors)
    side = worker_side(run, vector.dim, randomness, workers, device, keeps_old=skips)
    journals = None
    if level != "off":
        journals = Journals(options.journal, welcome.run_id, vector.layout_hash(), workers, level)
    told = hashlib.sha256(welcome.seed + vector.frozen_digest.encode() + settings.digest()).digest()
    participant = Participant(
        vector,
        side,
        oracle,
        workers,
        journal=journals,
        accounts=oracle.accounts,
        run=told if run.secure_aggregation else b"",
        skips_non_finite=skips,
    )
    kept = journals.read() if journals else {}
    participant.resume(kept, position_of(welcome.buffers_averaged))
    if journals is not None:
        _count_lost(oracle.accounts, kept, journals.lacks_newest(), welcome)
    for worker, entry in kept.items():
        resumed = events.JournalRead(worker=worker, round=entry.report.position.round)
        named = run.named(resumed.round)
        LOG.info("worker %d resumes from its journal: its report of %s", worker, named, extra=resumed.extra)
    what = f"{run.name} on {settings.task} as {WorkerIds.of(workers).named} of {run.workers}, on {device}"
    event = events.Joined(run_id=welcome.run_id, device=str(device))
    LOG.info("run %s: %s", welcome.run_id, what, extra=event.extra)
    # What is there by now stays: the collector need not look at it again in every round.
    gc.collect()
    gc.freeze()
    masking = None
    if not run.secure_aggregation and (options.peers.authorities or options.peers.keys):
        # A server that can turn masks off would need no other way around them.
        raise PeerError(
            "the run has no secure aggregation, and this worker was told how to know its peers; without "
            "--peer-ca and --peer-keys it takes part, and the server sees each of its updates"
        )
    if run.secure_aggregation:
        if skips:
            raise PeerError("the server lets workers be missing, and sums everything under masks")
        lost = [*journals.lacks_newest(), *key_files.of_another_boot()] if journals else []
        store = KeysInMemory() if journals is None else key_files
        masking = _masking(options, welcome.run_id, run, store, (kept, lost))
    return Training(participant, journals, realization_digest(side, run, vector.dim), masking)


def _open(options: WorkerOptions, worker: int, account: Account) -> None:
    """Say what the run will cost a worker's records, and hold it to what the site's policy allows."""
    options.policy.check_epsilon(account.planned_epsilon, worker)
    if options.policy.limits.epsilon is not None:
        account.limit(options.policy.limits.epsilon)
    noise, loss_noise = account.privacy.noises
    event = events.PrivacyPlanned(
        worker=worker,
        epsilon=account.planned_epsilon,
        delta=account.privacy.delta,
        noise=noise,
        loss_noise=loss_noise,
    )
    LOG.info(
        "worker %d: %d rounds cost each of its records an epsilon of %.4g at delta %g (noise %.4g, of losses "
        "%.4g); what evaluations give on test data is told %s",
        worker,
        account.planned,
        event.epsilon,
        event.delta,
        noise,
        loss_noise,
        "in full" if account.privacy.metric_noise is None else f"with noise {account.privacy.metric_noise:g}",
        extra=event.extra,
    )


def _count_lost(
    accounts: Mapping[int, Account], kept: Mapping[int, Kept], lacking: Collection[int], welcome: pb.Welcome
) -> None:
    """Steps that an earlier process may have taken, and of which the journal has nothing, count as taken.

    A journal may be lost, damaged, or an older copy. That of a worker which was away for some rounds looks
    like an older copy.
    """
    for entry in welcome.workers:
        account = accounts.get(entry.worker)
        if account is None:
            continue
        open_, begun = position_of(entry.position), entry.held or entry.payload > 0 or entry.offset > 0
        last = kept[entry.worker].report.position if entry.worker in kept else None
        lost, evaluations = (
            max(count, int(entry.worker in lacking)) for count in lost_since(last, open_, begun=begun)
        )
        if account.privacy.metric_noise is None:
            evaluations = 0
        if lost or evaluations:
            account.steps += lost
            account.evaluations += evaluations
            event = events.PrivacyCounted(worker=entry.worker, steps=lost)
            text = (
                "worker %d: its journal lacks rounds up to that which the server has open; %d steps%s count "
                "as spent by earlier processes"
            )
            told = f" and {evaluations} evaluations" if evaluations else ""
            LOG.warning(text, entry.worker, lost, told, extra=event.extra)


def lost_since(kept: Position | None, open_: Position, *, begun: bool) -> tuple[int, int]:
    """Steps and evaluations, of which at most one follows a round, that a worker may have answered after its
    journal's newest entry.

    Args:
        kept: of that entry; ``None`` if there is none.
        open_: of the server's open step.
        begun: whether the server has of the worker's answer to it.
    """
    if kept is None:
        # Of the rounds before one answer each, and perhaps of the open one.
        lost = open_.round if open_.round > 1 or begun else 0
        return lost, lost
    lost = max(open_.round - (open_.phase < BUFFERS_PHASE and not begun) - kept.round, 0)
    is_told = begun and open_.phase == EVALUATION_PHASE
    if not lost and not (is_told and kept < open_):
        return 0, 0
    return lost, open_.round - (not is_told) - kept.round + (kept.phase < EVALUATION_PHASE)


def _check_frozen(options: WorkerOptions, task: str, own: str, wanted: str) -> None:
    """Raise DataError if this site's frozen parameters are not the run's: it says where they come from."""
    if own == wanted:
        return
    given = ", ".join(f"--task-option {name}={value}" for name, value in options.task_options.items())
    raise DataError(
        f"the frozen parameters, which {task}.model() loads here{given and f' with {given}'}, are not the "
        f"run's: their digest is {own or 'none'}, the server's {words(wanted, 40) or 'none'}; give this site "
        "the same file, and the same version of the task"
    )


def _masking(
    options: WorkerOptions,
    run_id: str,
    run: AlgorithmSettings,
    store: KeyStore,
    journalled: tuple[Mapping[int, Kept], Collection[int]],
) -> Masking:
    """Keys and masks, with what earlier processes of these workers may have sent.

    Args:
        journalled: the newest entries, and the workers of which one is not there any more, or may not be.

    Raises:
        ConfigError: if the command line does not say how the peers are known.
        PeerError: if the run has too few workers.
    """
    files = options.peers.read()
    # With the library cryptography, which is optional.
    from afl_worker.masking import Masking  # noqa: PLC0415
    from afl_worker.peers import keyring_of  # noqa: PLC0415

    kept, lost = journalled
    keyring = keyring_of(run_id, options, run.workers, files, store)
    unsure = [
        worker
        for worker, key in store.read().items()
        # Without a roster no mask was made; an entry of other keys may be of a journal that was put back.
        if key.roster
        and (worker not in kept or worker in lost or epoch_of(kept[worker].report.history) != key.epoch)
    ]
    sent = {worker: (entry.report, entry.payloads) for worker, entry in kept.items()}
    return Masking(keyring, sent, unsure, metrics=run.hides_losses)


def chosen_device(name: str) -> torch.device:
    """The device that ``--device`` names; ``auto`` is CUDA where there is any. Raises ConfigError if there is
    no such device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}: torch sees no CUDA device here; use --device cpu or auto")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: no such device; write auto, cpu, cuda or cuda:N") from error
    last = torch.cuda.device_count() - 1
    if device.type == "cuda" and (device.index or 0) > last:
        raise ConfigError(f"--device {name}: the devices here are cuda:0 to cuda:{last}; name one of them")
    return device
