"""Small sites: dual weights that follow training losses, and such that follow held-out ones.

    python -m afl_benchmarks.small_sites [--seeds 5] [--rounds 2000] [--eta-q 0.2]

The hospitals of docs/examples/hospitals, where the one that is unlike the others has 100 to 10,000 records.
All runs of a kind of model are taken together in batched products: AFL-BR as docs/algorithm.md has it, with
minibatches drawn with replacement. It prints a table: means over the seeds of the area under the ROC curve on
test records by site, and of site 0's dual weight in the second half. A minute of one core.
"""

from __future__ import annotations

import argparse
import itertools
import math
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "hospitals"

MODES = {
    "nothing held out": (0.0, False),
    "held out, training losses": (0.2, False),
    "held out, held-out losses": (0.2, True),
}
"""Of each, the share that is held out, and whether the dual weights follow it."""

RECORDS = (100, 300, 1_000, 10_000)
"""At site 0; the others have those of the example."""

MODELS = {"network": 32, "logistic": 0}
"""Hidden units."""

SITES, BATCH, STEP, EVERY = 3, 32, 0.2, 50
"""And eta_w, and the rounds between two evaluations."""


@dataclass(frozen=True)
class Data:
    """Of all runs, R: records of each site, float32 ``[R, 3, n, 20]`` and int64 ``[R, 3, n]``, filled up with
    zeros; of ``counts`` records (int64 ``[R, 3]``) the last ``held`` are held out."""

    x: Tensor
    y: Tensor
    counts: Tensor
    held: Tensor
    test_x: Tensor
    test_y: Tensor

    def minibatch(self, generator: torch.Generator, *, of_held_out: Tensor) -> tuple[Tensor, Tensor]:
        """One of each site, ``[R, 3, 32, 20]`` and ``[R, 3, 32]``, of held-out records where bool ``[R]``."""
        kept = self.counts - self.held
        first = torch.where(of_held_out[:, None], kept, 0)
        size = torch.where(of_held_out[:, None], self.held, kept)
        drawn = torch.rand((*self.counts.shape, BATCH), generator=generator)
        places = first[..., None] + (drawn * size[..., None]).long()
        return self.x.gather(2, places[..., None].expand(-1, -1, -1, 20)), self.y.gather(2, places)


def data_of(seeds: Sequence[int]) -> Data:
    """Of each seed, number of records and mode, in this order."""
    made = runpy.run_path(str(EXAMPLE / "make_data.py"))
    later, most = made["LATER"], max(made["SIZES"])
    runs, counts, held = [], [], []
    for seed in seeds:
        for records in RECORDS:
            sites = [made["hospital"](site, seed, None if site else records) for site in range(SITES)]
            own = torch.tensor([len(y) - later for _, y in sites])
            for share, _ in MODES.values():
                runs.append(sites)
                counts.append(own)
                held.append((share * own).round().long())
    x, y = torch.zeros(len(runs), SITES, most, 20), torch.zeros(len(runs), SITES, most, dtype=torch.int64)
    test_x, test_y = torch.zeros(len(runs), SITES, later, 20), torch.zeros(len(runs), SITES, later).long()
    for run, sites in enumerate(runs):
        for site, (values, labels) in enumerate(sites):
            count = len(labels) - later
            x[run, site, :count], test_x[run, site] = map(torch.from_numpy, (values[:count], values[count:]))
            y[run, site, :count], test_y[run, site] = map(torch.from_numpy, (labels[:count], labels[count:]))
    return Data(x, y, torch.stack(counts), torch.stack(held), test_x, test_y)


def initial(runs: int, hidden: int, generator: torch.Generator) -> list[Tensor]:
    """Weights and biases as PyTorch's linear layers begin with."""
    sizes = [20, hidden, 2] if hidden else [20, 2]
    layers = []
    for before, after in itertools.pairwise(sizes):
        for shape in ((runs, before, after), (runs, 1, after)):
            uniform = 2 * torch.rand(shape, generator=generator) - 1
            layers.append((uniform / math.sqrt(before)).requires_grad_())
    return layers


def logits_of(layers: Sequence[Tensor], x: Tensor) -> Tensor:
    """``[R, 3, n, 20]`` to ``[R, 3, n, 2]``."""
    found = x.flatten(1, 2)
    for place in range(0, len(layers), 2):
        found = torch.baddbmm(layers[place + 1], found.relu() if place else found, layers[place])
    return found.reshape(*x.shape[:3], 2)


