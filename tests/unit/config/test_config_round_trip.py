"""What is written out loads back equal, and the digest changes with what defines the result and only then."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from afl.config import Config, Duration, Size, config_digest, config_from_mapping, dump_config, load_config

COUNTS = st.integers(1, 2**31 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
TRAPS = st.sampled_from(
    [
        "<<",
        "on",
        "No",
        "1e-3",
        "0x1f",
        "1:30",
        "~",
        "",
        "${X}",
        "$${X}",
        "null",
        "2024-01-01",
        ".inf",
        "- a",
        "a: b",
        "1_0",
    ]
)
OPTIONS = st.dictionaries(
    TEXT | TRAPS,
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | TEXT
        | TRAPS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | TRAPS, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
RATIOS = st.floats(0, 1, exclude_min=True)
COMPRESSORS: st.SearchStrategy[Any] = (
    st.none()
    | st.just({})
    | st.fixed_dictionaries({"name": st.sampled_from(["top-k", "rand-k"]), "ratio": RATIOS})
)
CONSTANTS = st.floats(1e-12, 1e12)
DURATIONS = (
    st.sampled_from(["10ms", "0.5 s", "7m", ".25h", "1h"]) | st.floats(0.02, 3600) | st.integers(1, 3600)
)
SIZES = st.sampled_from(["4KiB", "64 KiB", "1.5MiB", "2MB"]) | st.integers(4096, 1 << 24)


@st.composite
def algorithms(draw: st.DrawFn) -> dict[str, Any]:
    algorithm: dict[str, Any] = {
        "name": draw(st.sampled_from(["afl-br", "afl-com"])),
        "rounds": draw(COUNTS),
        "block": draw(COUNTS | st.just("auto")),
        "eta_w": draw(st.floats(1e-44, 1e12) | st.just("theory")),
        "eta_q": draw(st.floats(0, 1e12) | st.just("theory")),
    }
    if algorithm["eta_w"] == "theory":
        algorithm["smoothness"] = draw(CONSTANTS)
    if algorithm["eta_q"] == "theory":
        algorithm["sigma_q"] = draw(CONSTANTS)
    if algorithm["name"] == "afl-com":
        algorithm |= {"uplink": draw(COMPRESSORS), "downlink": draw(COMPRESSORS)}
    return algorithm


PATHS = st.sampled_from(["server.pem", "/etc/afl/key", "on", "1e3", "~"])


@st.composite
def servers(draw: st.DrawFn) -> dict[str, Any]:
    heartbeat = Duration(draw(DURATIONS))
    chunk = Size(draw(SIZES))
    return {
        "listen": draw(st.sampled_from(["127.0.0.1:0", ":50051", "[::1]:50051", "silo:1", "*:7"])),
        "http_hosts": draw(st.lists(NAMES | TRAPS.filter(bool), max_size=3, unique=True)),
        "http_token": draw(st.none() | PATHS),
        **draw(st.just({}) | st.fixed_dictionaries({"http_certificate": PATHS, "http_key": PATHS})),
        "integrity_key": draw(st.none() | PATHS),
        "http": draw(st.sampled_from([None, "127.0.0.1:9090", "[::]:0"])),
        "tls": draw(
            st.none()
            | st.fixed_dictionaries(
                {"certificate": PATHS, "key": PATHS}, optional={"client_ca": st.none() | PATHS}
            )
            | st.fixed_dictionaries(
                {"certificate": PATHS, "key": PATHS, "client_ca": PATHS, "revoked": PATHS}
            )
        ),
        "insecure": draw(st.booleans()),
        "heartbeat": str(heartbeat),
        "peer_timeout": max(0.02, 2 * float(heartbeat)) * 1.001,
        "handshake_timeout": draw(DURATIONS),
        "start_timeout": draw(st.none() | DURATIONS),
        "max_sessions": draw(st.integers(1, 10**6)),
        "chunk_bytes": str(chunk),
        "reorder_buffer": int(chunk),
    }


VALUES = st.fixed_dictionaries(
    {
        "workers": COUNTS,
        "task": st.fixed_dictionaries(
            {"name": NAMES | st.just("digits"), "options": OPTIONS, "batch_size": COUNTS}
        ),
        "algorithm": algorithms(),
    },
    optional={
        "evaluation": st.fixed_dictionaries({"every": COUNTS}),
        "run": st.fixed_dictionaries(
            {
                "directory": st.none() | st.sampled_from(["runs/a", "/b c", "on", "1e3", "~"]),
                "seed": st.none() | st.integers(0, 2**128 - 1) | st.sampled_from(["0x0", "0xFf"]),
            },
            optional={
                "description": st.none() | TEXT | TRAPS,
                "trackers": st.lists(NAMES | TRAPS.filter(bool), max_size=3, unique=True),
            },
        ),
        "server": servers(),
        "worker": st.fixed_dictionaries({"threads": st.integers(1, 1024), "batch_oracles": st.booleans()}),
        "faults": st.fixed_dictionaries(
            {"lost_residual": st.sampled_from(["restart", "refuse"])},
            optional={
                "stragglers": st.fixed_dictionaries(
                    {"policy": st.just("skip"), "deadline": st.sampled_from(["30s", 0.5, "1h"])},
                    optional={"quorum": st.sampled_from([0.5, 1, 1e-3])},
                )
                | st.just({"policy": "wait"}),
                "non_finite": st.sampled_from(["abort", "skip"]),
                "divergence": st.none()
                | st.fixed_dictionaries(
                    {"max_loss": st.floats(1e-300, 1e300)}, optional={"evaluations": COUNTS}
                ),
            },
        ),
    },
)


def _named(task: str) -> dict[str, Any]:
    algorithm = {"name": "afl-br", "rounds": 1, "eta_w": 1.0, "eta_q": 0.0}
    return {"workers": 1, "task": {"name": task}, "algorithm": algorithm}


@settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(values=VALUES)
@example(values=_named("\x85"))
@example(values=_named("a\u2028b\u2029"))
def test_what_is_written_out_loads_back_equal(tmp_path: Path, values: dict[str, Any]) -> None:
    config = config_from_mapping(values)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    again = load_config(path, environment={})
    assert again == config
    assert dump_config(again) == dump_config(config)
    assert config_digest(again) == config_digest(config)


BASE: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "digits"},
    "algorithm": {
        "name": "afl-com",
        "rounds": 100,
        "eta_w": 0.05,
        "eta_q": 0.1,
        "uplink": {"name": "rand-k", "ratio": 0.1},
    },
    "server": {"heartbeat": "90 s", "peer_timeout": "5m", "chunk_bytes": 65536, "start_timeout": 1.5},
    "run": {"seed": 16},
}


def test_what_is_written_out() -> None:
    assert dump_config(config_from_mapping(BASE)) == (
        "workers: 3\n"
        "task:\n"
        "  name: digits\n"
        "  options: {}\n"
        "  batch_size: 32\n"
        "  evaluation_batch_size: 1024\n"
        "  held_out: 0.0\n"
        "algorithm:\n"
        "  name: afl-com\n"
        "  rounds: 100\n"
        "  eta_w: 0.05\n"
        "  eta_q: 0.1\n"
        "  uplink:\n"
        "    name: rand-k\n"
        "    ratio: 0.1\n"
        "evaluation:\n"
        "  every: 50\n"
        "run:\n"
        '  seed: "0x00000000000000000000000000000010"\n'
        "  trackers: []\n"
        "server:\n"
        "  listen: 127.0.0.1:50051\n"
        "  http: 127.0.0.1:9090\n"
        "  http_hosts: []\n"
        "  insecure: false\n"
        "  heartbeat: 90 s\n"
        "  peer_timeout: 5m\n"
        "  handshake_timeout: 30s\n"
        "  start_timeout: 1.5s\n"
        "  state: process\n"
        "  checkpoint_every: 100\n"
        "  grace: 10s\n"
        "  max_sessions: 4096\n"
        "  chunk_bytes: 65536B\n"
        "  reorder_buffer: 32MiB\n"
        "worker:\n"
        "  journal: process\n"
        "  threads: 1\n"
        "  batch_oracles: false\n"
        "faults:\n"
        "  stragglers:\n"
        "    policy: wait\n"
        "  non_finite: abort\n"
        "  lost_residual: restart\n"
        "privacy:\n"
        "  secure_aggregation: false\n"
        "  losses: shown\n"
    )


def _digest(**changes: Any) -> str:
    """The digest of the base with values changed; a key's double underscore stands for its dot."""
    values = copy.deepcopy(BASE)
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return config_digest(config_from_mapping(values))


