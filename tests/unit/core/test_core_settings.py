"""What the Welcome tells workers of the run: there and back, and nothing malformed gets through."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afl.config import InvalidConfigError, config_from_mapping, load_config
from afl.core.algorithms.schedule import SHAPES, Schedule
from afl.core.algorithms.settings import OPTIMIZERS, AlgorithmSettings, CompressorChoice, OptimizerChoice
from afl.core.compressors import create
from afl.errors import ProtocolError
from afl.v1 import federation_pb2 as pb
from afl.wire.settings import RunSettings

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OPTIONS = st.dictionaries(st.text(max_size=6), JSON, max_size=3)
CHOICES = st.builds(CompressorChoice, st.text(max_size=10), OPTIONS)
COUNTS = st.integers(1, 2**32 - 1)
SECONDS = st.floats(1e-3, 1e6)
RUNS = st.builds(
    RunSettings,
    task=st.text(max_size=12),
    task_options=OPTIONS,
    batch_size=COUNTS,
    evaluation_batch_size=COUNTS,
    threads=COUNTS,
    batch_oracles=st.booleans(),
    parameters=st.builds(
        AlgorithmSettings,
        workers=COUNTS,
        rounds=st.integers(1, 2**63),
        block=st.integers(1, 2**63),
        eta_w=st.floats(allow_nan=False, allow_infinity=False),
        eta_q=st.floats(0, allow_infinity=False),
        uplink=CHOICES,
        downlink=CHOICES,
        name=st.text(max_size=12),
        local_steps=st.integers(1, 2**63),
        sampled=st.none() | st.integers(1, 2**63),
        largest_weight=st.none() | st.floats(0, 1, exclude_min=True),
        weigh_by_samples=st.booleans(),
        schedule=st.builds(
            Schedule,
            warm_up=COUNTS,
            then=st.sampled_from(SHAPES),
            final=st.floats(0, 1),
            at=st.lists(COUNTS, max_size=3).map(tuple),
            factor=st.floats(0.001, 1),
            eta_q=st.booleans(),
        ),
        optimizer=st.builds(
            OptimizerChoice,
            st.sampled_from(OPTIMIZERS),
            st.floats(0, 0.999),
            st.floats(0, 0.999),
            st.floats(0, 1, exclude_min=True),
        ),
        mean_of_last=st.integers(0, 2**31 - 1),
        weight_decay=st.floats(0, 1e6),
        clip_norm=st.none() | st.floats(0, 1e12, exclude_min=True),
    ),
    chunk_bytes=st.integers(1, 2**30 - 1).map(lambda quarter: 4 * quarter),
    heartbeat=SECONDS,
    peer_timeout=SECONDS,
)

RIGHT = RunSettings(
    task="digits",
    task_options={"alpha": 0.5},
    batch_size=32,
    evaluation_batch_size=64,
    threads=1,
    batch_oracles=False,
    parameters=AlgorithmSettings(
        10, 100, 10, 0.1, 0.01, CompressorChoice("top-k", {"ratio": 0.1}), CompressorChoice()
    ),
    chunk_bytes=1 << 20,
    heartbeat=10.0,
    peer_timeout=60.0,
)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, []),
        ({"chunk_bytes": 4, "heartbeat": 1.0, "peer_timeout": 5.0}, []),
        ({"batch_size": 16, "heartbeat": 1.0}, ["batch_size is 32 here and 16 at the server"]),
        ({"task_options": {}}, ["task_options.alpha is 0.5 here and null at the server"]),
        (
            {
                "parameters": dataclasses.replace(
                    RIGHT.parameters, eta_w=0.2, uplink=CompressorChoice("rand-k", {"ratio": 0.1})
                )
            },
            [
                "eta_w is 0.1 here and 0.2 at the server",
                'uplink.name is "top-k" here and "rand-k" at the server',
            ],
        ),
    ],
)
def test_what_differs_of_the_run_is_named(changes: dict[str, Any], lines: list[str]) -> None:
    assert RIGHT.differences(dataclasses.replace(RIGHT, **changes)) == lines


def malformed(**changes: Any) -> pb.RunSettings:
    message = RIGHT.to_message()
    for name, value in changes.items():
        if isinstance(value, pb.CompressorSettings):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


@given(run=RUNS)
@settings(deadline=None)
def test_settings_cross_the_wire_unchanged(run: RunSettings) -> None:
    data = run.to_message().SerializeToString()
    assert RunSettings.of_message(pb.RunSettings.FromString(data)) == run


def test_the_message_says_what_the_settings_say() -> None:
    message = RIGHT.to_message()
    assert (message.workers, message.rounds, message.task, message.algorithm) == (
        10,
        100,
        "digits",
        "afl-com",
    )
    assert (message.uplink.name, message.uplink.options) == ("top-k", '{"ratio": 0.1}')
    assert (message.downlink.name, message.downlink.options) == ("identity", "{}")
    assert json.loads(message.algorithm_options) == {
        "block": 10,
        "eta_q": 0.01,
        "local_steps": 1,
        "sampled": None,
        "weigh_by_samples": False,
    }


def test_doubles_cross_the_wire_to_the_bit() -> None:
    values = {"eta_w": 0.1 + 0.2, "eta_q": 5e-324}
    run = dataclasses.replace(RIGHT, parameters=dataclasses.replace(RIGHT.parameters, **values))
    read = RunSettings.of_message(run.to_message()).parameters
    assert (read.eta_w.hex(), read.eta_q.hex()) == ((0.1 + 0.2).hex(), (5e-324).hex())


@pytest.mark.parametrize("name", ["workers", "rounds", "batch_size", "evaluation_batch_size", "chunk_bytes"])
def test_a_count_of_zero_is_malformed(name: str) -> None:
    with pytest.raises(ProtocolError, match="lack a count, a size or a duration"):
        RunSettings.of_message(malformed(**{name: 0}))


@pytest.mark.parametrize("name", ["heartbeat_seconds", "peer_timeout_seconds"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_duration_that_is_not_positive_and_finite_is_malformed(name: str, value: float) -> None:
    with pytest.raises(ProtocolError, match="lack a count, a size or a duration"):
        RunSettings.of_message(malformed(**{name: value}))


@pytest.mark.parametrize("options", ["{", "[1]", "3", "null", '"block"', "{'block': 1}", "[" * 100_000])
@pytest.mark.parametrize("name", ["task_options", "algorithm_options", "uplink", "downlink"])
def test_options_that_are_no_json_object_are_malformed(name: str, options: str) -> None:
    value: Any = options
    if name in {"uplink", "downlink"}:
        value = pb.CompressorSettings(name="top-k", options=options)
    with pytest.raises(ProtocolError, match=r"are not (JSON|a JSON object)$"):
        RunSettings.of_message(malformed(**{name: value}))


@pytest.mark.parametrize("block", ["0", "-1", "2.5", "true", "null", '"7"', "[7]", "1e3", "NaN", "Infinity"])
def test_a_block_that_is_no_count_is_malformed(block: str) -> None:
    with pytest.raises(ProtocolError, match="the server's algorithm_options: block is"):
        RunSettings.of_message(malformed(algorithm_options=f'{{"block": {block}}}'))


@pytest.mark.parametrize(
    "eta_q", ["-0.1", "true", "null", '"1"', "{}", "NaN", "Infinity", "-Infinity", "1" + 400 * "0"]
)
def test_an_eta_q_that_is_no_step_size_is_malformed(eta_q: str) -> None:
    with pytest.raises(ProtocolError, match="the server's algorithm_options: eta_q is"):
        RunSettings.of_message(malformed(algorithm_options=f'{{"eta_q": {eta_q}}}'))


SCHEDULE = '{"warm_up": 1, "then": "steps", "final": 0.5, "at": [], "factor": 0.1, "eta_q": false}'
OPTIMIZER = '{"name": "adam", "beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-8}'


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("local_steps", "sampled")
            for value in ("0", "-1", "2.5", "true", '"7"')
        ),
        ("local_steps", "null"),
        *(("weigh_by_samples", value) for value in ("1", "null", '"yes"')),
        *(("schedule", value) for value in ("null", "{}", '"cosine"', SCHEDULE.replace("0.1", "0"))),
        ("schedule", SCHEDULE.replace("[]", "[0]")),
        *(("optimizer", value) for value in ("3", '{"name": "adam"}', OPTIMIZER.replace("0.9", "1"))),
        ("optimizer", OPTIMIZER.replace("adam", "lion")),
        *(("mean_of_last", value) for value in ("0", "-1", "2.5", '"block"')),
        *(("weight_decay", value) for value in ("-1", "null")),
        *(("clip_norm", value) for value in ("0", "null", '"1"')),
    ],
)
def test_an_option_of_the_wrong_type_is_malformed(name: str, value: str) -> None:
    with pytest.raises(ProtocolError, match=f"the server's algorithm_options: {name} is"):
        RunSettings.of_message(malformed(algorithm_options=f'{{"{name}": {value}}}'))


def test_what_is_not_used_is_not_told_and_what_is_told_is_right() -> None:
    told = json.loads(RIGHT.to_message().algorithm_options)
    later = {"schedule", "optimizer", "mean_of_last", "weight_decay", "clip_norm", "largest_weight"}
    assert not told.keys() & later
    options = f'{{"schedule": {SCHEDULE}, "optimizer": {OPTIMIZER}}}'
    found = RunSettings.of_message(malformed(algorithm_options=options)).parameters
    assert found.schedule == Schedule(1, "steps", 0.5, (), 0.1)
    assert found.optimizer == OptimizerChoice("adam", 0.9, 0.99)


def test_an_option_that_this_version_does_not_know_is_refused() -> None:
    with pytest.raises(ProtocolError, match="this version does not know 'momentum'"):
        RunSettings.of_message(malformed(algorithm_options='{"momentum": 0.9}'))


@pytest.mark.parametrize("eta_w", [float("nan"), float("inf")])
def test_an_eta_w_that_is_not_finite_is_malformed(eta_w: float) -> None:
    with pytest.raises(ProtocolError, match="the server's eta_w is"):
        RunSettings.of_message(malformed(eta_w=eta_w))


@pytest.mark.parametrize("chunk_bytes", [1, 3, 4097, 2**32 - 1])
def test_chunks_that_would_cut_a_value_in_two_are_malformed(chunk_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"chunks of {chunk_bytes} bytes would cut a value in two"):
        RunSettings.of_message(malformed(chunk_bytes=chunk_bytes))


def test_an_empty_message_is_malformed() -> None:
    with pytest.raises(ProtocolError):
        RunSettings.of_message(pb.RunSettings())


@pytest.mark.parametrize(("configured", "used"), [("4KiB", 4096), ("4097B", 4096), ("5003B", 5000)])
def test_a_configured_chunk_is_cut_between_values(tmp_path: Path, configured: str, used: int) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("{}\n", encoding="utf-8")
    overrides = [
        "task.name=digits",
        "workers=3",
        "algorithm.name=afl-com",
        "algorithm.rounds=10",
        "algorithm.eta_w=0.1",
        "algorithm.eta_q=0.1",
        f"server.chunk_bytes={configured}",
    ]
    run = RunSettings.of_config(load_config(path, overrides))
    assert run.chunk_bytes == used
    assert RunSettings.of_message(run.to_message()) == run


# ratio: theory.

THEORY = "theory"
"""(ln m)^(-1/4) and (ln m)^(-1/2) by hand: ln 3 = 1.0986, ln 1000 = 6.9078; at most 1."""


def sized(
    workers: int, uplink: dict[str, Any], downlink: dict[str, Any] | None = None
) -> tuple[Any, Any, RunSettings]:
    """The two ratios that the Welcome carries, and the settings."""
    algorithm = {"name": "afl-com", "rounds": 10, "eta_w": 0.1, "eta_q": 0.1, "uplink": uplink}
    config = config_from_mapping(
        {
            "workers": workers,
            "task": {"name": "digits"},
            "algorithm": algorithm | ({} if downlink is None else {"downlink": downlink}),
        }
    )
    run = RunSettings.of_config(config)
    message = run.to_message()
    up, down = (json.loads(way.options).get("ratio") for way in (message.uplink, message.downlink))
    return up, down, run


@pytest.mark.parametrize(
    ("name", "workers", "ratio"),
    [
        ("top-k", 3, 0.97676),
        ("rand-k", 3, 0.95406),
        ("top-k", 1000, 0.61683),
        *((name, 1000, 0.38048) for name in ("rand-k", "projection", "dct-projection")),
        *((name, workers, 1.0) for name in ("top-k", "rand-k") for workers in (1, 2)),
    ],
)
def test_theory_sizes_a_compressor_by_its_class(name: str, workers: int, ratio: float) -> None:
    up, down, run = sized(workers, {"name": name, "ratio": THEORY})
    assert up == down == pytest.approx(ratio, abs=1e-5)
    assert isinstance(up, float)
    assert RunSettings.of_message(run.to_message()) == run
    assert run.parameters.uplink == run.parameters.downlink
    assert create(name, 1000, run.parameters.uplink.options).count == round(up * 1000)


def test_beside_another_downlink_that_loses_something_both_have_theorem_2_s_rule() -> None:
    rand_k, top_k = {"name": "rand-k", "ratio": THEORY}, {"name": "top-k", "ratio": THEORY}
    general, sharper = pytest.approx(0.61683, abs=1e-5), pytest.approx(0.38048, abs=1e-5)
    assert sized(1000, rand_k, top_k)[:2] == (general, general)
    assert sized(1000, top_k, rand_k)[:2] == (general, general)
    assert sized(1000, rand_k, {"name": "rand-k", "ratio": 0.5})[:2] == (general, 0.5)
    assert sized(1000, {"name": "identity"}, rand_k)[:2] == (None, general)
    assert sized(1000, rand_k, {"name": "identity"})[:2] == (sharper, None)
    assert sized(1000, rand_k, dict(rand_k))[:2] == (sharper, sharper)


@pytest.mark.parametrize("name", ["identity", "scaled-sign"])
def test_what_has_no_ratio_takes_no_theory(name: str) -> None:
    with pytest.raises(InvalidConfigError, match=f'"theory", under a key that {name} does not take'):
        sized(10, {"name": name, "ratio": THEORY})


def test_another_word_is_no_ratio() -> None:
    with pytest.raises(InvalidConfigError, match="a number above 0 and at most 1, or theory"):
        sized(10, {"name": "rand-k", "ratio": "theorie"})
