"""``afl inspect``: what a file of a run holds, or a whole run directory, as tables."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import RenderableType

from afl.config import Config, config_digest, load_config
from afl.config.address import Address
from afl.config.quantities import shown_bytes
from afl.errors import AflError, ConfigError, DataError, ExitCode
from afl.names import named, names_of, with_names
from afl.outside import plain, printable
from afl.paths import expanded, kind_of, read_named
from afl.runs.files import (
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    metrics_entries,
    of_event,
    read_model,
    read_summary,
)
from afl.runs.metrics import (
    HIDDEN,
    MOST_SHOWN,
    OwnMetrics,
    growth,
    hidden_figures,
    number_of,
    over_blocks,
    own_means,
    own_metrics,
    own_number,
    ranked,
    worst_loss,
)
from afl.runs.shapes import damage_named
from afl.runs.sites import SiteTable
from afl.runs.versions import read_versions, shown_versions
from afl.terminal.by_site import BySite
from afl.terminal.view import describe_integers, facts, make_console, summary_table, table
from afl_cli.theory import compressor_words, model_tensors

HELP = "show what a file or directory of a run holds"

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
    parser.add_argument("path", type=expanded, metavar="FILE", help=_KINDS)
    everything = "show every evaluation and parameter, however many there are"
    parser.add_argument("--all", action="store_true", help=everything)


def run(options: argparse.Namespace) -> ExitCode:
    """Print what the file or directory holds."""
    console = make_console()
    for index, part in enumerate(described(options.path, None if options.all else MOST_ROWS)):
        if index:
            console.print()
        # Some rows are made only now.
        with damage_named(str(options.path)):
            console.print(part)
    return ExitCode.OK


def described(path: Path, limit: int | None) -> list[RenderableType]:
    """What ``path`` holds, in tables of at most ``limit`` rows.

    Raises:
        ConfigError: if there is no such file, or it is none of ours.
        DataError: if it is one of ours and damaged.
    """
    kind = kind_of(path)
    if kind == "folder":
        return _directory(path, limit)
    if not kind:
        raise ConfigError(f"{path}: no such file or directory")
    describers: Mapping[str, Callable[[Path, int | None], list[RenderableType]]] = {
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
        with damage_named(str(path)):
            return describer(path, limit)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _model(path: Path, limit: int | None) -> list[RenderableType]:
    model = read_model(path)
    count = sum(parameter.count for parameter in model.tensors)
    rows: dict[str, RenderableType] = {
        "parameters": f"{count:,} in {len(model.tensors)} tensors",
        "file": shown_bytes(path.stat().st_size),
        "digest": f"{model.digest} (of the parameters; equal for equal models)",
    }
    rows.update((name.replace("_", " "), value) for name, value in sorted(plain(model.metadata).items()))
    if "afl_version" not in model.metadata:
        rows["note"] = "not written by afl: it has no afl_version in its metadata"
    found = table("name", "shape", "type", "count>", title="Parameters")
    for parameter in model.tensors[:limit]:
        shape = " x ".join(map(str, parameter.shape)) or "scalar"
        found.add_row(printable(parameter.name), shape, parameter.dtype, f"{parameter.count:,}")
    if found.row_count < len(model.tensors):
        found.caption = f"and {len(model.tensors) - found.row_count} more (--all shows them)"
    return [facts(rows, title=f"Model {path}"), found]


def _metrics(path: Path, limit: int | None) -> list[RenderableType]:
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
        hides, names = last["loss_max"] is None, names_of(evaluations[-1]) if evaluations else {}
        rows["last round"] = (
            f"mean loss {last['loss_mean']:.5g}"
            if hides
            else f"loss at most {last['loss_max']:.5g} (worker {named(last['loss_max_worker'], names)}), "
            f"mean {last['loss_mean']:.5g}; largest dual weight {last['dual_weight_max']:.4f}"
        )
        if hides:
            rows["losses"] = HIDDEN
        if "integers" in last:
            rows["its integers"] = describe_integers(last["integers"])
        median = statistics.median_high(entry["seconds"] for entry in rounds)
        rows["seconds a round"] = f"median {median:.4f}"
    if evaluations and (grown := growth(rounds[0] if rounds else None, evaluations[0], evaluations[-1])):
        rows["warning"] = grown
    if evaluations and (warnings := plain(evaluations[-1].get("warnings"))):
        rows["its sites"] = with_names("\n".join(warnings), names_of(evaluations[-1]))
    if is_cut:
        rows["note"] = "the last line is cut in the middle and left out: the server was killed as it wrote"
    if evaluations and (over := over_blocks(evaluations)):
        rows["over whole blocks"] = str(over)
    about = facts(rows, title=f"Metrics {path}")
    if not evaluations:
        return [about]
    shown = evaluations
    if limit is not None and len(evaluations) > limit:
        # Evenly spread, first and last among them.
        shown = [evaluations[index * (len(evaluations) - 1) // (limit - 1)] for index in range(limit)]
    left_out = [] if len(shown) == len(evaluations) else [f"{len(shown)} of {len(evaluations)}"]
    own = _own_metrics(shown, left_out, limit)
    by_site = BySite(SiteTable.of(of_event(entries, "evaluation")), limit)
    return [about, _evaluations(shown, left_out), *own, by_site, *_residuals(evaluations, limit)]


def _evaluations(evaluations: Sequence[Mapping[str, Any]], left_out: list[str]) -> RenderableType:
    last = evaluations[-1]
    metric, hides = ranked(last).metric, bool(hidden_figures(last))
    headings = [] if hides else ["worst worker>"]
    if metric != "loss":
        headings += [f"mean {metric}>"] if hides else [f"its {metric}>", f"mean {metric}>"]
    headings += ["smooth worst loss>" if hides else "largest loss>", "mean loss>"]
    blocks = {entry["block"] for entry in evaluations if "block" in entry}
    phase = [f"of {' or '.join(map(str, sorted(blocks)))} since restart>"] if blocks else []
    found = table("round>", *phase, *headings, "bytes up>", "bytes down>", title="Evaluations")
    for entry in evaluations:
        by = ranked(entry)
        found.add_row(
            str(entry["round"]),
            *([str(entry.get("rounds_since_restart", ""))] if phase else []),
            *([] if hides else [str(entry["worst_worker"])]),
            *(by.shown(value, 4) for value in (by.worst, by.mean)[hides:] if metric != "loss"),
            *(f"{value:.5g}" for value in (worst_loss(entry)[1], entry["mean_loss"])),
            *(shown_bytes(entry[name]) for name in ("uplink_bytes", "downlink_bytes")),
        )
    found.caption = "".join(f"{part} (--all shows every one)" for part in left_out) or None
    return found


def _own_metrics(
    evaluations: Sequence[Mapping[str, Any]], left_out: list[str], limit: int | None
) -> Iterable[RenderableType]:
    """What the task measures besides the loss and what ranks, in a table of its own, if any."""
    found = [_own_of(entry) for entry in evaluations]
    names = sorted({name for own in found for name in own})
    if not names:
        return
    columns = names if limit is None else names[:MOST_SHOWN]
    hides = bool(hidden_figures(evaluations[-1]))
    which_ones = {"mean": "mean"} if hides else {"worst_worker": "its", "mean": "mean"}
    headings = [f"{which} {name}>" for name in columns for which in which_ones.values()]
    rows = table("round>", *([] if hides else ["worst worker>"]), *headings, title="The task's own metrics")
    for entry, own in zip(evaluations, found, strict=True):
        values = [own.get(name, {}).get(which) for name in columns for which in which_ones]
        worst = [] if hides else [str(entry["worst_worker"])]
        rows.add_row(str(entry["round"]), *worst, *map(own_number, values))
    left_out = [f"{part} evaluations" for part in left_out]
    left_out += [] if len(columns) == len(names) else [f"{len(columns)} of {len(names)} metrics"]
    if left_out:
        rows.caption = f"{', '.join(left_out)} (--all shows every one)"
    yield rows


def _residuals(evaluations: Sequence[Mapping[str, Any]], limit: int | None) -> Iterable[RenderableType]:
    """What has yet to be sent of each tensor, the largest first, where messages are integers."""
    told = [entry for entry in evaluations if "tensor_residual_norms" in entry]
    if not told:
        return
    moments = [told[index * (len(told) - 1) // 2] for index in range(3)] if len(told) > 2 else told
    headings = [f"after round {entry['round']}>" for entry in moments]
    rows = table("tensor", *headings, title="Residuals: the largest norm of a worker's, by tensor")
    last = moments[-1]["tensor_residual_norms"]
    names = sorted(last, key=last.__getitem__, reverse=True)
    for name in names[:limit]:
        rows.add_row(name, *(f"{entry['tensor_residual_norms'][name]:.4g}" for entry in moments))
    if rows.row_count < len(names):
        rows.caption = f"{rows.row_count} of {len(names)} tensors (--all shows every one)"
    yield rows


def _own_of(entry: Mapping[str, Any]) -> OwnMetrics:
    if "means" in entry:
        return own_means(entry["means"], entry.get("rank_by"))
    return own_metrics(entry.get("workers", ()), entry["worst_worker"], entry.get("rank_by"))


def _summary(path: Path, _limit: int | None) -> list[RenderableType]:
    try:
        found = json.loads(read_named(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON, or damaged: {error}") from error
    if not isinstance(found, dict) or not found.keys() >= _SUMMARY_KEYS:
        raise ConfigError(f"{path}: JSON, but not the summary of a run; inspect takes {_KINDS}")
    summary = read_summary(path)
    communication = summary["communication"]
    parts = table("what", *(f"{direction}>" for direction in communication), title="Bytes on the wire")
    for division in ("wire_bytes_by_kind", "payload_bytes_by_part"):
        for name in communication["uplink"][division]:
            parts.add_row(name, *(shown_bytes(count[division][name]) for count in communication.values()))
        parts.add_section()
    parts.add_row("all", *(shown_bytes(count["wire_bytes"]) for count in communication.values()))
    return [summary_table(summary, path.parent), parts]


def _config(path: Path, _limit: int | None) -> list[RenderableType]:
    """What a configuration would run."""
    config = load_config(path)
    algorithm, evaluation, server = config.algorithm, config.evaluate_every, config.server
    about = [algorithm.name, f"{algorithm.rounds} rounds"]
    about += [f"dual weights restart every {algorithm.block_length}"] if algorithm.takes("block") else []
    about += [f"{name} {value}" for name, value in algorithm.own.items()]
    if dual := algorithm.dual_section:
        about.append(f"dual weights by {compressor_words(dual.pop('name'), dual)}")
    eta_q = f", eta_q {config.eta_q_value:.6g}" if algorithm.takes("eta_q") else ""
    about += ["the final model is the mean of the last block's"] * (algorithm.final_model == "block-mean")
    from_theory = " (from theory)" if "theory" in {algorithm.eta_w, algorithm.eta_q} else ""
    http = "no http" if server.http is None else f"{server.page_scheme} on {_listening(server.http)}"
    rows: dict[str, RenderableType] = {
        "workers": f"{config.workers}: {', '.join(config.sites)}" if config.sites else str(config.workers),
        "task": _task_line(config),
        "algorithm": ", ".join(about),
        "step sizes": f"eta_w {algorithm.eta_w_value:.6g}{eta_q}{from_theory}",
        **({"steps": "; ".join(_words(algorithm.stepping))} if algorithm.stepping else {}),
        **_sizes(config),
        "evaluations": f"every {evaluation} rounds: {math.ceil(algorithm.rounds / evaluation)} in all",
        **({"privacy": _privacy(config)} if config.privacy.secure_aggregation else {}),
        **({"records": words} if (words := config.privacy.record_words) else {}),
        "seed": "a fresh one" if config.run.seed is None else str(config.run.seed),
        "listens": f"{_listening(server.listen)}; {http}",
    }
    if (tls := server.tls) is not None:
        by = "" if tls.client_ca is None else f"; workers' certificates by {tls.client_ca}"
        rows["TLS"] = f"certificate {tls.certificate}{by}"
    if server.tokens is not None:
        rows["tokens"] = f"hashes in {server.tokens}"
    if server.insecure:
        rows["plaintext"] = "allowed beyond this machine (server.insecure)"
    rows["results"] = str(config.run.directory or "runs/ and the run id")
    rows["digest"] = f"{config_digest(config)} (of what defines the result)"
    return [facts(rows, title=f"Configuration {path}: valid")]


def _words(stepping: Mapping[str, Any]) -> Iterator[str]:
    """``schedule: warm_up 5, then cosine``."""
    for name, value in stepping.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        yield f"{name}: " + ", ".join(f"{key} {shown}".strip() for key, shown in inner)


def _privacy(config: Config) -> str:
    return f"secure aggregation, losses {config.privacy.losses}"


def _listening(address: Address) -> str:
    return str(address) if address.port else f"a free port of {address.host}"


def _task_line(config: Config) -> str:
    from afl.tasks.registry import known_tasks  # noqa: PLC0415  # with PyTorch

    task = config.task
    options = f" with {json.dumps(task.options)}" if task.options else ""
    line = f"{task.name}{options}, minibatches of {task.batch_size}"
    if ":" in task.name:
        return f"{line}; its code is not loaded to inspect a file"
    return line if task.name in known_tasks() else f"{line}; NOT INSTALLED here"


def _sizes(config: Config) -> dict[str, str]:
    """The model's size and what travels a round, where the task is an installed one."""
    from afl.core.algorithms.realizations import Realizations  # noqa: PLC0415  # with PyTorch
    from afl.core.codecs.payload import expected  # noqa: PLC0415
    from afl.core.randomness import SharedRandomness  # noqa: PLC0415
    from afl.wire.settings import RunSettings  # noqa: PLC0415

    up, down = config.algorithm.uplink_compressor, config.algorithm.downlink_compressor
    words = [compressor_words(choice.name, choice.options) for choice in (up, down)]
    rows = {"compressors": f"up {words[0]}, down {words[1]}"}
    try:
        tensors = model_tensors(config)
        if tensors is None:
            return rows
        dim = sum(tensors)
        settings = replace(RunSettings.of_config(config).parameters, tensors=tensors)
        drawn = Realizations(settings, dim, SharedRandomness.from_int(0))
    except AflError as error:
        return {**rows, "model": f"cannot be made here: {error}"}
    forms = drawn.uplink, drawn.down_form
    above, below = (
        f"{'at most ' * (form.bits > 0)}{shown_bytes(expected(form).value_bytes)}" for form in forms
    )
    whole = shown_bytes(BYTES_A_VALUE * dim)
    rows["model"] = f"{dim:,} trainable parameters"
    rows["values a round"] = f"{above} up a worker, {below} down a connection; uncompressed {whole} each"
    if drawn.down_form.bits:
        up_bits = f"{drawn.uplink.bits} bits up, " * (drawn.uplink.bits > 0)
        rows["integers"] = (
            f"{up_bits}{drawn.down_form.bits} down at fixed width, which is the most; entropy-coded where"
            " that is shorter, by how much depends on the gradients: afl check measures it"
        )
    return rows


