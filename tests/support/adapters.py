"""A transformer with LoRA adapters over a base that each site has in a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import afl


class Lora(nn.Module):
    """``W x + B A x``, where W is frozen."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return low


class Base(nn.Module):
    """A stack of residual blocks over embeddings, and a head."""

    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](self.norm(x))))
        scores: Tensor = self.head(self.norm(x).mean(dim=1))
        return scores


def write_base(path: Path, *, width: int, depth: int, words: int = 64) -> int:
    """Random weights; how many there are."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = Base(width, depth, words).state_dict()
    save_file(state, path)
    return sum(tensor.numel() for tensor in state.values())


class Adapted(afl.Classification):
    """Two classes of sentences of eight words."""

    frozen = "local"
    local_options: ClassVar[frozenset[str]] = frozenset({"base"})

    def __init__(
        self, base: str = "base.safetensors", width: int = 16, depth: int = 2, rank: int = 2
    ) -> None:
        self.base, self.width, self.depth, self.rank = base, width, depth, rank

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = Base(self.width, self.depth, words=64)
        model.load_state_dict(load_file(self.base), assign=True)
        model.requires_grad_(requires_grad=False)
        for block in model.blocks:
            block["up"] = Lora(block["up"], self.rank)
        return model

    def data(self, worker: int, context: afl.TaskContext) -> afl.WorkerData:
        generator = torch.Generator().manual_seed(worker)
        tokens = torch.randint(64, (40, 8), generator=generator)
        labels = (tokens[:, 0] > 31).long()
        return afl.WorkerData(train=(tokens[:32], labels[:32]), test=(tokens[32:], labels[32:]))


class Sending(Adapted):
    """The same, as every run had it before: the server sends the base."""

    frozen = "sent"
