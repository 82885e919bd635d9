"""How many synchronizations each dual rule needs as workers become many, on a problem that takes seconds.

python -m afl_benchmarks.growth --out docs/growth

Worker i's loss is half the squared distance to its centre, in 20 dimensions. A few workers are unlike the
others: each has its centre 4 away, in a direction of its own. The others share theirs, where the model
begins. The rule is the one that the server runs; the gradients, which are linear, are computed for all
workers together. A run has reached its target when the largest loss, without noise and as a mean of ten
rounds, has lost nine tenths of what it can lose. Each method's dual step is searched for each number of
workers, on a grid of seven, with seeds that no counted run has. Results found in DIR are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from afl.core.dual import DualRule, DualWeights, ProjectedAscent
from afl.theory import block_length

DIM: Final = 20
GAP: Final = 4.0
"""From the crowd's centre to that of a worker unlike it."""

ETA_W: Final = 0.1
GRADIENT_NOISE: Final = 1.0
"""Of a worker's gradient, the norm's mean square."""

WINDOW: Final = 10
LOCAL_STEPS: Final = 3
SEARCH_SEEDS: Final = (101, 102, 103, 104, 105)
RESULTS, TABLE, FIGURE = "growth.jsonl", "growth.md", "growth"


@dataclass(frozen=True)
class Method:
    """A dual rule by its step size and T, and the grid of those; DRFA's takes local steps.

    Attributes:
        steps: model updates a synchronization.
    """

    label: str
    rule: Callable[[int, float, int], DualRule]
    grid: Sequence[float]
    steps: int = 1


_EXPONENTIAL: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_PROJECTED: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)

METHODS: Final[Mapping[str, Method]] = {
    "afl-br": Method("AFL-BR", lambda m, eta_q, t: DualWeights(m, eta_q, block_length(t)), _EXPONENTIAL),
    "kl": Method("KL without restarts", lambda m, eta_q, t: DualWeights(m, eta_q, t + 1), _EXPONENTIAL),
    "sgda": Method("AFL (SGDA)", lambda m, eta_q, _: ProjectedAscent(m, eta_q), _PROJECTED),
    "drfa": Method("DRFA", lambda m, eta_q, _: ProjectedAscent(m, eta_q), _PROJECTED, LOCAL_STEPS),
}


@dataclass(frozen=True)
class Problem:
    """Workers 0 to ``outliers`` - 1 are unlike the others.

    Attributes:
        noise: standard deviation of a worker's loss about its true value.
    """

    workers: int
    outliers: int
    noise: float

    @property
    def lowest(self) -> float:
        """The largest loss of the best model, half the squared radius of the smallest ball with all centres:
        of one outlier the midpoint's, of more that of the outliers' mean, which is nearer to the crowd."""
        return GAP**2 / 8 if self.outliers == 1 else GAP**2 * (1 - 1 / self.outliers) / 2

    @property
    def target(self) -> float:
        """With a tenth left of what can be lost from the crowd's centre."""
        return self.lowest + 0.1 * (GAP**2 / 2 - self.lowest)


@dataclass(frozen=True)
class Result:
    """A method on a problem.

    Attributes:
        searched: by step size, the median over the search's seeds; None where it never reached the target.
        eta_q: the step size with the smallest; the middle of the grid if none reached it.
        rounds: with that one, by seed, None as above.
    """

    workers: int
    outliers: int
    noise: float
    method: str
    most: int
    searched: Mapping[str, float | None]
    eta_q: float
    rounds: Sequence[int | None]


