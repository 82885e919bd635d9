"""A card as a page: the ``README.md`` of an exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from afl.config.quantities import shown_bytes
from afl.runs.export.card import BUFFERS, ORIGINS
from afl.runs.export.loading import CARD_FILE, MODEL_FILE
from afl.runs.export.prediction import PROGRAM_FILE, SCRIPT_FILE
from afl.runs.metrics import HIDDEN, Ranked, ranked

_SITE_HEAD = ("worker", "first", "last", "best", "after round", "first weight", "last weight")

_NAMES: Mapping[str, str] = {
    "final": "the model after the last round that was closed",
    "random": "the model before a round that was drawn uniformly when the run began, the one that the "
    "theorems speak of",
    "best": "the model that served its worst worker best among those that were evaluated. It was chosen by "
    "the test data that it is reported on, so the figures are optimistic",
}


def page_of(card: Mapping[str, Any]) -> str:
    """The card as Markdown, with YAML front matter as model hubs read it."""
    model, run, data, task = card["model"], card["run"], card["data"], card["task"]
    front = {
        "library_name": "pytorch",
        "tags": ["federated-learning", "agnostic-federated-learning", "safetensors"],
        "run_id": run["id"],
        "digest": model["digest"],
    }
    description = data["description"]
    about = _quoted(description) if description else "Nobody described it (`run.description`)."
    origin = (
        f"This is {_NAMES[model['name']]}. It has seen {model['round']} of {card['algorithm']['rounds']} "
        f"rounds. When it was exported: {run['state_words']}."
    )
    shared = (
        f"{data['workers']} worker{'s' * (data['workers'] != 1)} trained, each on data of its own. The "
        f"server saw {_told(card['evaluation'], card['privacy'])}, and no examples."
    )
    if records := card["privacy"].get("records"):
        shared += (
            " Each record is protected by noise that its site added (`privacy.records`): `privacy_epsilon` "
            f"below is at delta {records['delta']:g}, for one record that is replaced. What was measured on "
            f"test data has {'noise too' if records.get('metrics') == 'noised' else 'no noise'}."
        )
    stored = (
        f"{model['trained_parameters']:,} trained parameters; {model['tensors']} tensors in the file, "
        "trained ones in float32, others in their own types."
    )
    origins = [text.format(model[name]) for name, text in ORIGINS.items() if name in model]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {task['name']}, {model['name']} model of run {run['id']}",
        origin,
        f"## Data\n\n{about}\n\n{shared}",
        f"## How it was trained\n\n{_settings(card)}",
        f"## How well it serves each worker\n\n{_evaluation(card)}",
        f"## What was sent\n\n{_communication(card['communication'])}",
        f"## Parameters and buffers\n\n{' '.join([stored, BUFFERS[model['buffers']], *origins])}",
        f"## How to load it\n\n{_loading(card)}",
        f"## Versions and identity\n\n{_identity(card)}",
    ]
    return "\n\n".join(parts) + "\n"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in text.strip().splitlines())


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def _settings(card: Mapping[str, Any]) -> str:
    task, seed = card["task"], card["run"]["seed"]
    rows: list[tuple[str, object]] = [("task", f"`{task['name']}`")]
    if task["options"]:
        rows.append(("task options", f"`{json.dumps(task['options'])}`"))
    rows.append(("minibatch of a worker", task["batch_size"]))
    for name, value in card["algorithm"].items():
        shown = value
        if isinstance(value, dict):
            options = ", ".join(f"{key} {each}" for key, each in value.items() if key != "name")
            named = value.get("name", options)
            shown = f"{named} ({options})" if options and named != options else named
        rows.append(("algorithm" if name == "name" else name, shown))
    rows.append(("seed", "not known" if seed is None else f"`{int(seed, 16)}`"))
    return _table(("setting", "value"), rows)


def _evaluation(card: Mapping[str, Any]) -> str:
    evaluation, round_ = card["evaluation"], card["model"]["round"]
    if evaluation is None:
        return "No evaluation was made before this model was written."
    lines = []
    if not evaluation["is_of_this_model"]:
        lines.append(
            f"**Not of this model**: it is of round {round_}, which was not evaluated. The figures are of "
            f"round {evaluation['round']}, the last before it that was."
        )
    if means := evaluation.get("means"):
        smooth = {"loss": f"{evaluation['smooth_worst_loss']:.5g}"}
        rows = [(name, smooth.get(name, "not known"), f"{means[name]:.5g}") for name in sorted(means)]
        lines.append(_table(("", "smooth worst", "mean over workers"), rows))
        return "\n\n".join([*lines, f"Each worker's own figures are {HIDDEN}."])
    labels = {site["worker"]: site["label"] for site in card["sites"]}
    whose = labels.get(evaluation["worst_worker"], evaluation["worst_worker"])
    worst = f"worst (worker {whose})"
    rows = [("loss", f"{evaluation['max_loss']:.5g}", f"{evaluation['mean_loss']:.5g}")]
    by = ranked(evaluation)
    if by.metric != "loss":
        worst = f"worst ({by.metric} of worker {whose}, largest loss)"
        rows.insert(0, (by.metric, by.shown(by.worst, 4), by.shown(by.mean, 4)))
    lines.append(_table(("", worst, "mean over workers"), rows))
    workers = evaluation["workers"]
    names = list(dict.fromkeys(key for worker in workers for key in worker if key != "worker"))
    head = ("worker", *("test examples" if name == "examples" else name for name in names))
    cells = [
        (labels.get(worker["worker"], worker["worker"]), *(_number(worker.get(name)) for name in names))
        for worker in workers
    ]
    lines += ["Each worker, on its own test data:", _table(head, cells)]
    lines += [
        f"How each came to it: its {by.metric}, and its dual weight.",
        _table(_SITE_HEAD, _sites(card, by)),
    ]
    return "\n\n".join(lines)


def _sites(card: Mapping[str, Any], by: Ranked) -> list[tuple[object, ...]]:
    return [
        (
            site["label"],
            *(by.shown(site[when], 4) for when in ("first", "last", "best")),
            site["best_round"],
            *(_number(site[f"{when}_weight"]) for when in ("first", "last")),
        )
        for site in card["sites"]
    ]


def _told(evaluation: Mapping[str, Any] | None, privacy: Mapping[str, Any]) -> str:
    """What the server saw, as a sentence has it; metrics are known from an evaluation alone."""
    if privacy["losses"] == "hidden":
        return "only sums over all workers of their masked gradients, losses and metrics"
    gradients = "gradients (of which only the sum, since they were masked)"
    gradients = gradients if privacy["secure_aggregation"] else "gradients"
    if evaluation is None:
        return f"{gradients}, losses and what the task measures"
    measured = {name for worker in evaluation["workers"] for name in worker} - {"worker", "examples", "loss"}
    told = [gradients, "losses"]
    if "accuracy" in measured:
        told.append("accuracies")
    if measured - {"accuracy"}:
        told.append("other metrics")
    return f"{', '.join(told[:-1])} and {told[-1]}"


def _number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return str(value) if isinstance(value, int) else f"{value:.5g}"


def _communication(sent: Mapping[str, Any] | None) -> str:
    if sent is None:
        return "No round was closed."
    rows = [
        (
            words,
            shown_bytes(sent[f"{way}_bytes"]),
            shown_bytes(4 * sent[f"{way}_float_equivalents"]),
            shown_bytes(sent[f"uncompressed_{way}_bytes"]),
        )
        for way, words in (("uplink", "workers to server"), ("downlink", "server to workers"))
    ]
    table = _table(("", "on the wire", "the paper's accounting", "uncompressed"), rows)
    share = sent["share_of_uncompressed"]
    note = (
        f"Up to round {sent['round']}, {sent['synchronizations']} synchronization rounds. Uncompressed is a "
        "whole float32 vector each way for each worker and synchronization round. On the wire is all that "
        "gRPC carried, first models and evaluations too; workers of one process share what goes down."
    )
    return f"{table}\n\n{note}" + (f" It was {share:.1%} of uncompressed." if share is not None else "")


def _loading(card: Mapping[str, Any]) -> str:
    task = card["task"]["name"]
    module, _, own = task.partition(":")
    if own:
        loading = f'from {module} import {own}\nimport afl\n\nmodel = afl.load_model("PATH", {own})'
    else:
        loading = 'import afl\n\nmodel = afl.load_model("PATH")'
    text = (
        f"```python\n{loading}\n```\n\n`PATH` is this folder. The module comes in evaluation mode. Without "
        f'afl: `safetensors.torch.load_file("{MODEL_FILE}")` gives the parameters by the module\'s names.'
    )
    for program in card["programs"]:
        batch = "any number of examples" if program["any_batch"] else "exactly so many examples"
        text += (
            f"\n\n`{program['file']}` is the module as {program['format']}, for inputs like "
            f"`{program['input']}` (the first dimension: {batch}). On a sample its output "
            f"differed from the module's by at most {program['largest_difference']:.2g} "
            f"(allowed: {program['tolerance']:.2g})."
        )
        if program["file"] == PROGRAM_FILE:
            text += f" `python {SCRIPT_FILE} batch.pt` runs it; {SCRIPT_FILE} says what it takes."
    return text


def _identity(card: Mapping[str, Any]) -> str:
    run, versions = card["run"], card["versions"]
    exported = ", ".join(f"{name} {version}" for name, version in versions["exported_with"].items())
    rows = [
        ("run", f"`{run['id']}`"),
        ("digest of the parameters", f"`{card['model']['digest']}` (as `afl inspect` shows it)"),
        ("digest of the configuration", f"`{run['config_digest']}`"),
        ("trained with afl", versions["trained_with_afl"]),
        ("exported with", exported),
    ]
    return _table(("", ""), rows) + f"\n\nThe same for programs: `{CARD_FILE}`."
