"""``afl inspect``: what a file of a run holds, or a whole run directory, as tables."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from rich.console import RenderableType
from rich.table import Table

from afl.config import Config, config_digest, load_config
from afl.config.address import Address
from afl.config.quantities import shown_bytes
from afl.errors import AflError, ConfigError, DataError, ExitCode
from afl.runs.files import metrics_entries, read_model
from afl.runs.metrics import MOST_SHOWN, growth, own_metrics, own_number
from afl.terminal.view import facts, make_console, summary_table, table

HELP = "show what a file or directory of a run holds"

Section: TypeAlias = RenderableType
"""A part of what is shown of a file."""

MOST_ROWS: Final = 20
"""Rows of a table unless everything is asked for."""

BYTES_A_VALUE: Final = 4

_KINDS: Final = (
    "a model (.safetensors), metrics.jsonl, summary.json, a run's configuration (.yaml), "
    "or a directory that holds them"
)

_SUMMARY_KEYS: Final = frozenset({"run_id", "result", "reason", "rounds", "seconds", "last", "communication"})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "path",
        type=Path,
        metavar="FILE",
        help="a model (.safetensors), metrics.jsonl, summary.json, a configuration (.yaml), "
        "or a directory with them",
    )
    parser.add_argument(
        "--all", action="store_true", help="show every evaluation and parameter, however many there are"
    )


def run(options: argparse.Namespace) -> ExitCode:
    """Print what the file or directory holds."""
    console = make_console()
    sections = describe(options.path, everything=options.all)
    for index, section in enumerate(sections):
        if index:
            console.print()
        console.print(section)
    return ExitCode.OK


def describe(path: Path, *, everything: bool = False) -> list[Section]:
    """What ``path`` holds.

    Args:
        everything: show every evaluation and parameter, however many there are.

    Raises:
        ConfigError: if there is no such file, or it is none of ours.
        DataError: if it is one of ours and damaged.
    """
    limit = None if everything else MOST_ROWS
    if path.is_dir():
        return _directory(path, limit)
    if not path.exists():
        raise ConfigError(f"{path}: no such file or directory")
    describers: Mapping[str, Callable[[Path, int | None], list[Section]]] = {
        ".safetensors": _model,
        ".jsonl": _metrics,
        ".json": _summary,
        ".yaml": _config,
        ".yml": _config,
    }
    describer = describers.get(path.suffix.lower())
    if describer is None:
        raise ConfigError(f"{path}: not a file that afl writes or reads; inspect takes {_KINDS}")
    try:
        return describer(path, limit)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except KeyError as error:
        raise DataError(f"{path}: lacks {error}; was it written by another version of afl?") from error


def _model(path: Path, limit: int | None) -> list[Section]:
    model = read_model(path)
    count = sum(parameter.count for parameter in model.tensors)
    rows: dict[str, RenderableType] = {
        "parameters": f"{count:,} in {len(model.tensors)} tensors",
        "file": shown_bytes(path.stat().st_size),
        "digest": f"{model.digest} (of the parameters; equal for equal models)",
    }
    rows.update((name.replace("_", " "), value) for name, value in sorted(model.metadata.items()))
    if "afl_version" not in model.metadata:
        rows["note"] = "not written by afl: it has no afl_version in its metadata"
    found = table("name", "shape", "type", "count>", title="Parameters")
    shown = model.tensors if limit is None else model.tensors[:limit]
    for parameter in shown:
        shape = " x ".join(map(str, parameter.shape)) or "scalar"
        found.add_row(parameter.name, shape, parameter.dtype, f"{parameter.count:,}")
    if len(shown) < len(model.tensors):
        found.caption = f"and {len(model.tensors) - len(shown)} more (--all shows them)"
    return [facts(rows, title=f"Model {path}"), found]


def _metrics(path: Path, limit: int | None) -> list[Section]:
    entries, is_cut = metrics_entries(path)
    rounds = [entry for entry in entries if entry.get("event") == "round"]
    evaluations = [entry for entry in entries if entry.get("event") == "evaluation"]
    if not rounds and not evaluations:
        raise ConfigError(f"{path}: holds no rounds and no evaluations; inspect takes {_KINDS}")
    rows: dict[str, RenderableType] = {
        "rounds": f"{rounds[-1]['round']} closed" if rounds else "none closed",
        "evaluations": str(len(evaluations)),
    }
    if rounds:
        last = rounds[-1]
        rows["last round"] = (
            f"loss at most {last['loss_max']:.5g} (worker {last['loss_max_worker']}), "
            f"mean {last['loss_mean']:.5g}; largest dual weight {last['dual_weight_max']:.4f}"
        )
        rows["seconds a round"] = f"median {_median([entry['seconds'] for entry in rounds]):.4f}"
    if evaluations and (grown := growth(rounds[0] if rounds else None, evaluations[0], evaluations[-1])):
        rows["warning"] = grown
    if is_cut:
        rows["note"] = "the last line is cut in the middle and left out: the server was killed as it wrote"
    sections: list[Section] = [facts(rows, title=f"Metrics {path}")]
    if evaluations:
        sections.append(_evaluations(evaluations, limit))
        sections += _own_metrics(evaluations, limit)
    return sections


def _evaluations(evaluations: Sequence[Mapping[str, Any]], limit: int | None) -> Table:
    shown = _thinned(evaluations, limit)
    has_accuracy = evaluations[-1]["worst_accuracy"] is not None
    accuracy = ["its accuracy>", "mean accuracy>"] if has_accuracy else []
    losses = ["largest loss>", "mean loss>", "bytes up>", "bytes down>"]
    found = table("round>", "worst worker>", *accuracy, *losses, title="Evaluations")
    for entry in shown:
        accuracies = [entry["worst_accuracy"], entry["mean_accuracy"]] if has_accuracy else []
        found.add_row(
            str(entry["round"]),
            str(entry["worst_worker"]),
            *(f"{value:.4f}" for value in accuracies),
            f"{entry['max_loss']:.5g}",
            f"{entry['mean_loss']:.5g}",
            shown_bytes(entry["uplink_bytes"]),
            shown_bytes(entry["downlink_bytes"]),
        )
    if len(shown) < len(evaluations):
        found.caption = f"{len(shown)} of {len(evaluations)} (--all shows every one)"
    return found


def _own_metrics(evaluations: Sequence[Mapping[str, Any]], limit: int | None) -> list[Section]:
    """What the task measures besides loss and accuracy, in a table of its own; nothing if there is none."""
    shown = _thinned(evaluations, limit)
    found = [own_metrics(entry.get("workers", ()), entry["worst_worker"]) for entry in shown]
    names = sorted({name for own in found for name in own})
    if not names:
        return []
    columns = names if limit is None else names[:MOST_SHOWN]
    headings = [f"{which} {name}>" for name in columns for which in ("its", "mean")]
    rows = table("round>", "worst worker>", *headings, title="The task's own metrics")
    for entry, own in zip(shown, found, strict=True):
        values = [own.get(name, {}).get(which) for name in columns for which in ("worst_worker", "mean")]
        rows.add_row(str(entry["round"]), str(entry["worst_worker"]), *map(own_number, values))
    left_out = [] if len(shown) == len(evaluations) else [f"{len(shown)} of {len(evaluations)} evaluations"]
    left_out += [] if len(columns) == len(names) else [f"{len(columns)} of {len(names)} metrics"]
    if left_out:
        rows.caption = f"{', '.join(left_out)} (--all shows every one)"
    return [rows]


def _summary(path: Path, _limit: int | None) -> list[Section]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON, or damaged: {error}") from error
    if not isinstance(summary, dict) or not summary.keys() >= _SUMMARY_KEYS:
        raise ConfigError(f"{path}: JSON, but not the summary of a run; inspect takes {_KINDS}")
    communication = summary["communication"]
    parts = table("what", *(f"{direction}>" for direction in communication), title="Bytes on the wire")
    for division in ("wire_bytes_by_kind", "payload_bytes_by_part"):
        for name in next(iter(communication.values()))[division]:
            parts.add_row(name, *(shown_bytes(count[division][name]) for count in communication.values()))
        parts.add_section()
    parts.add_row("all", *(shown_bytes(count["wire_bytes"]) for count in communication.values()))
    return [summary_table(summary, path.parent), parts]


def _config(path: Path, _limit: int | None) -> list[Section]:
    config = load_config(path)
    return [facts(_planned(config), title=f"Configuration {path}: valid")]


def _planned(config: Config) -> dict[str, RenderableType]:
    """What a configuration would run."""
    algorithm, evaluation = config.algorithm, config.evaluation.every
    seed = config.run.seed
    about = [algorithm.name, f"{algorithm.rounds} rounds"]
    about += [f"dual weights restart every {algorithm.block_length}"] if algorithm.takes("block") else []
    about += [f"{name} {value}" for name, value in algorithm.own.items()]
    rows: dict[str, RenderableType] = {
        "workers": str(config.workers),
        "task": _task_line(config),
        "algorithm": ", ".join(about),
        "step sizes": f"eta_w {algorithm.eta_w_value:.6g}, eta_q {config.eta_q_value:.6g}"
        + (" (from theory)" if "theory" in {algorithm.eta_w, algorithm.eta_q} else ""),
    }
    rows.update(_sizes(config))
    rows["evaluations"] = f"every {evaluation} rounds: {math.ceil(algorithm.rounds / evaluation)} in all"
    rows["seed"] = "a fresh one" if seed is None else str(seed)
    http = config.server.http
    rows["listens"] = f"{_listening(config.server.listen)}; " + (
        f"http on {_listening(http)}" if http is not None else "no http"
    )
    tls = config.server.tls
    if tls is not None:
        rows["TLS"] = f"certificate {tls.certificate}" + (
            f"; workers' certificates by {tls.client_ca}" if tls.client_ca is not None else ""
        )
    if config.server.tokens is not None:
        rows["tokens"] = f"hashes in {config.server.tokens}"
    if config.server.insecure:
        rows["plaintext"] = "allowed beyond this machine (server.insecure)"
    rows["results"] = str(config.run.directory or "runs/ and the run id")
    rows["digest"] = f"{config_digest(config)} (of what defines the result)"
    return rows


def _listening(address: Address) -> str:
    return str(address) if address.port else f"a free port of {address.host}"


def _task_line(config: Config) -> str:
    task = config.task
    options = f" with {json.dumps(task.options)}" if task.options else ""
    line = f"{task.name}{options}, minibatches of {task.batch_size}"
    if ":" in task.name:
        return f"{line}; its code is not loaded to inspect a file"
    from afl.tasks.registry import known_tasks  # noqa: PLC0415

    return line if task.name in known_tasks() else f"{line}; NOT INSTALLED here"


def _sizes(config: Config) -> dict[str, RenderableType]:
    """The model's size and what travels a round, where the task is an installed one."""
    up, down = config.algorithm.uplink_compressor, config.algorithm.downlink_compressor
    rows: dict[str, RenderableType] = {
        "compressors": f"up {_compressor_line(up.name, up.options)}, "
        f"down {_compressor_line(down.name, down.options)}"
    }
    # With PyTorch, which the other commands start without.
    from afl.core.compressors import create  # noqa: PLC0415
    from afl.core.randomness import SharedRandomness  # noqa: PLC0415
    from afl.tasks.initialization import build_vector  # noqa: PLC0415
    from afl.tasks.registry import known_tasks, load_task  # noqa: PLC0415

    if config.task.name not in known_tasks():
        return rows
    try:
        dim = build_vector(load_task(config.task.name, config.task.options), SharedRandomness.from_int(0)).dim
        counts = [create(choice.name, dim, choice.options).count for choice in (up, down)]
    except AflError as error:
        rows["model"] = f"cannot be made here: {error}"
        return rows
    rows["model"] = f"{dim:,} trainable parameters"
    sent = [shown_bytes(BYTES_A_VALUE * count) for count in counts]
    rows["values a round"] = (
        f"{sent[0]} up a worker, {sent[1]} down a connection; "
        f"uncompressed {shown_bytes(BYTES_A_VALUE * dim)} each"
    )
    return rows


