"""SGDA, DRFA and FedAvg through real processes, against plain numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from afl.tasks.synthetic import Synthetic
from support import Federation, baselines

WORKERS, DIM = 4, 100

CASES = {
    "sgda": {"name": "sgda", "eta_q": 0.3},
    "drfa": {"name": "drfa", "eta_q": 0.1, "local_steps": 3},
    "drfa of b": {"name": "drfa", "eta_q": 0.1, "local_steps": 3, "sampled": 2},
    "drfa, tau 1": {"name": "drfa", "eta_q": 0.1},
    "fedavg": {"name": "fedavg", "local_steps": 3},
    "sgda, steps": {
        "name": "sgda",
        "eta_q": 0.3,
        "schedule": {"then": "steps", "at": [20], "factor": 0.5, "eta_q": True},
    },
    "drfa, cosine": {
        "name": "drfa",
        "eta_q": 0.1,
        "local_steps": 3,
        "schedule": {"warm_up": 10, "then": "cosine", "final": 0.1, "eta_q": True},
        "weight_decay": 0.05,
    },
    "fedavg by samples": {"name": "fedavg", "local_steps": 3, "weighting": "samples"},
}

UPDATES_A_SYNC = {name: int(case.get("local_steps", 1)) for name, case in CASES.items()}  # type: ignore[call-overload]


def config_of(case: str) -> dict[str, Any]:
    # 30 synchronizations; with three steps each, the last has one step only.
    rounds = 29 * UPDATES_A_SYNC[case] + 1
    return {
        "workers": WORKERS,
        "task": {"name": "synthetic", "batch_size": 8},
        "algorithm": {"rounds": rounds, "eta_w": 0.9, **CASES[case]},
        "evaluation": {"every": 20},
    }


def weights_of(path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    module = Synthetic().model()
    module.load_state_dict(load_file(path))
    weights: np.ndarray[Any, np.dtype[np.float32]] = torch.cat(
        [parameter.detach().reshape(-1) for parameter in module.parameters()]
    ).numpy()
    return weights


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        ("sgda", ["0-3"]),
        # Phases and participants over two sessions.
        ("drfa", ["0,2", "1,3"]),
        ("drfa of b", ["0,2", "1,3"]),
        ("drfa, cosine", ["0,2", "1,3"]),
        ("sgda, steps", ["0-3"]),
        ("fedavg by samples", ["0-3"]),
        *(
            pytest.param(case, groups, marks=pytest.mark.slow)
            for case, groups in (("fedavg", ["0-3"]), ("drfa, tau 1", ["0-3"]), ("drfa of b", [*"0123"]))
        ),
    ],
)
def test_a_baseline_is_what_its_paper_says(case: str, groups: list[str], tmp_path: Path) -> None:
    config = config_of(case)
    with Federation(config, tmp_path) as federation:
        for ids in groups:
            federation.start(ids)
        federation.finish()
    models, dual_weights = baselines.run(config)
    assert np.abs(models[-1] - models[0]).max() > 0.1
    np.testing.assert_allclose(
        weights_of(federation.directory / "model-final.safetensors"), models[-1], rtol=1e-6, atol=1e-7
    )
    first = baselines.random_round(7, 30)
    random = weights_of(federation.directory / "model-random.safetensors")
    np.testing.assert_allclose(random, models[first - 1], rtol=1e-6, atol=1e-7)

    tau = UPDATES_A_SYNC[case]
    lines = federation.records("round")
    assert [line["synchronization"] for line in lines] == list(range(1, 31))
    assert [line["round"] for line in lines] == [*range(tau, 29 * tau + 1, tau), 29 * tau + 1]
    if case.startswith(("sgda", "drfa")):
        found = [line["dual_weight_max"] for line in lines]
        np.testing.assert_allclose(found, [q.max() for q in dual_weights[:-1]], rtol=1e-5)
        assert max(found) > 1.05 / WORKERS
    evaluated = [line["round"] for line in federation.records("evaluation")]
    assert evaluated == sorted({-(-n // tau) * tau for n in range(20, 29 * tau + 1, 20)} | {29 * tau + 1})
