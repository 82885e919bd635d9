"""What a run with privacy.records needs, and what does not go with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from afl.config import Config, config_from_mapping
from afl.config.dump import config_digest
from afl.core.record_privacy import RecordPrivacy
from afl.errors import ConfigError, PeerError
from afl.wire.settings import RunSettings


def config(**changes: Any) -> dict[str, Any]:
    algorithm = {"name": "afl-com", "rounds": 10, "eta_w": 0.1, "eta_q": 0.1}
    return {
        "workers": 3,
        "task": {"name": "synthetic"},
        "worker": {"journal": "machine"},
        "privacy": {"records": {"noise": 1.1, "delta": 1e-5}},
        "run": {"seed": 1},
        **changes,
        "algorithm": {**algorithm, **changes.get("algorithm", {})},
    }


@pytest.mark.parametrize(
    ("changes", "key", "accepted"),
    [
        ({"privacy": {"records": {"delta": 1e-5}}}, "privacy.records.noise", "or epsilon in its place"),
        (
            {"privacy": {"records": {"delta": 1e-5, "epsilon": 8.0, "noise": 1.0}}},
            "privacy.records.noise",
            "the noise follows from epsilon",
        ),
        (
            {"privacy": {"records": {"delta": 1e-5, "epsilon": 8.0, "loss_noise": 1.0}}},
            "privacy.records.loss_noise",
            "the noise follows from epsilon",
        ),
        ({"privacy": {"records": {"noise": 1.0}}}, "privacy.records.delta", "a number"),
        ({"privacy": {"records": {"noise": 1.0, "delta": 1.0}}}, "privacy.records.delta", "at most 0.1"),
        ({"privacy": {"records": {"noise": 0.0, "delta": 0.1}}}, "privacy.records.noise", "above 0"),
        (
            {"privacy": {"records": {"noise": 1e-300, "delta": 0.1}}},
            "privacy.records.noise",
            "at least 1e-12",
        ),
        (
            {"privacy": {"records": {"noise": 1.0, "clip": 1e-40, "delta": 0.1}}},
            "privacy.records.clip",
            "at least 1e-12",
        ),
        ({"worker": {}}, "worker.journal", "machine: with privacy.records"),
        (
            {"worker": {"journal": "machine", "batch_oracles": True}},
            "worker.batch_oracles",
            "record by record",
        ),
        ({"task": {"name": "synthetic", "held_out": 0.2}}, "task.held_out", "0; evaluations tell"),
        ({"algorithm": {"clip_norm": 1.0}}, "algorithm.clip_norm", "no clip_norm; privacy.records.clip"),
        (
            {"algorithm": {"name": "drfa", "local_steps": 2}},
            "privacy.records",
            "drfa takes local steps, which are not accounted for",
        ),
        (
            {"algorithm": {"name": "fedavg", "local_steps": 2, "eta_q": None}},
            "privacy.records",
            "fedavg takes local steps, which are not accounted for",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], key: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(config(**changes))
    assert f"{key}\n" in str(caught.value)
    assert accepted in str(caught.value)


def test_only_metrics_with_noise_are_told_of() -> None:
    def of(**changes: Any) -> Config:
        records = {**config()["privacy"]["records"], **changes}
        return config_from_mapping(config(privacy={"records": records}))

    noised = of(metrics="noised", metric_noise=4.0)
    message = RunSettings.of_config(noised).to_message()
    told = RunSettings.of_message(message).parameters.records
    assert told == RecordPrivacy(clip=1.0, loss_clip=5.0, delta=1e-5, noise=1.1, metric_noise=4.0)
    assert "test data has noise 4" in noised.privacy.record_words
    full = of(metrics="full")
    assert "metric" not in RunSettings.of_config(full).to_message().algorithm_options
    assert config_digest(full) == config_digest(of()) != config_digest(noised)
    assert "no noise" in full.privacy.record_words


def test_workers_are_told_it_and_older_ones_cannot_overlook_it() -> None:
    settings = RunSettings.of_config(config_from_mapping(config()))
    settings.check()
    message = settings.to_message()
    told = RunSettings.of_message(message).parameters.records
    assert told == RecordPrivacy(clip=1.0, loss_clip=5.0, delta=1e-5, noise=1.1)
    # An option that a worker does not know is refused by it.
    assert '"records"' in message.algorithm_options
    plain = config_from_mapping(config(privacy={}))
    assert '"records"' not in RunSettings.of_config(plain).to_message().algorithm_options
    assert config_digest(plain) != config_digest(config_from_mapping(config()))


@pytest.mark.parametrize(
    "changes",
    [
        {"journal": "process"},
        {"records": RecordPrivacy(1.0, 5.0, 1e-5)},
        {"records": RecordPrivacy(1e-40, 5.0, 1e-5, noise=1.0)},
        {"records": RecordPrivacy(1.0, 5.0, 1e-5, noise=1.0, loss_noise=1e-300)},
        {"held_out": 0.5},
    ],
)
def test_a_server_cannot_tell_a_worker_less(changes: dict[str, Any]) -> None:
    settings = RunSettings.of_config(config_from_mapping(config()))
    own = {name: value for name, value in changes.items() if name == "journal"}
    others = {name: value for name, value in changes.items() if name != "journal"}
    settings = replace(settings, parameters=replace(settings.parameters, **others), **own)
    with pytest.raises(PeerError, match=r"privacy\.records"):
        settings.check()
