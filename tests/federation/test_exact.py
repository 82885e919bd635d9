"""One run, many ways to run it: the result is the same to the bit, and is what the paper's algorithm says.

The other opinion is :class:`support.Reference`, a plain numpy script that shares no code with ``afl``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from afl.tasks.digits import Digits
from afl.tasks.synthetic import Synthetic
from support import Federation, Proxy, Reference, run_together
from support.proxy import Way

IDENTITY = {"name": "identity"}
RAND_K = {"name": "rand-k", "ratio": 0.1}
TOP_K = {"name": "top-k", "ratio": 0.1}

SYNTHETIC = {
    "workers": 4,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {"name": "afl-com", "rounds": 50, "eta_w": 0.9, "eta_q": 0.3},
    "evaluation": {"every": 20},
}

DIGITS = {
    "workers": 4,
    "task": {"name": "digits", "batch_size": 16, "options": {"hidden": [16]}},
    "algorithm": {"name": "afl-com", "rounds": 50, "eta_w": 0.2, "eta_q": 0.1, "uplink": TOP_K},
    "evaluation": {"every": 25},
}


def config_of(
    uplink: Mapping[str, Any], downlink: Mapping[str, Any] | None = None, **server: Any
) -> dict[str, Any]:
    compressors = {"uplink": dict(uplink)} | ({} if downlink is None else {"downlink": dict(downlink)})
    algorithm = {**SYNTHETIC["algorithm"], **compressors}  # type: ignore[dict-item]
    return {**SYNTHETIC, "algorithm": algorithm, "server": server}


def run_cut(
    config: Mapping[str, Any], folder: Path, groups: Sequence[str], cuts: Sequence[tuple[int, Way]]
) -> Federation:
    """A federation whose connections are reset whenever so many more bytes have gone one way."""
    with Proxy() as proxy, Federation(config, folder) as federation:
        due = proxy.cut_after(*cuts[0])
        for ids in groups:
            federation.start(ids, server=proxy.address)
        proxy.aim(federation.port)
        for cut in cuts[1:]:
            assert due.wait(60), f"the server's log:\n{federation.server.text}"
            due = proxy.cut_after(*cut)
        assert due.wait(60)
        federation.finish()
        resumed = federation.server.logged("worker_ready")
        assert len(resumed) > len(groups), "nobody had to come back"
        for worker in federation.workers:
            assert len(worker.logged("joined")) == 1, "a worker built its task twice"
    return federation


def check(federation: Federation, config: Mapping[str, Any]) -> None:
    """All that the run wrote is what the reference says."""
    reference = Reference.of(config)
    rounds = config["algorithm"]["rounds"]
    for name, after in (
        ("final", rounds),
        ("random", reference.random_round - 1),
        ("best", reference.best_round),
    ):
        # The two lines that a user needs.
        module = Synthetic().model()
        module.load_state_dict(load_file(federation.directory / f"model-{name}.safetensors"))
        weights = module.w.detach().numpy()  # type: ignore[union-attr, operator]
        assert weights.tobytes() == reference.weights[after].tobytes(), f"model-{name}, after {after} rounds"
        assert federation.model_metadata(name)["rounds_applied"] == str(after)

    lines = federation.records("round")
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    for line, losses, weights in zip(lines, reference.losses, reference.dual_weights, strict=False):
        assert line["loss_max"] == losses.max()
        assert line["loss_max_worker"] == losses.argmax()
        assert line["loss_mean"] == pytest.approx(losses.mean(), rel=1e-15)
        assert line["dual_weight_max"] == pytest.approx(weights.max(), rel=0, abs=1e-12)
    evaluations = {line["round"]: line for line in federation.records("evaluation")}
    assert list(evaluations) == list(reference.test_losses)
    for round_, test_losses in reference.test_losses.items():
        assert [worker["loss"] for worker in evaluations[round_]["workers"]] == test_losses.tolist()
    assert federation.summary()["best"]["round"] == reference.best_round


@pytest.mark.parametrize(
    ("uplink", "downlink", "groups"),
    [
        pytest.param(IDENTITY, None, ["0-3"], id="identity, all in one process"),
        pytest.param(TOP_K, RAND_K, ["0-3"], id="top-k up and rand-k down, all in one process"),
        pytest.param(
            RAND_K, {"name": "rand-k", "ratio": 0.6}, ["1,3", "0,2"], id="two sizes of rand-k, two and two"
        ),
    ],
)
def test_hosted_together_it_is_the_papers_algorithm(
    uplink: Mapping[str, Any], downlink: Mapping[str, Any] | None, groups: list[str], tmp_path: Path
) -> None:
    config = config_of(uplink, downlink)
    check(run_together(config, tmp_path / "run", groups), config)


def test_no_dual_weight_is_above_the_largest(tmp_path: Path) -> None:
    config = config_of(RAND_K)
    config["algorithm"] = {**config["algorithm"], "eta_q": 5.0, "largest_weight": 0.4}
    federation = run_together(config, tmp_path / "run", ["0-1", "2-3"])
    check(federation, config)
    largest = [line["dual_weight_max"] for line in federation.records("round")]
    assert max(largest) == 0.4
    assert largest.count(0.4) > 5, "the cap was hardly ever needed"


@pytest.mark.parametrize("order", [["3", "1", "0", "2"]])
@pytest.mark.parametrize("uplink", [RAND_K], ids=lambda uplink: uplink["name"])
def test_the_order_of_arrival_does_not_matter(
    uplink: Mapping[str, Any], order: list[str], tmp_path: Path
) -> None:
    config = config_of(uplink)
    with Federation(config, tmp_path / "run") as federation:
        for ids in order:
            federation.start(ids)
            # The next process starts when this one's report for round 1 may already lie at the server.
            federation.server.wait_for("worker_ready", workers=f"[{ids}]")
        federation.finish()
    check(federation, config)


@pytest.mark.parametrize(
    ("uplink", "groups"),
    [
        pytest.param(IDENTITY, ["0-1", "2-3"], id="identity"),
        pytest.param(RAND_K, ["0-3"], id="rand-k"),
        pytest.param(TOP_K, ["2", "0-1,3"], id="top-k"),
    ],
)
def test_cut_streams_resume_where_they_were(
    uplink: Mapping[str, Any], groups: list[str], tmp_path: Path
) -> None:
    config = config_of(uplink)
    # Odd numbers of bytes: the cuts fall inside messages of the handshake and of the rounds, both ways.
    cuts = [(700, Way.UP), (1501, Way.DOWN), (2001, Way.UP), (777, Way.UP), (1003, Way.DOWN), (1501, Way.UP)]
    check(run_cut(config, tmp_path / "run", groups, cuts), config)


def test_streams_cut_inside_a_payload_of_many_chunks(tmp_path: Path) -> None:
    """Part of a payload is in the sum already when the rest is cut off; it is not summed twice."""
    config = config_of(IDENTITY, chunk_bytes=4096)
    config["task"] = {**config["task"], "options": {"dim": 10_000, "examples": 32}}
    config["algorithm"] = {**config["algorithm"], "rounds": 10}
    cuts = [(100_001, Way.UP), (50_001, Way.DOWN), (90_001, Way.UP), (60_003, Way.UP)]
    federation = run_cut(config, tmp_path / "run", ["0-1", "2-3"], cuts)
    reference = Reference.of(config)
    assert federation.model("final")["w"].numpy().tobytes() == reference.weights[-1].tobytes()
    random = federation.model("random")["w"].numpy()
    assert random.tobytes() == reference.weights[reference.random_round - 1].tobytes()


def test_a_network_gives_the_same_bits_twice_and_however_it_is_hosted(tmp_path: Path) -> None:
    once = run_together(DIGITS, tmp_path / "together", ["0-3"])
    again = run_cut(DIGITS, tmp_path / "cut", ["3", "0-2"], [(9_001, Way.UP), (20_001, Way.DOWN)])
    other = run_together({**DIGITS, "run": {"seed": 8}}, tmp_path / "other seed", ["0-3"])
    for name in ("final", "random", "best"):
        assert once.model_bytes(name) == again.model_bytes(name), name
        assert once.model_bytes(name) != other.model_bytes(name), name
    for record in ("round", "evaluation"):
        timeless = [
            [
                {key: value for key, value in line.items() if key != "seconds" and "bytes" not in key}
                for line in run.records(record)
            ]
            for run in (once, again)
        ]
        strip = ("uplink_float_equivalents", "downlink_float_equivalents")
        for line in [*timeless[0], *timeless[1]]:
            for key in strip:
                line.pop(key)
        assert timeless[0] == timeless[1]

    module = Digits(hidden=(16,)).model()
    module.load_state_dict(load_file(once.directory / "model-best.safetensors"))
    assert module(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    best = max(once.records("evaluation"), key=lambda line: line["worst_accuracy"])
    metadata = once.model_metadata("best")
    assert metadata["rounds_applied"] == str(best["round"])
    assert float(metadata["worst_accuracy"]) == best["worst_accuracy"]


def test_the_reference_draws_without_replacement_and_as_published() -> None:
    philox = np.random.Philox(key=1)
    assert philox.random_raw(3).tolist() == [5599841837815857887, 15655913098571550255, 2880178291573394738]
    reference = Reference.of(config_of(RAND_K))
    changed = np.count_nonzero(reference.weights[1] != reference.weights[0])
    assert 0 < changed <= 10