def _directory(path: Path, limit: int | None) -> list[RenderableType]:
    there = [name for name in (CONFIG_FILE, SUMMARY_FILE, METRICS_FILE) if (path / name).is_file()]
    sections: list[RenderableType] = []
    if METRICS_FILE in there and SUMMARY_FILE not in there:
        sections.append(_unfinished(path))
    for name in there:
        # A server writes its first line of metrics once a round is closed.
        if name != METRICS_FILE or (path / name).stat().st_size:
            sections += described(path / name, limit)
    found = table("file", "after round", "worst worker", "digest of the parameters", title="Models")
    for file in sorted(path.glob("model-*.safetensors")):
        model = read_model(file)
        said = model.metadata
        losses = {"max_loss": "loss", "smooth_worst_loss": "smooth worst loss"}
        served = next(
            (f"{losses[key]} {float(said[key]):.5g}" for key in losses if key in said), "not evaluated"
        )
        name = said.get("rank_by", "accuracy")
        if (value := said.get("worst_value") or said.get("worst_accuracy")) and name != "loss":
            served = f"{name} {number_of(name, float(value), 4)}"
        found.add_row(file.name, said.get("rounds_applied", "?"), served, model.digest)
    if found.row_count:
        sections.append(found)
    if not sections:
        names = f"{CONFIG_FILE}, {SUMMARY_FILE}, {METRICS_FILE}, model-*.safetensors"
        raise ConfigError(f"{path}: holds no run (none of {names})")
    return sections


def _unfinished(path: Path) -> RenderableType:
    """What to say of a run that its server has not concluded."""
    entries, _ = metrics_entries(path / METRICS_FILE)
    rounds = [entry["round"] for entry in entries if entry.get("event") == "round" and "round" in entry]
    rows = {
        "state": "no summary.json: its server still runs (see afl status), or died before the end",
        "last round": f"{rounds[-1]} is the last that metrics.jsonl has" if rounds else "none was closed",
        "versions of afl": shown_versions(read_versions(path)),
    }
    return facts(rows, title=f"Run {path}: UNFINISHED")
