"""What a run directory says of one of its models, whatever state the run is in."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from afl.config import Config, load_config
from afl.errors import ConfigError, DataError, ExitCode
from afl.paths import kind_of, naming_paths
from afl.runs import files, shapes
from afl.runs.durable import is_locked
from afl.runs.shapes import EvaluationLine, Line, RoundLine
from afl.runs.sites import SiteTable

State: TypeAlias = Literal["finished", "stopped", "aborted", "running", "unfinished"]

_STOPPED = frozenset({ExitCode.INTERRUPTED.name.lower(), ExitCode.LOST_WORKERS.name.lower()})


@dataclass(frozen=True)
class Source:
    """One model of a run (``final``, ``random`` or ``best``), and what is known of it."""

    name: str
    model: files.StoredModel
    rounds: int  # the update rounds that the model has seen
    config: Config
    state: State
    state_words: str  # the state in a sentence
    evaluation: EvaluationLine | None  # of this model, or the last one before it
    sites: SiteTable  # up to this model
    sent: Line | None  # has the bytes up to this model; None before the first round
    synchronizations: int


@naming_paths()
def find(directory: Path, name: str, copy: Path) -> Source:
    """The model ``name`` of the run in ``directory``.

    Its file is first copied to ``copy``: a run that goes on may replace its own at any time.

    Raises:
        ConfigError: if no run is there, or it has no such model (yet).
        DataError: if the model or the metrics are damaged.
    """
    if kind_of(directory) != "folder":
        raise ConfigError(f"{directory}: no such directory; afl export takes a run's directory")
    if not all(kind_of(directory / file) == "file" for file in (files.CONFIG_FILE, files.METRICS_FILE)):
        raise ConfigError(f"{directory}: holds no run (no {files.CONFIG_FILE} with {files.METRICS_FILE})")
    config = load_config(directory / files.CONFIG_FILE, environment={})
    state, words = state_of(directory)
    file = directory / files.model_file(name)
    if kind_of(file) != "file":
        there = [other for other in files.MODEL_NAMES if (directory / files.model_file(other)).is_file()]
        others = f"; there is: --model {', --model '.join(there)}" if there else ", nor another"
        raise ConfigError(f"{directory}: there is no {name} model{others} ({words})")
    shutil.copyfile(file, copy)
    try:
        model = files.read_model(copy)
    except DataError as error:
        raise DataError(str(error).replace(str(copy), str(file))) from error
    # After the model: what the metrics then lack, it cannot have seen.
    metrics = directory / files.METRICS_FILE
    entries, _ = files.metrics_entries(metrics)
    try:
        rounds = int(model.metadata["rounds_applied"])
    except (KeyError, ValueError) as error:
        raise DataError(f"{file}: lacks {error}; was it written by another version of afl?") from error
    lines = [
        shapes.checked(entry, files.LINES[entry["event"]], f"{metrics}:{number}")
        for number, entry in enumerate(entries, start=1)
        if entry.get("event") in list(files.LINES)  # which need not be hashable in a file that was edited
    ]
    seen = [line for line in lines if line.round <= rounds]
    closed = next((line for line in reversed(seen) if isinstance(line, RoundLine)), None)
    if rounds and closed is None:
        raise DataError(
            f"{metrics} has no line of a round up to {rounds}, which the {name} model has seen; restore it "
            "from a backup"
        )
    return Source(
        name=name,
        model=model,
        rounds=rounds,
        config=config,
        state=state,
        state_words=words,
        evaluation=next((line for line in reversed(seen) if isinstance(line, EvaluationLine)), None),
        sites=SiteTable.of(line.model_dump() for line in seen if isinstance(line, EvaluationLine)),
        sent=seen[-1] if seen else None,
        synchronizations=closed.synchronization if closed else 0,
    )


def state_of(directory: Path) -> tuple[State, str]:
    """How a run stands, in a word and in a sentence; :class:`DataError` if its summary is damaged."""
    summary = shapes.read(directory / files.SUMMARY_FILE, shapes.Summary)
    if summary is None:
        locks = (directory, directory / files.STATE_FOLDER / "lock")
        if any(path.exists() and is_locked(path) for path in locks):
            return "running", "the run is still running"
        why = "its process died, or runs without state (server.state: off)"
        return "unfinished", f"the run has no summary: {why}"
    result, reason, rounds = summary.result, summary.reason, summary.rounds
    if result == ExitCode.OK.name.lower():
        return "finished", f"{reason}, after {rounds} rounds"
    if result in _STOPPED and (directory / files.STATE_FOLDER).is_dir():
        return "stopped", f"the run was stopped after round {rounds} and can be resumed: {reason}"
    return "aborted", f"the run ended early, after round {rounds} ({result}): {reason}"