def _compressor_line(name: str, options: Mapping[str, Any]) -> str:
    return name + (f" ({', '.join(f'{key} {value}' for key, value in options.items())})" if options else "")


def _directory(path: Path, limit: int | None) -> list[Section]:
    there = [name for name in ("config.yaml", "summary.json", "metrics.jsonl") if (path / name).is_file()]
    sections: list[Section] = []
    if "metrics.jsonl" in there and "summary.json" not in there:
        sections.append(_unfinished(path))
    # A server writes its first line of metrics once a round is closed.
    if "metrics.jsonl" in there and not (path / "metrics.jsonl").stat().st_size:
        there.remove("metrics.jsonl")
    for name in there:
        sections += describe(path / name, everything=limit is None)
    models = sorted(path.glob("model-*.safetensors"))
    if models:
        found = table("file", "after round", "worst worker", "digest of the parameters", title="Models")
        for file in models:
            model = read_model(file)
            after = model.metadata.get("rounds_applied", "?")
            found.add_row(file.name, after, _served(model.metadata), model.digest)
        sections.append(found)
    if not sections:
        raise ConfigError(
            f"{path}: holds no run (none of config.yaml, summary.json, metrics.jsonl, model-*.safetensors)"
        )
    return sections


def _unfinished(path: Path) -> Section:
    """What to say of a run that its server has not concluded."""
    entries, _ = metrics_entries(path / "metrics.jsonl")
    rounds = [entry["round"] for entry in entries if entry.get("event") == "round" and "round" in entry]
    return facts(
        {
            "state": "no summary.json: its server still runs (see afl status), or died before the end",
            "last round": f"{rounds[-1]} is the last that metrics.jsonl has" if rounds else "none was closed",
        },
        title=f"Run {path}: UNFINISHED",
    )


def _thinned(entries: Sequence[Mapping[str, Any]], limit: int | None) -> Sequence[Mapping[str, Any]]:
    """At most ``limit`` entries, evenly spread, first and last among them."""
    if limit is None or len(entries) <= limit:
        return entries
    return [entries[index * (len(entries) - 1) // (limit - 1)] for index in range(limit)]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _served(metadata: Mapping[str, str]) -> str:
    """How a model serves its worst worker, from its metadata: accuracy, or loss where there is none."""
    if accuracy := metadata.get("worst_accuracy"):
        return f"accuracy {float(accuracy):.4f}"
    return f"loss {float(metadata['max_loss']):.5g}" if "max_loss" in metadata else "not evaluated"
