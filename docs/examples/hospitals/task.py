"""Three hospitals: the risk of an outcome from 20 measurements, judged by the area under the ROC curve."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import afl

LATER = 1_000
"""The last records of each file, which models are tested on."""


class Hospitals(afl.Classification):
    """Each hospital has its own file, as ``make_data.py`` makes it."""

    def __init__(self, hidden: int = 32) -> None:
        self.hidden = hidden

    def model(self) -> nn.Module:
        """One hidden layer."""
        return nn.Sequential(nn.Linear(20, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 2))

    def data(self, worker: int, context: afl.TaskContext) -> afl.WorkerData:  # noqa: ARG002
        """All records but the later ones to train with, those to test with."""
        path = Path(os.environ.get("AFL_DATA", "data")) / f"site-{worker}.npz"
        if not path.is_file():
            raise afl.DataError(f"{path} is missing: python make_data.py writes it")
        with np.load(path) as site:
            x, y = torch.from_numpy(site["x"]), torch.from_numpy(site["y"])
        return afl.WorkerData(train=(x[:-LATER], y[:-LATER]), test=(x[-LATER:], y[-LATER:]))

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Loss, accuracy and AUC, whose mean over batches is no AUC: the batch must hold all records."""
        with torch.no_grad():
            logits = model(batch[0])
        return {**super().metrics(model, batch), "auc": auc(logits[:, 1] - logits[:, 0], batch[1])}


def auc(scores: Tensor, labels: Tensor) -> Tensor:
    """The share of pairs of a record with the outcome and one without that scores order rightly; float64.

    Without any such pair it is 0.5.
    """
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    with_it = int(labels.sum())
    pairs = with_it * (len(labels) - with_it)
    if not pairs:
        return torch.tensor(0.5, dtype=torch.float64)
    return (ranks[labels == 1].sum() - with_it * (with_it + 1) / 2) / pairs
