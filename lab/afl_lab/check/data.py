"""The workers' data: of each worker, and of all of them beside each other."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping

from afl.errors import ExitCode
from afl.site.policy import DEFAULT_MIN_BATCH
from afl.tasks import Task
from afl_lab.check.examples import Part
from afl_lab.check.findings import Report
from afl_worker.training.examples import held_out_count

UNEQUAL = 10
"""So many times the smallest worker's examples are worth a warning: each has the same batch in a round."""

FEW_TESTS = 30
"""With fewer test examples an accuracy moves in steps of more than 3 %."""

LARGE_INPUT = 50.0
"""Inputs that nobody has scaled, such as bytes of an image, are larger."""

MOST_SHOWN = 12
"""Workers in the table."""

Parts = Mapping[int, tuple[Part, Part]]
"""By worker, its training and its test examples."""


def check_data(report: Report, task: Task, parts: Parts, batch_size: int, held_out: float = 0.0) -> None:
    """Add what is to be said of the data, and a table of it; ``held_out`` is a share that trains nothing."""
    for worker, (train, test) in parts.items():
        where = f"worker {worker}'s data"
        if train.problem or test.problem:
            what, problem = ("train", train.problem) if train.problem else ("test", test.problem)
            report.error(f"{where}, {what}", problem, code=ExitCode.DATA)
            continue
        _check_sizes(report, where, train, test)
        held = held_out_count(train.count, held_out)
        _check_batch(report, where, train.count, held, batch_size, allows_smaller=task.allow_smaller_batch)
        _check_values(report, where, train, test)
        _check_classes(report, where, train, test)
    if not report.errors:
        _check_together(report, parts)
    _show(report, parts)


def _check_sizes(report: Report, where: str, train: Part, test: Part) -> None:
    for part, which in ((train, "training"), (test, "test")):
        if part.count == 0:
            advice = "every worker needs at least one of each; look at how data() divides them"
            report.error(where, f"it has no {which} examples", advice, code=ExitCode.DATA)
    if 0 < test.count < FEW_TESTS:
        steps = f": its accuracy moves in steps of {1 / test.count:.3f}"
        few = ", which is few" if test.classes is None else steps
        report.note(where, f"it tests on {test.count} examples{few}")


def _check_batch(
    report: Report, where: str, examples: int, held: int, batch_size: int, *, allows_smaller: bool
) -> None:
    count = examples - held
    if batch_size < min(count, DEFAULT_MIN_BATCH):
        what = f"minibatches of {batch_size} examples, from whose gradients a server can compute examples"
        report.note(where, f"{what}: a worker refuses them unless started with --min-batch {batch_size}")
    if not 0 < count < batch_size:
        return
    if allows_smaller:
        what = (
            f"all of its {count} training examples are used in every round (task.batch_size is {batch_size})"
        )
        report.note(where, what)
    else:
        besides, lower = "", "task.batch_size"
        if held:
            besides, lower = f" besides the {held} that are held out", f"{lower} or task.held_out"
        what = f"it has {count} training examples{besides}, fewer than task.batch_size ({batch_size})"
        advice = f"lower {lower}, or set allow_smaller_batch = True in the task"
        report.error(where, what, advice, code=ExitCode.DATA)


def _check_values(report: Report, where: str, train: Part, test: Part) -> None:
    for part, which in ((train, "training"), (test, "test")):
        if part.non_finite >= 0:
            what = f"the inputs of {which} example {part.non_finite} hold a number that is infinite or NaN"
            advice = "leave such examples out, or fill in what is missing"
            report.error(where, what, advice, code=ExitCode.DATA)
        if not part.is_steady:
            what = f"its {which} examples change from one look to the next (random augmentation?)"
            advice = "a run can then not be repeated to the bit; draw from a generator seeded with the index"
            report.warn(where, what, advice)
    if (largest := max(train.largest, test.largest)) > LARGE_INPUT:
        advice = "scaled to about -1 to 1, larger steps (algorithm.eta_w) are stable"
        report.note(where, f"its inputs go up to {largest:.3g}", advice)
    if both := Counter(train.digests) & Counter(test.digests):
        what = f"{both.total()} of its {test.count} test examples are training examples too"
        advice = "its accuracy then says little about new examples; divide before that, or drop the copies"
        report.warn(where, what, advice)


def _check_classes(report: Report, where: str, train: Part, test: Part) -> None:
    if not train.classes or test.classes is None:
        return
    if len(train.classes) == 1:
        what = f"all of its training examples have the label {next(iter(train.classes))}"
        advice = "right for extreme skew, and for a one-class problem; else look at how data() divides them"
        report.warn(where, what, advice)
    unseen = sorted(set(test.classes) - set(train.classes))
    if unseen and train.is_whole and test.is_whole:
        listed = ", ".join(map(str, unseen[:6])) + ", ..." * (len(unseen) > 6)
        what = f"it is tested on labels that it has no training examples of: {listed}"
        advice = "others' examples must teach them; divide by label if that is not meant"
        report.note(where, what, advice)


def _check_together(report: Report, parts: Parts) -> None:
    counts = {worker: train.count for worker, (train, _) in parts.items()}
    least, most = min(counts, key=lambda w: counts[w]), max(counts, key=lambda w: counts[w])
    if counts[most] >= UNEQUAL * counts[least]:
        report.warn(
            "the workers' sizes",
            f"worker {most} has {counts[most]} training examples, worker {least} {counts[least]}",
            "each takes the same batch in a round, so the small one's examples come around far more often and"
            " may be memorized; watch its test loss",
        )
    holders: defaultdict[bytes, list[int]] = defaultdict(list)
    for worker, (train, _) in parts.items():
        for digest in set(train.digests):
            holders[digest].append(worker)
    shared: Counter[tuple[int, int]] = Counter()
    for workers in holders.values():
        shared.update(itertools.combinations(workers[:MOST_SHOWN], 2))
    if not shared:
        return
    (one, other), count = shared.most_common(1)[0]
    what, advice = f"{count} training examples are at both", "each example should be at one worker"
    if set(parts[one][0].digests) == set(parts[other][0].digests):
        what, advice = "they have the same training examples", "does data() look at its argument `worker`?"
    more = f", and {len(shared) - 1} other pairs share some" if len(shared) > 1 else ""
    report.warn(f"workers {one} and {other}", f"{what}{more}", advice)


def _show(report: Report, parts: Parts) -> None:
    rows = report.facts["Data"] = {}
    values = report.values["data"] = []
    for worker, (train, test) in parts.items():
        labels = None if train.classes is None else {str(k): v for k, v in sorted(train.classes.items())}
        values.append({"worker": worker, "train": train.count, "test": test.count, "labels": labels})
        if len(rows) < MOST_SHOWN:
            shown = f"; labels {_shown_classes(train.classes)}" if train.classes else ""
            rows[f"worker {worker}"] = f"{train.count} to train on, {test.count} to test on{shown}"
    if len(parts) > MOST_SHOWN:
        rows["..."] = f"{len(parts) - MOST_SHOWN} more"


def _shown_classes(classes: Counter[int]) -> str:
    shown = ", ".join(f"{label} ({count})" for label, count in classes.most_common(4))
    return shown + (f" and {len(classes) - 4} more" if len(classes) > 4 else "")
