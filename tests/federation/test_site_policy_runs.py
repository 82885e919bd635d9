"""A worker whose site forbids the run leaves before it has sent anything of it, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode
from afl.site.audit import read_log
from support import Federation

CONFIG: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "synthetic", "batch_size": 4, "options": {"dim": 50}},
    "algorithm": {"name": "afl-br", "rounds": 20, "eta_w": 0.1, "eta_q": 0.1},
}

FORBIDDING = {
    "tasks": "tasks: {digits: any}",
    "option": "tasks: {synthetic: {scale: any}}",
    "algorithms": "algorithms: [afl-com]",
    "min_workers": "min_workers: 3",
    "max_rounds": "max_rounds: 19",
    "min_batch": "min_batch: 5",
    "min_batch by default": "losses: shown",
    "secure_aggregation": "secure_aggregation: required",
    "losses": "losses: hidden",
    "metrics": "metrics: hidden",
    "epsilon, delta": "epsilon: 3\ndelta: 1e-5",
}


def test_a_run_that_a_policy_forbids_is_left_before_anything_is_sent(tmp_path: Path) -> None:
    with Federation(CONFIG, tmp_path) as federation:
        for number, (named, text) in enumerate(FORBIDDING.items(), start=1):
            policy, keys = tmp_path / f"site-{number}.yaml", named.removesuffix(" by default")
            policy.write_text(f"audit: audit-{number}.jsonl\n{text}\n", encoding="utf-8")
            worker = federation.start("0", "--policy", str(policy))
            worker.expect(ExitCode.POLICY)
            keys = {"option": "tasks"}.get(keys, keys)
            (ended,) = worker.logged("ended")
            assert ended["code"] == ExitCode.POLICY
            line = "--min-batch 8" if "default" in named else f"{policy}:2"
            assert f"forbids what the server asks for, and nothing of it was sent: {keys}" in ended["message"]
            assert f"\n{line}: {keys.split(',')[0]}" in ended["message"]
            told = federation.server.wait_for("goodbye", count=number)
            assert told["reason"] == f"the site's policy forbids it: {keys}"
            assert not list(read_log(tmp_path / f"audit-{number}.jsonl"))
        assert not federation.server.logged("worker_ready")
        assert not (tmp_path / "afl-journal").exists()
        allowing = tmp_path / "site.yaml"
        allowing.write_text("min_batch: 4\nmax_rounds: 20\nalgorithms: [afl-br]\naudit: audit.jsonl\n")
        federation.start("0", "--policy", str(allowing))
        federation.start("1", "--policy", str(allowing))
        federation.finish()
    entries = [link.entry for link in read_log(tmp_path / "audit.jsonl")]
    trained = [(entry["workers"], entry["round"]) for entry in entries if entry["kind"] == "train"]
    assert sorted(trained) == [([worker], round_) for worker in range(2) for round_ in range(1, 21)]


def test_a_server_that_asks_for_single_examples_gets_none(tmp_path: Path) -> None:
    config = {**CONFIG, "task": {**CONFIG["task"], "batch_size": 1}}
    with Federation(config, tmp_path) as federation:
        worker = federation.start("0-1", "--min-batch", "8")
        worker.expect(ExitCode.POLICY)
        assert "minibatches of 1; worker 0 has 256 examples" in worker.text
        assert not federation.server.logged("worker_ready")


def test_a_server_that_holds_out_all_examples_but_one_gets_none(tmp_path: Path) -> None:
    config = {**CONFIG, "task": {**CONFIG["task"], "batch_size": 1, "held_out": 255 / 256}}
    policy = tmp_path / "site.yaml"
    policy.write_text("min_batch: 16\n", encoding="utf-8")
    with Federation(config, tmp_path) as federation:
        for worker in (
            federation.start("0", "--policy", str(policy)),
            federation.start("1", "--min-batch", "8"),
        ):
            worker.expect(ExitCode.POLICY)
            assert "minibatches of 1; worker" in worker.text
        assert not federation.server.logged("worker_ready")


@pytest.mark.parametrize(
    ("text", "key"),
    [("servers: [fl.example.org:50051]", "servers"), (f"authorities: [{'ab' * 32}]", "authorities")],
)
def test_a_server_that_the_policy_does_not_name_is_not_connected_to(
    tmp_path: Path, text: str, key: str
) -> None:
    policy = tmp_path / "site.yaml"
    policy.write_text(f"{text}\n", encoding="utf-8")
    with Federation(CONFIG, tmp_path) as federation:
        worker = federation.start("0", "--policy", str(policy))
        worker.expect(ExitCode.POLICY)
        assert f"{policy}:1: {key}" in worker.text
        assert not federation.server.logged("goodbye")
