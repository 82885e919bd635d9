"""A site's policy: what it allows of a run, and how it says what it does not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from afl.config import config_from_mapping
from afl.config.address import Address
from afl.config.document import all_keys
from afl.config.schema import Privacy
from afl.core.record_privacy import RecordPrivacy
from afl.errors import ConfigError, ExitCode, PolicyError
from afl.security.certificates import pem_certificates
from afl.site import policy as policy_module
from afl.site.policy import DEFAULT_MIN_BATCH, Disclosure, Policy, SitePolicy
from afl.wire.settings import RunSettings
from support.identities import Identities


def settings_of(task: Mapping[str, Any] | None = None, **algorithm: Any) -> RunSettings:
    return RunSettings.of_config(
        config_from_mapping(
            {
                "workers": 3,
                "task": {"name": "synthetic", "batch_size": 16, **(task or {})},
                "algorithm": {"name": "afl-br", "rounds": 100, "eta_w": 0.1, "eta_q": 0.1, **algorithm},
            }
        )
    )


def policy_of(folder: Path, text: str) -> SitePolicy:
    path = folder / "site.yaml"
    path.write_text(f"# of a test\n{text}\n", encoding="utf-8")
    return SitePolicy.load(path)


def refusal(policy: SitePolicy, settings: RunSettings, task: str = "synthetic") -> str:
    with pytest.raises(PolicyError) as caught:
        policy.check_run(settings, task)
    assert caught.value.exit_code is ExitCode.POLICY
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("tasks: {digits: any, synthetic: any}", "synthetic"),
        ("tasks: {synthetic: {dim: [50, 100], scale: any}}", "synthetic"),
        ("tasks: {afl.tasks.synthetic:Synthetic: {dim: any, scale: [2]}}", "synthetic"),
        ("tasks: {synthetic: any}", "afl.tasks.synthetic:Synthetic"),
        ("algorithms: [afl-com, afl-br]", "synthetic"),
        ("min_workers: 3", "synthetic"),
        ("max_rounds: 100", "synthetic"),
        ("secure_aggregation: optional\nlosses: shown\nmetrics: shown", "synthetic"),
    ],
)
def test_what_is_allowed(tmp_path: Path, text: str, task: str) -> None:
    settings = settings_of({"options": {"dim": 100, "scale": 2}})
    policy_of(tmp_path, text).check_run(settings, task)


@pytest.mark.parametrize(
    ("text", "key", "found", "accepted"),
    [
        ("tasks: {digits: any}", "tasks", "synthetic", "one of digits"),
        (
            "tasks:\n  synthetic:\n    scale: any",
            "tasks.synthetic.dim",
            "dim: 100",
            "its default; the options that may be set are scale",
        ),
        (
            "tasks:\n  synthetic:\n    scale: [2.0, 3]\n    dim: any",
            "tasks.synthetic.scale",
            "scale: 2",
            "one of 2.0, 3",
        ),
        (
            "tasks: {synthetic: }",
            "tasks.synthetic.dim",
            "dim: 100",
            "its default; the options that may be set are none",
        ),
        ("algorithms: [afl-com]", "algorithms", "afl-br", "one of afl-com"),
        ("algorithms: []", "algorithms", "afl-br", "none: the list is empty"),
        ("tasks: {}", "tasks", "synthetic", "none: the list is empty"),
        ("min_workers: 4", "min_workers", "3 workers", "at least 4"),
        ("max_rounds: 99", "max_rounds", "100 rounds", "at most 99"),
        ("secure_aggregation: required", "secure_aggregation", "false", "privacy.secure_aggregation: true"),
        ("losses: hidden", "losses", "losses are shown", "privacy.losses: hidden"),
        ("metrics: hidden", "metrics", "metrics are shown", "privacy.losses: hidden"),
    ],
)
def test_what_is_forbidden_is_said_with_its_line(
    tmp_path: Path, text: str, key: str, found: str, accepted: str
) -> None:
    said = refusal(policy_of(tmp_path, text), settings_of({"options": {"dim": 100, "scale": 2}}))
    where, *told = said.split("\n\n")[1].splitlines()
    file, line, named = where.split(":", 2)
    assert (file, named.strip()) == (str(tmp_path / "site.yaml"), key)
    last = key.rpartition(".")[2] if key.rpartition(".")[2] in text else "synthetic"
    assert (tmp_path / "site.yaml").read_text(encoding="utf-8").splitlines()[int(line) - 1].count(last) == 1
    assert told == [f"    found:     {found}", f"    accepted:  {accepted}"]


def test_all_that_is_forbidden_is_said_at_once(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "min_workers: 9\nepsilon: 1.5\ndelta: 1e-5\nmax_rounds: 5\nmin_batch: 99")
    with pytest.raises(PolicyError) as caught:
        policy.check_run(settings_of(), "synthetic")
    # How many examples there are is not known yet.
    assert caught.value.keys == ["min_workers", "max_rounds", "epsilon", "delta"]
    assert "found:     none is stated" in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "broken"),
    [
        (Disclosure(Privacy(), RecordPrivacy(1.0, 5.0, 1e-5, epsilon=1.5)), []),
        (Disclosure(Privacy(), RecordPrivacy(1.0, 5.0, 1e-6, epsilon=1.6)), ["epsilon"]),
        (Disclosure(Privacy(), RecordPrivacy(1.0, 5.0, 1e-4, epsilon=1.0)), ["delta"]),
        # What the noise is worth is known once the records are counted.
        (Disclosure(Privacy(), RecordPrivacy(1.0, 5.0, 1e-5, noise=1e-3)), []),
        (
            Disclosure(
                Privacy.model_construct(secure_aggregation=True, losses="hidden"),
                RecordPrivacy(1.0, 5.0, 1e-5, epsilon=1.0),
            ),
            [],
        ),
    ],
)
def test_what_a_run_states_is_read_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: Disclosure, broken: list[str]
) -> None:
    hides = stated.privacy.losses == "hidden"
    text = (
        "epsilon: 1.5\ndelta: 1e-5"
        + hides * "\nsecure_aggregation: required\nlosses: hidden\nmetrics: hidden"
    )
    monkeypatch.setattr(policy_module, "disclosed", lambda _: stated)
    demands = policy_of(tmp_path, text).demands(settings_of(), "synthetic")
    assert [demand.key[0] for demand in demands if not demand.is_met] == broken


def test_what_the_planned_rounds_cost_may_not_be_above_the_policys_epsilon(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "epsilon: 1.5\ndelta: 1e-5")
    policy.check_epsilon(1.5, 0)
    SitePolicy().check_epsilon(100.0, 0)
    with pytest.raises(
        PolicyError, match=r"site.yaml:2: epsilon\n.*rounds cost worker 3 1\.6\n.*at most 1\.5"
    ):
        policy.check_epsilon(1.6, 3)


def test_minibatches_may_not_be_smaller_than_the_floor_or_all_examples(tmp_path: Path) -> None:
    policy = SitePolicy(min_batch=DEFAULT_MIN_BATCH)
    policy.check_batch(8, {0: 1000})
    policy.check_batch(5, {0: 5, 1: 3})
    with pytest.raises(PolicyError) as caught:
        policy.check_batch(1, {0: 1, 3: 1000})
    assert str(caught.value).splitlines()[2:] == [
        "--min-batch 8: min_batch",
        "    found:     minibatches of 1; worker 3 has 1000 examples",
        "    accepted:  task.batch_size at least 8, or all examples of a worker that has fewer",
    ]
    with pytest.raises(PolicyError, match=r"site\.yaml:2: min_batch"):
        policy_of(tmp_path, "min_batch: 20").check_batch(16, {0: 17})
    SitePolicy().check_batch(1, {0: 1000})


def test_a_worker_answers_no_more_rounds_than_allowed(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "max_rounds: 10")
    policy.check_rounds(10, 1, 0)
    policy.check_rounds(4, 3, 0)
    for rounds, local_steps in ((11, 1), (5, 3)):
        with pytest.raises(PolicyError, match=f"worker 7 is asked for its answer no. {rounds} of"):
            policy.check_rounds(rounds, local_steps, 7)
    SitePolicy().check_rounds(10**9, 1, 0)


def test_the_server_and_its_authority(tmp_path: Path) -> None:
    ours, theirs = Identities(tmp_path / "a"), Identities(tmp_path / "b")
    pem = ours.ca.read_bytes()
    digits = hashlib.sha256(pem_certificates(pem)[0]).hexdigest().upper()
    printed = ":".join(digits[at : at + 2] for at in range(0, 64, 2))
    text = f"servers: ['fl.example.org:50051', '[::1]:7']\nauthorities: ['{printed}']"
    policy, server = policy_of(tmp_path, text), Address("fl.example.org", 50051)
    policy.check_server(server, pem)
    policy.check_server(Address("::1", 7), pem)
    both = pem + theirs.ca.read_bytes()
    for address, authorities, key in (
        (Address("fl.example.org", 50052), pem, "servers"),
        (Address("other.example.org", 50051), pem, "servers"),
        (server, theirs.ca.read_bytes(), "authorities"),
        (server, both, "authorities"),
        (server, None, "authorities"),
    ):
        with pytest.raises(PolicyError, match=rf"site\.yaml:[23]: {key}") as caught:
            policy.check_server(address, authorities)
        assert caught.value.keys == [key]
    SitePolicy().check_server(server, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("min_bach: 3", r"site\.yaml:2: min_bach\n    found: .*\n    accepted: .*\n    nearest:   min_batch"),
        ("min_batch: 0", r"site\.yaml:2: min_batch\n    found:     0"),
        ("epsilon: 3", r"delta\n    found:     nothing\n    accepted:  a number; epsilon needs it"),
        ("delta: 1e-5", r"epsilon\n    found:     nothing"),
        ("servers: [fl.example.org]", "has no port"),
        ("authorities: [ab:cd]", "64 hexadecimal digits"),
        ("algorithms: [afl-cm]", "nearest:   afl-com"),
        ("losses: hiden", "nearest:   hidden"),
        (
            "tasks: {digits: [1]}",
            r"tasks.digits\n    found:     \[1\]\n    accepted:  a section of options, or any",
        ),
        (
            "tasks: {digits: {size: 3}}",
            r"tasks.digits.size\n    found:     3\n    accepted:  a list of values, or any",
        ),
        ("", "an empty file"),
    ],
)
def test_a_policy_that_cannot_be_used(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        policy_of(tmp_path, text)


def test_every_key_has_words_and_a_default_that_allows() -> None:
    keys = all_keys(Policy)
    assert [key.name for key in keys] == list(Policy.model_fields)
    assert all(key.description and key.accepts for key in keys)
    demands = SitePolicy().demands(settings_of({"batch_size": 1}), "synthetic")
    assert all(demand.is_met for demand in demands)


def test_what_a_run_hides_is_read_from_its_settings(tmp_path: Path) -> None:
    policy = policy_of(tmp_path, "secure_aggregation: required\nlosses: hidden\nmetrics: hidden")
    uplink = {"name": "rand-k", "ratio": 0.5, "bits": 16}
    values = {
        "workers": 3,
        "task": {"name": "synthetic"},
        "algorithm": {"name": "afl-com", "rounds": 1, "eta_w": 0.1, "eta_q": 0.1, "uplink": uplink},
    }
    for privacy, broken in (
        ({}, ["secure_aggregation", "losses", "metrics"]),
        ({"secure_aggregation": True}, ["losses", "metrics"]),
        ({"secure_aggregation": True, "losses": "hidden"}, []),
    ):
        settings = RunSettings.of_config(config_from_mapping({**values, "privacy": privacy}))
        found = policy.demands(settings, "synthetic")
        assert [demand.key[0] for demand in found if not demand.is_met] == broken
