"""The options of a task (``task.options`` in a run's configuration): typed, checked, explained when wrong.

A task declares a :class:`TaskOptions` with one described field for each option and calls
:func:`parse_options` in ``__init__``. Users' own tasks may do the same, or take plain keyword arguments.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from afl.config.problems import nearest
from afl.errors import ConfigError
from afl.paths import expanded


class TaskOptions(BaseModel):
    """Base of every built-in task's options: unknown keys are refused, floats are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        if isinstance(value, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value):
            raise ValueError("no file or setting has a NUL or half a surrogate pair in its name")
        return value


class DataOptions(TaskOptions):
    """Options of a task that reads files."""

    data_dir: Path | None = None
    """where this machine keeps its data; default: the environment's AFL_DATA, or ./data"""

    def folder(self) -> Path:
        """The data directory: the option, else ``$AFL_DATA``, else ``data`` below the working directory."""
        return expanded(self.data_dir or Path(os.environ.get("AFL_DATA") or "data"))


class SplitOptions(TaskOptions):
    """Options of a task that splits each worker's examples."""

    evaluate_on: Literal["test", "validation"] = "test"
    """each worker's test part, or a fifth of its training part, which is then not trained on: to choose step
    sizes without looking at the test part"""
    data_seed: int | None = Field(default=None, ge=0, lt=1 << 128)
    """draws the division among the workers and the splits; default: the run's seed"""


OptionsT = TypeVar("OptionsT", bound=TaskOptions)


def parse_options(schema: type[OptionsT], values: Mapping[str, Any]) -> OptionsT:
    """The checked options.

    Raises:
        afl.ConfigError: naming every wrong option, with the nearest right name or what would be accepted.
    """
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        problems = [_explain(schema, problem) for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(problems)) from error


def hint_of(name: str, known: Iterable[str]) -> str:
    """``did you mean X?`` with the nearest of ``known``, or a list of them where none is near."""
    names = sorted(known)
    if meant := nearest(name, names):
        return f"did you mean {meant}?"
    return f"known: {', '.join(names)}" if names else "there are none"


def _explain(schema: type[TaskOptions], problem: Mapping[str, Any]) -> str:
    path = [str(step) for step in problem["loc"]]
    where = ".".join(["task.options", *path])
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown option; {hint_of(path[-1], schema.model_fields)}"
    field = schema.model_fields.get(path[0]) if path else None
    purpose = f" ({' '.join(field.description.split())})" if field is not None and field.description else ""
    if problem["type"] == "missing":
        return f"{where}: is required{purpose}"
    accepted = problem["msg"].removeprefix("Value error, ")
    value = repr(problem["input"])
    value = value if len(value) <= 60 else f"{value[:57]}..."
    return f"{where}: {value} is not accepted: {accepted[:1].lower()}{accepted[1:]}{purpose}"
