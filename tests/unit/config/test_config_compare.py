"""Whether a run can be resumed under another configuration."""

from __future__ import annotations

import pytest

from afl.config import config_from_mapping
from afl.config.compare import differences

STORED = {
    "workers": 3,
    "task": {"name": "synthetic"},
    "algorithm": {"name": "afl-br", "rounds": 10, "eta_w": 0.1, "eta_q": 0.1},
    "run": {"seed": 7, "directory": "here"},
}


def changed(**sections):
    return config_from_mapping({**STORED, **sections})


def test_the_same_configuration_has_no_differences():
    stored = config_from_mapping(STORED)
    assert differences(stored, stored) == []


@pytest.mark.parametrize(
    "sections",
    [
        {"server": {"listen": "127.0.0.1:1", "grace": "1s", "state": "machine"}},
        {"run": {"directory": "elsewhere", "description": "Other words.", "trackers": ["tensorboard"]}},
        {"faults": {"divergence": {"max_loss": 5.0, "evaluations": 2}, "lost_residual": "refuse"}},
        {"faults": {"stragglers": {"policy": "skip", "deadline": "30s", "quorum": 0.8}}},
    ],
)
def test_what_the_server_alone_does_may_change(sections):
    assert differences(config_from_mapping(STORED), changed(**sections)) == []


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"workers": 4}, "workers: the run's is 3, given is 4"),
        ({"run": {"seed": 8}}, "run.seed: the run's is "),
        (
            {"algorithm": {**STORED["algorithm"], "eta_w": 0.2}},
            "algorithm.eta_w: the run's is 0.1, given is 0.2",
        ),
        ({"worker": {"threads": 2}}, "worker.threads: the run's is 1, given is 2"),
        ({"faults": {"non_finite": "skip"}}, 'faults.non_finite: the run\'s is "abort", given is "skip"'),
        (
            {"task": {"name": "synthetic", "options": {"dim": 5}}},
            "task.options.dim: the run's is null, given is 5",
        ),
    ],
)
def test_what_is_computed_may_not(sections, line):
    (found,) = differences(config_from_mapping(STORED), changed(**sections))
    assert found.startswith(line)
