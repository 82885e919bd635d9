"""What an experiment is: methods, parts that run them, a search of step sizes, targets. Read from a folder.

A folder holds ``experiment.yaml`` and a configuration for each method, such as a server takes. The paper's
are beside this module; a user's own works the same.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afl.config import Config, load_config
from afl.config.source import read_yaml
from afl.errors import ConfigError

SHIPPED = Path(__file__).parent / "configs"

FILE = "experiment.yaml"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Score: TypeAlias = Literal["worst_accuracy", "max_loss"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Method(_Section):
    """A method: how it is shown, its configuration's file, and overrides of it."""

    label: str
    config: str
    set: list[str] = []


@dataclass(frozen=True)
class Steps:
    """Step sizes; ``eta_q`` is None for a method without one.

    Attributes:
        settings: what else is searched, as ``KEY=VALUE`` with the value in JSON.
    """

    eta_w: float
    eta_q: float | None = None
    settings: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """For a configuration."""
        dual = [] if self.eta_q is None else [f"algorithm.eta_q={self.eta_q!r}"]
        return [f"algorithm.eta_w={self.eta_w!r}", *dual, *self.settings]

    @property
    def shown_settings(self) -> list[str]:
        """``settings`` without the sections that their keys are in."""
        keys_values = (setting.partition("=") for setting in self.settings)
        return [f"{_last(key)}={json.loads(value)}" for key, _, value in keys_values]

    def __str__(self) -> str:
        dual = [] if self.eta_q is None else [f"q{self.eta_q:g}"]
        return "-".join([f"w{self.eta_w:g}", *dual, *self.shown_settings])


def _last(key: str) -> str:
    return key.rpartition(".")[2]


class Grid(_Section):
    """What to try: each of ``eta_w`` with each of ``eta_q`` and each value of other configuration keys."""

    eta_w: list[Positive]
    eta_q: list[Positive] = []
    set: dict[str, list[bool | int | float | str]] = {}

    @property
    def trials(self) -> list[Steps]:
        """In order."""
        eta_qs: list[float | None] = [*self.eta_q] or [None]
        others = [[f"{key}={json.dumps(value)}" for value in values] for key, values in self.set.items()]
        return [
            Steps(eta_w, eta_q, settings)
            for eta_w, eta_q in itertools.product(self.eta_w, eta_qs)
            for settings in itertools.product(*others)
        ]

    def edges(self, steps: Steps) -> list[str]:
        """The names of the numbers of which the grid has no smaller one, or no larger one, than the trial."""
        others = zip(self.set.items(), steps.settings, strict=True)
        tried: list[tuple[str, Sequence[Any], Any]] = [
            ("eta_w", self.eta_w, steps.eta_w),
            ("eta_q", self.eta_q, steps.eta_q),
            *(
                (_last(key), values, json.loads(setting.partition("=")[2]))
                for (key, values), setting in others
            ),
        ]
        return [
            name
            for name, values, value in tried
            if len(values) > 1 and not isinstance(value, str) and value in {min(values), max(values)}
        ]


class Search(_Section):
    """A search of step sizes, and of other settings, on the validation parts.

    Attributes:
        seed: of all trials; none of the final runs'.
        rounds: T of a trial; if not given, the final runs'.
        every: update rounds between evaluations; if not given, as in the final runs.
        score: by the worst worker's accuracy, or the maximum loss, where accuracies move in large steps.
        grids: by method; all of one size.
    """

    seed: int
    rounds: int | None = None
    every: int | None = None
    score: Score = "worst_accuracy"
    grids: dict[str, Grid]


class Targets(_Section):
    """What is to be reached: at least these worst workers' accuracies, at most these maximum losses."""

    worst_accuracy: list[float] = []
    max_loss: list[float] = []


class Variant(_Section):
    """A method with other settings."""

    method: str
    label: str
    set: list[str] = []


class Part(_Section):
    """Runs that are drawn together.

    Attributes:
        set: overrides of every configuration.
        methods: that are run as they are; all, where there are no ``variants`` either.
        search: of this part's own; else the step sizes are those found by the part ``steps``, or the
            configurations' own.
        series: parts of one series are drawn against the number of workers.
    """

    title: str
    seeds: list[int]
    set: list[str] = []
    methods: list[str] = []
    variants: dict[str, Variant] = {}
    search: Search | None = None
    steps: str | None = None
    targets: Targets = Targets()
    series: str | None = None


class _Document(_Section):
    title: str
    methods: dict[str, Method]
    parts: dict[str, Part]


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        name: the folder's.
        folder: where the configurations are.
    """

    name: str
    folder: Path
    title: str
    methods: Mapping[str, Method]
    parts: Mapping[str, Part]

    def variants(self, part: str) -> dict[str, Variant]:
        """The part's runs by name: methods as they are, and variants of them."""
        own = self.parts[part]
        plain = own.methods or ([] if own.variants else list(self.methods))
        return {name: Variant(method=name, label=self.methods[name].label) for name in plain} | own.variants

    def config(self, method: str, overrides: Sequence[str]) -> Config:
        """A method's configuration.

        Raises:
            ConfigError: if it is wrong.
        """
        own = self.methods[method]
        return load_config(self.folder / own.config, [*own.set, *overrides])


def shipped_experiments() -> list[str]:
    """The names of the paper's experiments."""
    return sorted(file.parent.name for file in SHIPPED.glob(f"*/{FILE}"))


def load_experiment(name: str) -> Experiment:
    """A shipped experiment by its name, or the one in a folder.

    Raises:
        ConfigError: if there is none, or its file is wrong.
    """
    folder = SHIPPED / name if name in shipped_experiments() else Path(name)
    file = folder / FILE
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        known = ", ".join(shipped_experiments())
        raise ConfigError(
            f"{name} is neither one of {known} nor a folder with a readable {FILE} ({error.strerror})"
        ) from error
    try:
        document = _Document.model_validate(read_yaml(text, str(file), {}).value)
    except ValidationError as error:
        lines = [
            f"{file}: {'.'.join(map(str, line['loc']))}: {line['msg']}"
            for line in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(lines)) from error
    experiment = Experiment(folder.resolve().name, folder, document.title, document.methods, document.parts)
    problems = list(_problems(experiment))
    if problems:
        raise ConfigError("\n".join(f"{file}: {problem}" for problem in problems))
    return experiment


def _problems(experiment: Experiment) -> list[str]:
    problems = []
    for name, part in experiment.parts.items():
        where = f"parts.{name}"
        wanted = {*part.methods, *(variant.method for variant in part.variants.values())}
        problems += [f"{where}: no method {method}" for method in sorted(wanted - experiment.methods.keys())]
        if problems:
            continue
        if part.steps is not None and part.search is not None:
            problems.append(f"{where}: either a search or the steps of another part")
        if part.steps is not None and (
            part.steps not in experiment.parts or experiment.parts[part.steps].search is None
        ):
            problems.append(f"{where}.steps: {part.steps} is no part with a search")
        if part.search is None:
            continue
        if part.search.seed in part.seeds:
            problems.append(f"{where}.search.seed: {part.search.seed} is a final run's too; choose another")
        methods = {variant.method for variant in experiment.variants(name).values()}
        if methods != part.search.grids.keys():
            problems.append(f"{where}.search.grids: one each is needed for {', '.join(sorted(methods))}")
        sizes = {method: len(grid.trials) for method, grid in part.search.grids.items()}
        if len(set(sizes.values())) > 1:
            problems.append(f"{where}.search.grids: every method gets as many trials as the others: {sizes}")
    return problems