def synchronizations(problem: Problem, method: Method, eta_q: float, *, seed: int, most: int) -> int | None:
    """After how many the target is reached; None if not after ``most``."""
    rng = np.random.default_rng([seed, problem.workers, problem.outliers])
    dual = method.rule(problem.workers, eta_q, most)
    dual.factor = method.steps
    out = problem.outliers
    model, distances = np.zeros(DIM), np.zeros(problem.workers)
    largest: list[float] = []

    def true_losses(at: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        distances[out:] = at @ at
        distances[:out] = at @ at - 2 * GAP * at[:out] + GAP**2
        np.multiply(distances, 0.5, out=distances)

    for round_ in range(1, most + 1):
        true_losses(model)
        largest.append(float(distances.max()))
        if round_ >= WINDOW and math.fsum(largest[-WINDOW:]) <= WINDOW * problem.target:
            return round_
        weights, mean = dual.weights, np.zeros(DIM)
        mean[:out] = GAP * weights[:out]
        # Of the weighted mean of independent noises.
        spread = GRADIENT_NOISE * math.sqrt(float(weights @ weights) / DIM)
        measured_at = int(rng.integers(method.steps)) + 1
        for step in range(1, method.steps + 1):
            # Workers' local steps differ by their centres alone, so their mean is a step of the mean.
            model = model - ETA_W * (model - mean + spread * rng.normal(size=DIM))
            if method.steps > 1 and step == measured_at:
                true_losses(model)
        dual.update(round_, distances + problem.noise * rng.normal(size=problem.workers))
    return None


def measured(problem: Problem, name: str, seeds: Sequence[int], most: int) -> Result:
    """Search the method's step size, then count."""
    method = METHODS[name]
    assert not set(seeds) & set(SEARCH_SEEDS)

    def count(eta_q: float, seed: int) -> int | None:
        return synchronizations(problem, method, eta_q, seed=seed, most=most)

    searched = {eta_q: _searched(partial(count, eta_q)) for eta_q in method.grid}
    reached = {eta_q: rounds for eta_q, rounds in searched.items() if rounds is not None}
    best = min(reached, key=reached.__getitem__) if reached else method.grid[len(method.grid) // 2]
    by_step = {f"{eta_q:g}": rounds for eta_q, rounds in searched.items()}
    rounds = [count(best, seed) for seed in seeds]
    return Result(problem.workers, problem.outliers, problem.noise, name, most, by_step, best, rounds)


def _searched(count: Callable[[int], int | None]) -> float | None:
    """The median over the search's seeds; once most have not reached the target, no more are tried."""
    found: list[int | None] = []
    for seed in SEARCH_SEEDS:
        found.append(count(seed))
        if 2 * found.count(None) > len(SEARCH_SEEDS):
            return None
    return median(found)


def median(rounds: Sequence[int | None]) -> float | None:
    """Of all, those that never reached it as the largest; None if it is one of those."""
    found = statistics.median(math.inf if each is None else each for each in rounds)
    return None if math.isinf(found) else found


def read(path: Path) -> list[Result]:
    """What has been computed so far."""
    if not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def table(results: Sequence[Result]) -> str:
    """In markdown: the medians, and in brackets how many of the seven step sizes reach the target."""
    sizes = sorted({result.workers for result in results})
    lines = [
        f"| outliers | noise of a loss | method | {' | '.join(f'm = {size}' for size in sizes)} |",
        "|---" * (3 + len(sizes)) + "|",
    ]
    for outliers, noise in _panels(results):
        for name, method in METHODS.items():
            own = {
                result.workers: result
                for result in results
                if (result.outliers, result.noise, result.method) == (outliers, noise, name)
            }
            cells = [_cell(own[size]) if size in own else "" for size in sizes]
            lines.append(f"| {outliers} | {noise:g} | {method.label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(result: Result) -> str:
    found = median(result.rounds)
    works = sum(rounds is not None for rounds in result.searched.values())
    return f"{'never' if found is None else f'{found:g}'} ({works})"


def _panels(results: Sequence[Result]) -> Iterator[tuple[int, float]]:
    yield from sorted({(result.outliers, result.noise) for result in results})


def draw(results: Sequence[Result], path: Path) -> None:
    """Medians against the number of workers, a panel a problem; a cross at the top for never."""
    from afl_lab.plots.figures import pyplot, save  # noqa: PLC0415  # matplotlib is an extra

    panels = list(_panels(results))
    figure, axes = pyplot().subplots(
        1, len(panels), figsize=(3.6 * len(panels), 3.6), sharey=True, squeeze=False
    )
    most = max(result.most for result in results)
    for axis, panel in zip(axes[0], panels, strict=True):
        for number, (name, method) in enumerate(METHODS.items()):
            own = sorted(
                (result.workers, median(result.rounds))
                for result in results
                if (result.outliers, result.noise) == panel and result.method == name
            )
            colour, reached = f"C{number}", [(size, found) for size, found in own if found is not None]
            # Two methods that are alike until the first restart would hide each other.
            style = "o--" if name == "kl" else "o-"
            axis.plot(*zip(*reached, strict=True), style, color=colour, label=method.label, markersize=4)
            never = [size for size, found in own if found is None]
            axis.plot(never, [most] * len(never), "x", color=colour)
        axis.set(xscale="log", yscale="log", xlabel="workers m")
        axis.set_title(f"outliers: {panel[0]}, noise of a loss: {panel[1]:g}", fontsize="medium")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"synchronizations to the target (x: not in {most:,})")
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute what is missing, then draw."""
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / RESULTS
    results = read(path)
    held = {(result.workers, result.outliers, result.noise, result.method) for result in results}
    for workers in options.workers:
        for outliers in options.outliers:
            for noise in options.noise:
                for name in METHODS:
                    if (workers, outliers, noise, name) in held:
                        continue
                    seeds = range(1, options.seeds + 1)
                    result = measured(Problem(workers, outliers, noise), name, seeds, options.most)
                    results.append(result)
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(result)) + "\n")
    (options.out / TABLE).write_text(table(results), encoding="utf-8")
    draw(results, options.out / FIGURE)
    print(table(results), end="")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afl_benchmarks.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    more: dict[str, Any] = {"nargs": "+"}
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--workers", type=int, default=[10, 30, 100, 300, 1000], metavar="M", **more)
    parser.add_argument("--outliers", type=int, default=[1, 5], **more)
    parser.add_argument("--noise", type=float, default=[1.0, 3.0], help="of a loss", **more)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1 to this one")
    parser.add_argument("--most", type=int, default=2000, metavar="T", help="synchronizations of a run")
    return parser


if __name__ == "__main__":
    main()