def test_the_digest_never_changes_between_versions() -> None:
    assert _digest() == "191e247ded27fc97493b44a519a7b3805c62cc6f42d92508e7359b8090a7b51d"


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 4},
        {"task__name": "synthetic"},
        {"task__options": {"classes": 2}},
        {"task__batch_size": 16},
        {"task__held_out": 0.2},
        {"algorithm__rounds": 99},
        {"algorithm__eta_w": 0.06},
        {"algorithm__uplink": {"name": "top-k", "ratio": 0.1}},
        {"algorithm__uplink": {"name": "rand-k", "ratio": 0.1, "bits": 4}},
        {"algorithm__downlink": {}},
        {"algorithm__block": 9},
        {"run__seed": 17},
        {"run__seed": None},
        {"worker__threads": 2},
        {"worker__batch_oracles": True},
    ],
)
def test_what_defines_the_result_changes_the_digest(changes: dict[str, Any]) -> None:
    assert _digest(**changes) != _digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm__block": 10},
        {"task__held_out": 0},
        {"algorithm__downlink": {"name": "rand-k", "ratio": 0.1}},
        {"run__seed": "0x10"},
        {"run__directory": "elsewhere"},
        {"run__description": "Digits of two hospitals."},
        {"run__trackers": ["tensorboard"]},
        {"server__heartbeat": "1s"},
        {"evaluation__every": 3},
        {"faults__lost_residual": "refuse"},
    ],
)
def test_what_does_not_define_it_does_not(changes: dict[str, Any]) -> None:
    assert _digest(**changes) == _digest()


def test_the_server_fills_in_the_seed() -> None:
    config = config_from_mapping(BASE | {"run": {"directory": "runs/x"}})
    filled = config.with_seed(2**128 - 1)
    assert (filled.run.seed, filled.run.directory, config.run.seed) == (2**128 - 1, Path("runs/x"), None)
    assert filled == config_from_mapping(BASE | {"run": {"directory": "runs/x", "seed": "0x" + "f" * 32}})
    with pytest.raises(ValueError, match="0 to 2\\^128 - 1"):
        config.with_seed(2**128)


def test_the_example_is_a_configuration() -> None:
    config: Config = load_config(Path(__file__).parents[3] / "deploy" / "server.yaml", environment={})
    assert (config.workers, config.task.name, config.algorithm.name) == (10, "fashion-mnist", "afl-com")
    assert (config.algorithm.rounds, config.algorithm.block_length) == (2000, 45)
    assert (config.algorithm.eta_w_value, config.eta_q_value) == (0.05, 0.1)
    assert config.algorithm.uplink_compressor == config.algorithm.downlink_compressor
    assert config.algorithm.uplink_compressor.name == "rand-k"
    assert config.algorithm.uplink_compressor.options == {"ratio": 0.1}
    assert config.evaluation.every == 50
