"""``afl theory``: what the paper's theorems say of a run before it is started."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from afl import theory as paper
from afl.config import Config, check_compressor, load_config
from afl.config.compressors import IDENTITY, THEORY, resolved_options
from afl.core.algorithms.registry import algorithm_named
from afl.core.dual import rule_named
from afl.core.messages import BITS
from afl.core.record_privacy import Account, epsilon_of_tests
from afl.errors import AflError, ConfigError, ExitCode
from afl.paths import expanded
from afl.terminal.parser import set_option
from afl.terminal.view import make_console, table

HELP = "step sizes, block length and compression from the paper"

LARGEST: Final = 1e12

_GIVEN_BY_CONFIG: Final = {
    "workers": "workers",
    "rounds": "algorithm.rounds",
    "compressor": "algorithm.uplink.name",
    "ratio": "algorithm.uplink.ratio",
}
"""Options, and the key that says the same in a configuration."""

_STEPS: Final = (
    ("block", "ceil(sqrt T)", "rounds from restart to restart of the weights", ""),
    ("eta_w", "1 / (8 L T^(3/4))", "step on the parameters", "--smoothness"),
    ("eta_q", "2 sqrt(ln m) / (sigma_q T^(1/4))", "step on the dual weights, per unit of loss", "--sigma-q"),
)

_RATIOS: Final[Mapping[paper.CompressorClass, tuple[str, str]]] = {
    "contractive": ("top-k, and any delta-approximate one", "(ln m)^(-1/4)"),
    "additive-idempotent": ("rand-k both ways, with shared randomness", "(ln m)^(-1/2)"),
}

_ROUNDING: Final = (
    "the messages are integers: rounding errs by up to half a step of the grid a value, whatever the size of"
    " the vector. delta is that of the selection alone, and no theorem covers the rest; see docs/theory.md"
)

_Choice = tuple[str, Mapping[str, Any]]
"""A compressor's name and options."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Step sizes and block length for a run's size, and how much may be dropped; see docs/theory.md."
    )
    size = parser.add_argument_group("the run")
    size.add_argument("--workers", type=whole, metavar="m", help="number of workers")
    size.add_argument("--rounds", type=whole, metavar="T", help="number of update rounds")
    size.add_argument("--dim", type=whole, metavar="d", help="number of trainable parameters")
    size.add_argument("--compressor", metavar="NAME", help="compressor both ways, such as rand-k")
    ratio = "share of the coordinates it keeps"
    size.add_argument("--ratio", type=share, metavar="SHARE", help=ratio)
    config = "take these, and L and sigma_q, from a configuration"
    size.add_argument("--config", type=expanded, metavar="FILE", help=config)
    set_option(size)
    records = "training records of the smallest site, for a configuration with privacy.records"
    size.add_argument("--records", type=whole, metavar="n", help=records)
    problem = parser.add_argument_group("constants of the problem (estimates will do)")
    problem.add_argument("--smoothness", type=positive, metavar="L", help="smoothness of the workers' risks")
    sigma_q = "sub-Gaussian parameter of a minibatch's loss"
    problem.add_argument("--sigma-q", type=positive, metavar="s", help=sigma_q)
    constants = "take L, sigma_q and d from a file that afl check --constants has written"
    problem.add_argument("--constants", type=expanded, metavar="FILE", help=constants)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(options: argparse.Namespace) -> ExitCode:
    """Print it."""
    if options.constants is not None:
        _take_constants(options)
    found = _of_configuration(options) if options.config is not None else _of_options(options)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        make_console().print(*_shown(found), sep="\n")
    return ExitCode.OK


