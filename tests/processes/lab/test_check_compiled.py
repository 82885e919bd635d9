"""A model that torch.compile returned: it starts a compiler."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from afl.config import config_from_mapping
from afl.tasks.digits import Digits
from afl_lab.check import check_config


class Compiled(Digits):
    def model(self) -> nn.Module:
        return torch.compile(super().model(), backend="eager")  # type: ignore[return-value]


@pytest.mark.long
def test_a_check_tells_of_names_that_compiling_gives() -> None:
    report = check_config(
        config_from_mapping(
            {
                "workers": 2,
                "task": {"name": f"{__file__}:Compiled", "batch_size": 4},
                "algorithm": {"name": "afl-br", "rounds": 4, "eta_w": 0.1, "eta_q": 0.1},
                "run": {"seed": 1},
            }
        )
    )
    assert not report.errors, report.findings
    (told,) = (finding for finding in report.findings if "_orig_mod." in finding.what)
    assert "module.compile()" in told.advice