def losses_of(layers: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy by site, ``[R, 3]``."""
    each = nn.functional.cross_entropy(logits_of(layers, x).flatten(0, 2), y.flatten(), reduction="none")
    return each.reshape(y.shape).mean(dim=2)


def aucs_of(layers: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Areas under the ROC curve by site, float64 ``[R, 3]``."""
    logits = logits_of(layers, x)
    ranks = (logits[..., 1] - logits[..., 0]).argsort(dim=2).argsort(dim=2).double() + 1
    ones = y.sum(dim=2).double()
    return ((ranks * y).sum(dim=2) - ones * (ones + 1) / 2) / (ones * (y.shape[2] - ones))


def held_out_losses(layers: Sequence[Tensor], data: Data) -> Tensor:
    """Means over all held-out records by site, ``[R, 3]``; NaN where there are none."""
    places = torch.arange(data.y.shape[2])
    is_held = (places >= (data.counts - data.held)[..., None]) & (places < data.counts[..., None])
    each = nn.functional.cross_entropy(
        logits_of(layers, data.x).flatten(0, 2), data.y.flatten(), reduction="none"
    )
    return (each.reshape(data.y.shape) * is_held).sum(dim=2) / data.held


def trained(data: Data, hidden: int, rounds: int, eta_q: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Test AUC at the end and at the least worst held-out loss (at the end where nothing is held out), which
    round that was, and site 0's mean dual weight in the second half."""
    runs, generator = len(data.x), torch.Generator().manual_seed(1)
    follows = torch.tensor([follows for _, follows in MODES.values()]).repeat(runs // len(MODES))
    nobody = torch.zeros(runs, dtype=torch.bool)
    layers = initial(runs, hidden, generator)
    q = torch.full((runs, SITES), 1 / SITES)
    block, weight = math.isqrt(rounds - 1) + 1, torch.zeros(runs)
    least, best_round = torch.full((runs,), math.inf), torch.full((runs,), rounds)
    best = torch.zeros(runs, SITES, dtype=torch.float64)
    for round_ in range(1, rounds + 1):
        losses = losses_of(layers, *data.minibatch(generator, of_held_out=nobody))
        gradients = torch.autograd.grad((q * losses).sum(), layers)
        with torch.no_grad():
            measured = losses_of(layers, *data.minibatch(generator, of_held_out=follows))
            measured = torch.where(follows[:, None], measured, losses)
            for layer, gradient in zip(layers, gradients, strict=True):
                layer.sub_(STEP * gradient)
            weight += q[:, 0] * (round_ > rounds // 2)
            q = (q.log() + eta_q * measured).softmax(dim=1)
            if round_ % block == 0:
                q = torch.full_like(q, 1 / SITES)
            if round_ % EVERY == 0:
                worst = held_out_losses(layers, data).amax(dim=1)
                is_best = worst < least
                least = torch.where(is_best, worst, least)
                best_round = torch.where(is_best, round_, best_round)
                best = torch.where(is_best[:, None], aucs_of(layers, data.test_x, data.test_y), best)
    last = aucs_of(layers, data.test_x, data.test_y)
    return last.detach(), best, best_round, weight / (rounds - rounds // 2)


def measured(seeds: int, rounds: int, eta_q: float) -> Iterator[str]:
    """The table's lines."""
    head = "AUC at the end, sites 0, 1, 2 | at the least worst held-out loss | its round"
    yield f"| model | records of site 0 | | its weight | {head} |"
    yield "|---|---|---|---|---|---|---|"
    data = data_of(range(1, seeds + 1))
    for model, hidden in MODELS.items():
        shape = (seeds, len(RECORDS), len(MODES))
        last, best, round_, weight = (
            found.reshape(*shape, *found.shape[1:]) for found in trained(data, hidden, rounds, eta_q)
        )
        for place, records in enumerate(RECORDS):
            for column, (mode, (held_out, _)) in enumerate(MODES.items()):
                at = (slice(None), place, column)
                known = f"{shown(best[at])} | {round_[at].double().mean():.0f}" if held_out else " | "
                shares = f"{weight[at].mean():.2f} | {shown(last[at])}"
                yield f"| {model} | {records:,} | {mode} | {shares} | {known} |"


def shown(aucs: Tensor) -> str:
    """By site, the mean over the seeds, ``[seeds, 3]``; of site 0 also the standard error."""
    first, *others = (f"{mean:.3f}" for mean in aucs.mean(dim=0).tolist())
    error = aucs[:, 0].std().item() / math.sqrt(len(aucs))
    return f"{first} ± {error:.3f}, {', '.join(others)}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--eta-q", type=float, default=0.2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for line in measured(options.seeds, options.rounds, options.eta_q):
        print(line, flush=True)


if __name__ == "__main__":
    main()