def _take_constants(options: argparse.Namespace) -> None:
    """What the file says, as if it were given by options; those that are given come first."""
    path = options.constants
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {name: check(str(found[name])) for name, check in _MEASURED.items() if found[name]}
    except OSError as error:
        raise ConfigError(f"--constants {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, argparse.ArgumentTypeError) as error:
        made = "afl check --config FILE --constants FILE writes it"
        raise ConfigError(f"--constants {path}: no constants of a task ({error}); {made}") from error
    for name, value in known.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _of_options(options: argparse.Namespace) -> dict[str, Any]:
    for name in ("workers", "rounds"):
        if getattr(options, name) is None:
            raise ConfigError(f"--{name} is missing; give it, or --config with a server's configuration")
    for override in options.set:
        raise ConfigError(f"--set {override} overrides a configuration, and none is given: add --config")
    if options.compressor is None and options.ratio is not None:
        raise ConfigError("--ratio needs --compressor, such as --compressor rand-k")
    name = options.compressor or IDENTITY
    if name != IDENTITY and options.dim is None:
        raise ConfigError(f"--compressor {name} needs --dim: its contraction delta depends on the dimension")
    choice = name, {} if options.ratio is None else {"ratio": options.ratio}
    return _answer(options, choice, choice, [])


def _of_configuration(options: argparse.Namespace) -> dict[str, Any]:
    for option, key in _GIVEN_BY_CONFIG.items():
        if getattr(options, option) is not None:
            raise ConfigError(f"--{option} and --config both set it; use --set {key}=... instead")
    config = load_config(options.config, options.set)
    algorithm = config.algorithm
    for name, flag in (("smoothness", "--smoothness"), ("sigma_q", "--sigma-q")):
        if (written := getattr(algorithm, name)) is None:
            continue
        if getattr(options, name) is not None and options.constants is None:
            raise ConfigError(f"{flag} is also algorithm.{name} of {options.config}; leave out {flag}")
        setattr(options, name, written)
    options.workers, options.rounds = config.workers, algorithm.rounds
    warnings = _warnings(config)
    if options.dim is None:
        task = config.task.name
        try:
            options.dim = model_size(config)
            if options.dim is None:
                unknown = f"the task {task} is not an installed one, so the model's size is not known"
                warnings.append(f"{unknown}; give --dim")
        except AflError as error:
            warnings.append(f"the model of the task {task} cannot be made here ({error}); give --dim")
    up, down = algorithm.uplink_compressor, algorithm.downlink_compressor
    found = _answer(options, (up.name, up.options), (down.name, down.options), warnings)
    if config.privacy.records is not None:
        found["records"] = _of_records(options, config)
    elif options.records is not None:
        raise ConfigError("--records needs a configuration with privacy.records")
    return found


def _of_records(options: argparse.Namespace, config: Config) -> dict[str, Any] | None:
    """What the planned rounds cost a record, and what the noise does to steps; ``None`` without n."""
    if options.records is None:
        return None
    privacy, size = config.privacy.record_privacy, config.task.batch_size
    assert privacy is not None
    if size > options.records:
        raise ConfigError(f"--records {options.records}: fewer than task.batch_size ({size})")
    rounds, evaluations = config.algorithm.rounds, config.planned_evaluations
    account = Account(0, privacy, records=options.records, batch_size=size, rounds=rounds)
    noise, loss_noise = account.privacy.noises
    loss = loss_noise * privacy.loss_clip / size
    sigma_q = None if options.sigma_q is None else math.hypot(options.sigma_q, loss)
    return {
        "records": options.records,
        "epsilon": account.planned_epsilon,
        "delta": privacy.delta,
        "evaluations": evaluations,
        "tests_epsilon": None if privacy.metric_noise is None else epsilon_of_tests(privacy, evaluations),
        "noise": noise,
        "loss_noise": loss_noise,
        "clip": privacy.clip,
        "noise_norm": None if options.dim is None else noise * privacy.clip * math.sqrt(options.dim) / size,
        "loss_deviation": loss,
        "eta_q": None if sigma_q is None else paper.dual_step(rounds, config.workers, sigma_q),
    }


def _answer(
    known: argparse.Namespace, uplink: _Choice, downlink: _Choice, warnings: list[str]
) -> dict[str, Any]:
    """Everything that the theory says of what is known, as ``--json`` prints it."""
    workers, rounds, dim = known.workers, known.rounds, known.dim
    least = (("m", workers, paper.FEWEST_WORKERS), ("T", rounds, paper.FEWEST_ROUNDS))
    if few := [f"{name} = {value} (at least {fewest})" for name, value, fewest in least if value < fewest]:
        uncovered = f"the theorems do not cover {' and '.join(few)}: the values below prove nothing"
        warnings = [uncovered, *warnings]
    if any(BITS in options for _, options in (uplink, downlink)):
        warnings = [*warnings, _ROUNDING]
    smoothness, sigma_q = known.smoothness, known.sigma_q
    ratios = []
    for kind, (example, _) in _RATIOS.items():
        ratio = paper.theory_ratio(kind, workers)
        k = None if dim is None else max(1, round(ratio * dim))
        ratios.append({"example": example.split(" ")[0].rstrip(","), "class": kind, "ratio": ratio, "k": k})
    return {
        "workers": workers,
        "rounds": rounds,
        "dim": dim,
        "covered": paper.is_covered(rounds, workers),
        "warnings": warnings,
        "step_sizes": {
            "block": paper.block_length(rounds),
            "eta_w": None if smoothness is None else paper.primal_step(rounds, smoothness),
            "eta_q": None if sigma_q is None else paper.dual_step(rounds, workers, sigma_q),
        },
        "constants": {"smoothness": smoothness, "sigma_q": sigma_q},
        "ratios": ratios,
        "compression": _compression(uplink, downlink, dim, workers),
    }


def _warnings(config: Config) -> list[str]:
    """Where the configuration is not the run that the theorems speak of."""
    algorithm = config.algorithm
    if not algorithm_named(algorithm.name).has_theorems:
        return [f"the configuration runs {algorithm.name}; what follows is about afl-br and afl-com"]
    if section := algorithm.dual_section:
        rule = rule_named(section.pop("name"))
        about = f"the dual weights follow {compressor_words(rule.name, section)}: {rule.proven}"
        if not rule.has_theorems:
            return [f"{about}; what follows is about kl-restarts, the paper's rule"]
        return [about, *_other_steps(config)]
    return _other_steps(config)


def _other_steps(config: Config) -> list[str]:
    algorithm = config.algorithm
    steps = {"eta_w": algorithm.eta_w, "eta_q": algorithm.eta_q}
    own = [f"{step} = {value}" for step, value in steps.items() if value != THEORY]
    if algorithm.block_length != paper.block_length(algorithm.rounds):
        own.append(f"block = {algorithm.block_length}")
    text = f"the configuration sets {', '.join(own)}; the theorems hold for the values below alone"
    warnings = [text] if own else []
    if other := list(algorithm.stepping):
        about = "the theorems are about constant steps along the sum of the gradients as they are"
        warnings.append(f"the configuration has {' and '.join(other)}: {about}; see docs/steps.md")
    return warnings


def model_size(config: Config) -> int | None:
    """d of the configuration's task; ``None`` for a task that is not installed, whose code is not loaded."""
    tensors = model_tensors(config)
    return None if tensors is None else sum(tensors)


def model_tensors(config: Config) -> tuple[int, ...] | None:
    """How many parameters each tensor of the task's model has; ``None`` as of :func:`model_size`."""
    from afl.core.randomness import SharedRandomness  # noqa: PLC0415
    from afl.tasks.initialization import build_vector  # noqa: PLC0415  # with torch, which takes seconds
    from afl.tasks.registry import known_tasks, load_task  # noqa: PLC0415

    task = config.task
    if task.name not in known_tasks():
        return None
    return build_vector(load_task(task.name, task.options), SharedRandomness.from_int(0)).tensors


def compressor_words(name: str, options: Mapping[str, object]) -> str:
    """``rand-k (ratio 0.1)``."""
    return name + (f" ({', '.join(f'{key} {value}' for key, value in options.items())})" if options else "")


def _compression(uplink: _Choice, downlink: _Choice, dim: int | None, workers: int) -> dict[str, Any] | None:
    """The run's compressors in words, their delta, and the ratio that keeps the rate; None without d.

    Theorem 3, with the sharper ratio, takes an additive and idempotent uplink and nothing lost on the way
    down; in all other cases Theorem 2 holds with the smaller of the two deltas.
    """
    if uplink[0] == downlink[0] == IDENTITY and not any(BITS in options for _, options in (uplink, downlink)):
        return {"description": "none: whole vectors", "delta": 1.0, "ratio_that_keeps_the_rate": 1.0}
    if dim is None:
        return None
    from afl.core.compressors import Compressor, compressor_class, create  # noqa: PLC0415  # with torch

    same = uplink == downlink
    is_exact_down = same or downlink[0] == IDENTITY

    def made(name: str, options: Mapping[str, Any]) -> Compressor:
        compressor_class(name)  # an unknown name is refused by the registry
        check_compressor(name, options)
        resolved = resolved_options(name, options, workers=workers, is_exact_down=is_exact_down)
        return create(name, dim, resolved)

    up, down = made(*uplink), made(*downlink)
    is_sharper = is_exact_down and up.additive_idempotent
    loses_down = not (down.lossless or (same and up.additive_idempotent))
    ways = compressor_words(*uplink), compressor_words(*downlink)
    kind: paper.CompressorClass = "additive-idempotent" if is_sharper else "contractive"
    return {
        "description": f"{ways[0]} both ways" if same else f"{ways[0]} up, {ways[1]} down",
        "delta": min(up.delta, down.delta) if loses_down else up.delta,
        "ratio_that_keeps_the_rate": paper.theory_ratio(kind, workers),
    }


def _shown(answer: Mapping[str, Any]) -> Iterator[RenderableType]:
    counts = (("worker", answer["workers"]), ("round", answer["rounds"]), ("parameter", answer["dim"]))
    size = ", ".join(f"{number(n)} {what}{'s' * (n != 1)}" for what, n in counts if n is not None)
    yield Text(size, style="bold")
    for warning in answer["warnings"]:
        yield Text(f"Warning: {warning}", style="yellow")
    rows = _table("setting", "value>", "formula", "what it is")
    for name, formula, meaning, needs in _STEPS:
        value = answer["step_sizes"][name]
        shown, missing = ("-", f"; needs {needs}") if value is None else (number(value), "")
        rows.add_row(name, shown, formula, meaning + missing)
    yield Text("\nStep sizes and block length, the same in all theorems", style="bold")
    yield rows
    has_dim = answer["dim"] is not None
    rows = _table("compressor", "keep>", *(["k>"] if has_dim else []), "rule for k/d")
    for row in answer["ratios"]:
        words, rule = _RATIOS[row["class"]]
        rows.add_row(words, f"{row['ratio']:.3f}", *([f"{row['k']:,}"] if has_dim else []), rule)
    yield Text("\nWhat a compressor may drop without slowing AFL-BR's rate", style="bold")
    yield rows
    yield Text("The paper gives the order in m; the factor before it is taken as 1 here.", style="dim")
    own = answer["compression"]
    if own is not None and own["delta"] < 1:
        line = f"This run: {own['description']}, delta = {number(own['delta'])}."
        if own["delta"] < (least := own["ratio_that_keeps_the_rate"]):
            line += f" That is below {least:.3f}: cheaper rounds and, by the bound, more of them."
        yield Text(line)

    if (private := answer.get("records", ...)) is None:
        yield Text("privacy.records: give --records, the training records of the smallest site")
    elif private is not ...:
        yield Text("\nWhat privacy.records costs", style="bold")
        yield Text(
            f"epsilon {number(private['epsilon'])} at delta {private['delta']:g}, of a site with "
            f"{number(private['records'])} records: noise {number(private['noise'])}, of losses "
            f"{number(private['loss_noise'])}."
        )
        if private["tests_epsilon"] is not None:
            yield Text(
                f"Of a test record {number(private['tests_epsilon'])}, after {private['evaluations']} "
                "evaluations."
            )
        if private["noise_norm"] is not None:
            among = number(private["noise_norm"] / math.sqrt(answer["workers"]))
            yield Text(
                f"A gradient of a norm of at most {private['clip']:g} gets noise of the norm "
                f"{number(private['noise_norm'])}, the mean over all workers {among}: eta_w times as much "
                "moves the model at random in each round."
            )
        about = f"A loss gets noise of the standard deviation {number(private['loss_deviation'])}"
        own = "" if private["eta_q"] is None else f": with it in sigma_q, eta_q is {number(private['eta_q'])}"
        yield Text(f"{about}{own}.")


def number(value: float) -> str:
    """A number as a person reads it: a count in full up to 10^7, else three or four significant digits."""
    if isinstance(value, int) and value < 10**7:
        return f"{value:,}"
    return f"{value:.4g}" if 1e-3 <= value < 1e5 or not value else f"{value:.3g}"


def _table(*columns: str) -> Table:
    made = table(*columns, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    made.columns[0].style = "bold"
    made.columns[0].no_wrap = made.columns[-1].no_wrap = True
    return made


def whole(text: str) -> int:
    """A count, as an option has it."""
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {LARGEST:g}")
    return int(text)


def positive(text: str, most: float = LARGEST, wanted: str = f"a number above 0 to {LARGEST:g}") -> float:
    """A number above 0, as an option has it."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def share(text: str) -> float | str:
    """A share, or ``theory``."""
    return THEORY if text == THEORY else positive(text, 1, "a number above 0 and at most 1, nor theory")


_MEASURED: Final[Mapping[str, Callable[[str], float]]] = {
    "smoothness": positive,
    "sigma_q": positive,
    "dim": whole,
}
"""What a file of constants has, and what each may be; 0 is of what could not be measured."""
