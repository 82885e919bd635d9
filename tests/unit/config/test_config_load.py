"""Every kind of mistake in a configuration, with what is said of it: place, key, value, what is right."""

from __future__ import annotations

import errno
import os
import re
import shlex
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest

from afl import paths
from afl.config import Config, InvalidConfigError, compressors, config_from_mapping, load_config
from afl.core.algorithms.registry import algorithm_names
from afl.core.compressors import compressor_names
from afl.errors import ConfigError, ExitCode

Load = Callable[..., Config]
Problems = Callable[..., list[str]]

VALID = """\
workers: 3
task:
  name: digits
algorithm:
  name: afl-com
  rounds: 100
  eta_w: 0.05
  eta_q: 0.1
server:
  heartbeat: 10s
"""


def problem(heading: str, found: str, accepted: str, **more: str) -> str:
    """A problem as it is shown."""
    lines = [heading, f"    found:     {found}", f"    accepted:  {accepted}"]
    lines += [f"    {label + ':':<11}{text}" for label, text in more.items()]
    return "\n".join(lines)


COUNT = "a whole number from 1 to 2^31 - 1"
SERVER_KEYS = (
    "one of listen, http, http_hosts, http_token, http_certificate, http_key, tls, tokens, insecure,"
    " heartbeat, peer_timeout, handshake_timeout, start_timeout, give_up_after, state, integrity_key,"
    " checkpoint_every, grace, max_sessions, chunk_bytes, reorder_buffer"
)
ALGORITHM_NAMES = ", ".join(algorithm_names()[:-1]) + f" or {algorithm_names()[-1]}"

ALGORITHM_KEYS = (
    "one of name, rounds, block, eta_w, eta_q, largest_weight, dual, dual_loss, local_steps, sampled, "
    "weighting, schedule, optimizer, server_eta, final_model, weight_decay, clip_norm, smoothness, sigma_q, "
    "uplink, downlink"
)
ROOT_KEYS = "one of workers, sites, task, algorithm, evaluation, run, server, worker, faults, privacy"
LISTEN = "host:port: 127.0.0.1:50051, '[::1]:50051' in quotes, :50051 (all addresses); port 0 is any free one"
DURATION = "a duration (250ms, 30s, 5m, 1h, or a number of seconds)"
SIZE = "a size (64KiB, 1MiB, 2GB, or a number of bytes)"
SEED = "a whole number from 0 to 2^128 - 1, or 0x and 1 to 32 hexadecimal digits, or null (a fresh one)"
OPTION = "text, a finite number, true, false, null, a list or a mapping"
INSTALLED = "an installed compressor: " + ", ".join(compressor_names())
RATIO = "a number above 0 and at most 1, or theory"
BITS = "a whole number from 2 to 24, or no key for float32"
QUOTES = "the quotes make it text; leave them out"


def test_the_smallest_configuration_has_the_defaults(load: Load) -> None:
    config = load(VALID)
    assert config.workers == 3
    assert config.task.options == {}
    assert (config.task.batch_size, config.task.evaluation_batch_size) == (32, 1024)
    assert config.algorithm.block_length == 10
    assert config.evaluation.every == 50
    assert config.run.directory is None
    assert config.run.seed is None
    assert str(config.server.listen) == "127.0.0.1:50051"
    assert str(config.server.http) == "127.0.0.1:9090"
    assert config.server.insecure is False
    assert (config.server.heartbeat, config.server.peer_timeout) == (10.0, 60.0)
    assert (config.server.handshake_timeout, config.server.start_timeout) == (30.0, None)
    assert config.server.max_sessions == 4096
    assert (config.server.chunk_bytes, config.server.reorder_buffer) == (1 << 20, 32 << 20)
    assert config.worker.threads == 1
    assert (config.faults.non_finite, config.faults.lost_residual) == ("abort", "restart")


def test_a_tilde_is_the_home_folder_in_every_path(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h/me")
    keys = ("run.directory", "server.tokens", *(f"server.tls.{key}" for key in ("certificate", "key")))
    config = load(VALID, [f"{key}=~/{name}" for key, name in zip(keys, "abcd", strict=True)])
    tls = config.server.tls
    assert tls is not None
    found = (config.run.directory, config.server.tokens, tls.certificate, tls.key)
    assert found == tuple(Path("/h/me", name) for name in "abcd")


def test_a_section_whose_keys_are_all_commented_out_is_an_empty_one(load: Load) -> None:
    assert load(VALID + "evaluation:\n  # every: 7\nrun:\n") == load(VALID)


# What is written (a line of VALID, and what stands there instead), and what is said.
WRONG: list[tuple[str, str, str]] = [
    # numbers
    ("workers: 3", "workers: 0", problem("server.yaml:1: workers", "0", COUNT)),
    ("workers: 3", "workers: -3", problem("server.yaml:1: workers", "-3", COUNT)),
    ("workers: 3", "workers: 3.0", problem("server.yaml:1: workers", "3.0", COUNT)),
    ("workers: 3", "workers: 2147483648", problem("server.yaml:1: workers", "2147483648", COUNT)),
    ("workers: 3", 'workers: "3"', problem("server.yaml:1: workers", '"3"', COUNT, note=QUOTES)),
    ("workers: 3", "workers: 1_000", problem("server.yaml:1: workers", '"1_000"', COUNT)),
    ("workers: 3", "workers: true", problem("server.yaml:1: workers", "true", COUNT)),
    ("workers: 3", "workers: null", problem("server.yaml:1: workers", "null", COUNT)),
    ("workers: 3", "workers: [3]", problem("server.yaml:1: workers", "[3]", COUNT)),
    (
        "workers: 3",
        f"workers: {'9' * 5000}",
        problem("server.yaml:1: workers", f'"{"9" * 76}...', COUNT),
    ),
    ("workers: 3", "", problem("server.yaml:2: workers", "nothing", COUNT)),
    (
        "eta_w: 0.05",
        "eta_w: 0",
        problem("server.yaml:7: algorithm.eta_w", "0", "a number above 0 and at most 1e12, or theory"),
    ),
    (
        "eta_w: 0.05",
        "eta_w: 7e-46",
        problem(
            "server.yaml:7: algorithm.eta_w",
            "7e-46",
            "a number above 1e-45, since float32 rounds smaller ones to 0",
        ),
    ),
    (
        "eta_w: 0.05",
        "eta_w: .nan",
        problem("server.yaml:7: algorithm.eta_w", "NaN", "a number above 0 and at most 1e12, or theory"),
    ),
    (
        "eta_w: 0.05",
        'eta_w: ".05"',
        problem(
            "server.yaml:7: algorithm.eta_w",
            '".05"',
            "a number above 0 and at most 1e12, or theory",
            note=QUOTES,
        ),
    ),
    (
        "eta_w: 0.05",
        "eta_w: thoery",
        problem(
            "server.yaml:7: algorithm.eta_w",
            '"thoery"',
            "a number above 0 and at most 1e12, or theory",
            nearest="theory",
        ),
    ),
    (
        "eta_q: 0.1",
        "eta_q: -0.1",
        problem(
            "server.yaml:8: algorithm.eta_q", "-0.1", "a number from 0 to 1e12, theory, or null (not given)"
        ),
    ),
    (
        "rounds: 100",
        "rounds: 100\n  block: aut",
        problem("server.yaml:7: algorithm.block", '"aut"', f"{COUNT}, auto, or null (auto)", nearest="auto"),
    ),
    # words
    (
        "name: afl-com",
        "name: AFL_Com",
        problem("server.yaml:5: algorithm.name", '"AFL_Com"', ALGORITHM_NAMES, nearest="afl-com"),
    ),
    ("name: afl-com", "name: adam", problem("server.yaml:5: algorithm.name", '"adam"', ALGORITHM_NAMES)),
    ("name: digits", 'name: ""', problem("server.yaml:3: task.name", '""', "a name")),
    ("name: digits", "name: 7", problem("server.yaml:3: task.name", "7", "a name")),
    (
        "workers: 3",
        "workers: 3\nfaults: {non_finite: skipp}",
        problem("server.yaml:2: faults.non_finite", '"skipp"', "abort or skip", nearest="skip"),
    ),
    (
        "workers: 3",
        "workers: 3\nfaults: {stragglers: {policy: skip}}",
        problem("server.yaml:2: faults.stragglers.deadline", "nothing", "a duration; policy: skip needs it"),
    ),
    (
        "workers: 3",
        "workers: 3\nfaults: {stragglers: {deadline: 30s}}",
        problem("server.yaml:2: faults.stragglers.deadline", "30s", "no deadline; only policy: skip uses it"),
    ),
    (
        "workers: 3",
        "workers: 3\nfaults: {stragglers: {policy: wait, quorum: 0.8}}",
        problem("server.yaml:2: faults.stragglers.quorum", "0.8", "no quorum; only policy: skip uses it"),
    ),
    (
        "workers: 3",
        "workers: 3\nfaults: {stragglers: {policy: skip, deadline: 30s, quorum: 0}}",
        problem(
            "server.yaml:2: faults.stragglers.quorum", "0", "a number above 0 and at most 1, or null (0.5)"
        ),
    ),
    (
        "workers: 3",
        "workers: 3\nfaults: {divergence: {evaluations: 2}}",
        problem("server.yaml:2: faults.divergence.max_loss", "nothing", "a number above 0"),
    ),
    (
        "workers: 3",
        "workers: 3\nfaults: {lost_residual: refused}",
        problem("server.yaml:2: faults.lost_residual", '"refused"', "restart or refuse", nearest="refuse"),
    ),
    # booleans
    *[
        (
            "heartbeat: 10s",
            f"insecure: {word}",
            problem("server.yaml:10: server.insecure", shown, "true or false"),
        )
        for word, shown in [("yes", '"yes"'), ("On", '"On"'), ("1", "1")]
    ],
    (
        "heartbeat: 10s",
        'insecure: "true"',
        problem("server.yaml:10: server.insecure", '"true"', "true or false", note=QUOTES),
    ),
    # durations and sizes
    (
        "heartbeat: 10s",
        "heartbeat: 10 sec",
        problem(
            "server.yaml:10: server.heartbeat",
            '"10 sec"',
            f"{DURATION} from 10ms to 1h",
            note="the unit 'sec' is not ms, s, m or h",
        ),
    ),
    (
        "heartbeat: 10s",
        "heartbeat: 0",
        problem("server.yaml:10: server.heartbeat", "0", f"{DURATION} from 10ms to 1h"),
    ),
    (
        "heartbeat: 10s",
        "start_timeout: never",
        problem(
            "server.yaml:10: server.start_timeout",
            '"never"',
            f"{DURATION} from 10ms to 720h, or null (for ever)",
            note="for none, write null",
        ),
    ),
    (
        "heartbeat: 10s",
        "chunk_bytes: 17MiB",
        problem("server.yaml:10: server.chunk_bytes", '"17MiB"', f"{SIZE} from 4KiB to 16MiB"),
    ),
    (
        "heartbeat: 10s",
        "chunk_bytes: 1 M",
        problem(
            "server.yaml:10: server.chunk_bytes",
            '"1 M"',
            f"{SIZE} from 4KiB to 16MiB",
            note="the unit 'M' is not B, KiB, MiB, GiB, KB, MB or GB",
        ),
    ),
    # addresses
    (
        "heartbeat: 10s",
        "listen: ::1:50051",
        problem(
            "server.yaml:10: server.listen",
            '"::1:50051"',
            LISTEN,
            note="'::1:50051': an IPv6 address goes in brackets, before its port: [::1]:50051",
        ),
    ),
    (
        "heartbeat: 10s",
        "listen: 50051",
        problem("server.yaml:10: server.listen", "50051", LISTEN),
    ),
    (
        "heartbeat: 10s",
        "http: off",
        problem(
            "server.yaml:10: server.http", '"off"', f"{LISTEN}, or null (off)", note="for none, write null"
        ),
    ),
    (
        "heartbeat: 10s",
        "http: false",
        problem(
            "server.yaml:10: server.http", "false", f"{LISTEN}, or null (off)", note="for none, write null"
        ),
    ),
    # seeds and paths
    ("workers: 3", "workers: 3\nrun: {seed: -1}", problem("server.yaml:2: run.seed", "-1", SEED)),
    (
        "workers: 3",
        f"workers: 3\nrun: {{seed: {2**128}}}",
        problem("server.yaml:2: run.seed", str(2**128), SEED),
    ),
    (
        "workers: 3",
        "workers: 3\nrun: {seed: '0x'}",
        problem(
            "server.yaml:2: run.seed",
            '"0x"',
            SEED,
            note="as text, a seed is 0x and 1 to 32 hexadecimal digits",
        ),
    ),
    (
        "workers: 3",
        "workers: 3\nrun: {directory: 5}",
        problem("server.yaml:2: run.directory", "5", "a path, or null (runs/ and the run id)"),
    ),
    # sections
    (
        "name: digits",
        "name: digits\n  options: 3",
        problem("server.yaml:4: task.options", "3", "a section of any keys"),
    ),
    (
        "workers: 3",
        "workers: 3\nevaluation: 50",
        problem("server.yaml:2: evaluation", "50", "a section with every, rank_by, better, patience"),
    ),
    (
        "task:\n  name: digits",
        "task:",
        problem("server.yaml:2: task.name", "nothing", "a name"),
    ),
    (
        "task:\n  name: digits\n",
        "",
        problem(
            "server.yaml:1: task",
            "nothing",
            "a section with name, options, batch_size, evaluation_batch_size, held_out",
        ),
    ),
    # keys
    (
        "heartbeat: 10s",
        "hearbeat: 10s",
        problem(
            "server.yaml:10: server.hearbeat", '"10s", under an unknown key', SERVER_KEYS, nearest="heartbeat"
        ),
    ),
    (
        "heartbeat: 10s",
        "Peer-Timeout: 10s",
        problem(
            "server.yaml:10: server.Peer-Timeout",
            '"10s", under an unknown key',
            SERVER_KEYS,
            nearest="peer_timeout",
        ),
    ),
    (
        "heartbeat: 10s",
        "zzz: 1",
        problem("server.yaml:10: server.zzz", "1, under an unknown key", SERVER_KEYS),
    ),
    (
        "workers: 3",
        "workers: 3\nbatch-size: 4",
        problem("server.yaml:2: batch-size", "4, under an unknown key", ROOT_KEYS, nearest="task.batch_size"),
    ),
    (
        "heartbeat: 10s",
        "heartbeat: 10s\n  heartbeat: 20s",
        problem(
            "server.yaml:11: server.heartbeat",
            "a second value; the first is at server.yaml:10",
            "each key once in a section",
        ),
    ),
    # options of a task take any value, so that none may be ambiguous
    (
        "name: digits",
        "name: digits\n  options: {augment: On}",
        problem(
            "server.yaml:4: task.options.augment",
            "On, a boolean to some readers of YAML and text to others",
            'true or false, or "On" in quotes if the text is meant',
        ),
    ),
    (
        "name: digits",
        "name: digits\n  options:\n    flags:\n      - fine\n      - no",
        problem(
            "server.yaml:7: task.options.flags.1",
            "no, a boolean to some readers of YAML and text to others",
            'true or false, or "no" in quotes if the text is meant',
        ),
    ),
    (
        "name: digits",
        "name: digits\n  options: {limit: .inf}",
        problem("server.yaml:4: task.options.limit", "Infinity", OPTION),
    ),
    (
        "name: digits",
        "name: digits\n  options: {limits: [1, {deep: .NaN}]}",
        problem("server.yaml:4: task.options.limits", '[1, {"deep": NaN}]', OPTION),
    ),
    (
        "name: digits",
        'name: digits\n  options: {text: "\\ud800"}',
        problem(
            "server.yaml:4: task.options.text",
            '"\\ud800"',
            "text without halves of surrogate pairs (\\ud800 to \\udfff)",
        ),
    ),
    # what keys demand of each other
    (
        "eta_w: 0.05",
        "eta_w: theory",
        problem(
            "server.yaml:4: algorithm.smoothness",
            "nothing",
            "a number, the smoothness constant L; eta_w: theory needs it",
        ),
    ),
    (
        "eta_q: 0.1",
        "eta_q: theory",
        problem(
            "server.yaml:4: algorithm.sigma_q",
            "nothing",
            "a number, the sub-Gaussian parameter of the loss; eta_q: theory needs it",
        ),
    ),
    (
        "eta_q: 0.1",
        "eta_q: 0.1\n  smoothness: 2",
        problem("server.yaml:9: algorithm.smoothness", "2", "no smoothness; only eta_w: theory uses it"),
    ),
    (
        "eta_q: 0.1",
        "eta_q: 0.1\n  sigma_q: 2",
        problem("server.yaml:9: algorithm.sigma_q", "2", "no sigma_q; only eta_q: theory uses it"),
    ),
    (
        "heartbeat: 10s",
        "heartbeat: 10s\n  peer_timeout: 19s",
        problem(
            "server.yaml:11: server.peer_timeout",
            "19s",
            "at least twice server.heartbeat (10s), so that one late heartbeat ends no session",
        ),
    ),
    (
        "heartbeat: 10s",
        "heartbeat: 31s",
        problem(
            "server.yaml:9: server.peer_timeout",
            "60s",
            "at least twice server.heartbeat (31s), so that one late heartbeat ends no session",
        ),
    ),
    (
        "heartbeat: 10s",
        "reorder_buffer: 512KiB",
        problem("server.yaml:10: server.reorder_buffer", "512KiB", "at least server.chunk_bytes (1MiB)"),
    ),
    *[
        (
            "heartbeat: 10s",
            f"listen: {listen}\n  http: '{http}'",
            problem(
                "server.yaml:11: server.http",
                http,
                f"an address other than server.listen ({listen}), or null (off)",
            ),
        )
        for listen, http in [
            ("127.0.0.1:9090", "127.0.0.1:9090"),
            ("0.0.0.0:9090", "127.0.0.1:9090"),
            ("127.0.0.1:9090", "[::]:9090"),
        ]
    ],
    # compressors
    *[
        (
            "name: afl-com",
            f"name: afl-br\n  {direction}: {{name: identity}}",
            problem(
                f"server.yaml:6: algorithm.{direction}",
                '{"name": "identity"}',
                f"no {direction}; afl-br does not compress; use afl-com",
            ),
        )
        for direction in ("uplink", "downlink")
    ],
    (
        "name: afl-com",
        "name: afl-com\n  uplink:\n    name: randk",
        problem("server.yaml:7: algorithm.uplink.name", '"randk"', INSTALLED, nearest="rand-k"),
    ),
    (
        "name: afl-com",
        "name: afl-com\n  uplink:\n    name: rand-k",
        problem(
            "server.yaml:6: algorithm.uplink.ratio",
            "nothing, and rand-k needs it",
            RATIO,
        ),
    ),
    *[
        (
            "name: afl-com",
            f"name: afl-com\n  downlink:\n    name: top-k\n    ratio: {ratio}",
            problem("server.yaml:8: algorithm.downlink.ratio", shown, RATIO),
        )
        for ratio, shown in [
            ("0", "0"),
            ("1.01", "1.01"),
            ("'.3'", '".3"'),
            ("true", "true"),
            (".nan", "NaN"),
        ]
    ],
    (
        "name: afl-com",
        "name: afl-com\n  uplink: {ratio: 0.5}",
        problem(
            "server.yaml:6: algorithm.uplink.ratio",
            "0.5, under a key that identity does not take",
            "only name and bits with identity",
        ),
    ),
    (
        "name: afl-com",
        "name: afl-com\n  uplink: {name: top-k, ratio: 1, rati: 0.5}",
        problem(
            "server.yaml:6: algorithm.uplink.rati",
            "0.5, under a key that top-k does not take",
            "only name and ratio with top-k",
            nearest="ratio",
        ),
    ),
    *[
        (
            "name: afl-com",
            f"name: afl-com\n  uplink: {{name: rand-k, ratio: 0.1, bits: {written}}}",
            problem("server.yaml:6: algorithm.uplink.bits", shown, BITS),
        )
        for written, shown in [
            ("1", "1"),
            ("25", "25"),
            ("33", "33"),
            ("true", "true"),
            ("4.0", "4.0"),
            ("null", "null"),
        ]
    ],
    (
        "name: afl-com",
        "name: afl-com\n  uplink: {bits: '4'}",
        problem(
            "server.yaml:6: algorithm.uplink.bits",
            '"4"',
            BITS,
            note="the quotes make it text; leave them out",
        ),
    ),
    *[
        (
            "name: afl-com",
            f"name: afl-com\n  uplink: {{name: {options}, bits: 4}}",
            problem(
                "server.yaml:6: algorithm.uplink.bits",
                f"4, under a key that {name} does not take",
                f"only {taken} with {name}",
                note="integers are for compressors whose messages add up to one of the same form: identity, "
                "rand-k, projection, dct-projection, or an additive one of your own",
            ),
        )
        for name, options, taken in [
            ("top-k", "top-k, ratio: 0.1", "name and ratio"),
            ("scaled-sign", "scaled-sign", "name"),
        ]
    ],
    *[
        (
            "name: afl-com",
            f"name: afl-com\n  uplink: {{name: rand-k, ratio: 0.1, bits: 4}}\n  downlink: {written}",
            problem(
                "server.yaml:7: algorithm.downlink",
                shown,
                "no downlink, or the same as uplink: with bits up, the sum of the integers goes down",
            ),
        )
        for written, shown in [
            ("{name: identity}", '{"name": "identity"}'),
            ("{name: rand-k, ratio: 0.1}", '{"name": "rand-k", "ratio": 0.1}'),
            ("{name: rand-k, ratio: 0.1, bits: 5}", '{"name": "rand-k", "ratio": 0.1, "bits": 5}'),
        ]
    ],
    (
        "name: afl-com",
        "name: afl-com\n  uplink: top-k",
        problem(
            "server.yaml:6: algorithm.uplink",
            '"top-k"',
            "a section with name and the compressor's options, or null (identity)",
        ),
    ),
    # variables
    (
        "workers: 3",
        "workers: ${WORKERS}",
        problem(
            "server.yaml:1: workers",
            "${WORKERS}, and WORKERS is not set",
            "WORKERS set in the environment, or ${WORKERS:-default}",
        ),
    ),
    (
        "workers: 3",
        "workers: ${NONE:-0}",
        problem("server.yaml:1: workers", "0", COUNT, note="filled in from ${NONE:-0}"),
    ),
    (
        "name: digits",
        "name: ${TWO WORDS}",
        problem(
            "server.yaml:3: task.name",
            '"${TWO WORDS}"',
            "${NAME} or ${NAME:-default}; $${ stands for the two characters themselves",
        ),
    ),
]


@pytest.mark.parametrize(("written", "instead", "expected"), WRONG)
def test_one_mistake_is_one_problem(problems: Problems, written: str, instead: str, expected: str) -> None:
    assert VALID.count(written) == 1
    assert problems(VALID.replace(written, instead)) == [expected]


# Files of which nothing can be made.
AT_THE_TOP = (
    "sections and keys: workers, sites, task, algorithm, evaluation, run, server, worker, faults, privacy"
)
YAML = "YAML: a 'key: value' a line, sections indented by spaces, text with : # { [ & * ! % @ in quotes"


TAB = (
    "at column 1: a tab, where YAML takes spaces only (while scanning for the next token; found "
    "character '\\t' that cannot start any token)"
)
UNFINISHED = "while parsing a flow node; expected the node content, but found '<stream end>'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", problem("server.yaml", "an empty file", AT_THE_TOP)),
        ("# nothing\n", problem("server.yaml", "an empty file", AT_THE_TOP)),
        ("\n- 3\n", problem("server.yaml:2", "[3] at the top", AT_THE_TOP)),
        ("workers", problem("server.yaml:1", '"workers" at the top', AT_THE_TOP)),
        (
            "workers: 3\ntask: {name: a",
            problem(
                "server.yaml:2",
                "at column 15: while parsing a flow mapping; expected ',' or '}', but got '<stream end>'",
                YAML,
            ),
        ),
        (
            "workers 3\ntask: {}",
            problem(
                "server.yaml:2",
                "at column 5: a second colon, or a line indented under a value, or no colon in the line "
                "before (mapping values are not allowed here)",
                YAML,
            ),
        ),
        (
            "run: {directory: ${NAME}}",
            problem(
                "server.yaml:1",
                "at column 19: ${...} between { } or [ ], where it must be in quotes (while parsing a flow "
                "mapping; expected ',' or '}', but got '{')",
                YAML,
            ),
        ),
        (
            "task:\n\tname: a",
            problem(
                "server.yaml:2",
                TAB,
                YAML,
            ),
        ),
        ("a: \x07", problem("server.yaml:1", "the character U+0007", "printable text")),
        (
            "a: 1\n---\nb: 1",
            problem("server.yaml:2", "a second document", "one document, without a further ---"),
        ),
        (
            "a: 1\nb: !!python/object:os.system {}",
            problem(
                "server.yaml:2",
                "the tag tag:yaml.org,2002:python/object:os.system",
                "values without tags (nothing that starts with !)",
            ),
        ),
        ("a: 1\n[1, 2]: 3", problem("server.yaml:2", "a list or a mapping as a key", "keys that are text")),
        (
            "a: &x {b: 1}\nc:\n  <<: *x",
            problem(
                "server.yaml:3",
                "the merge key <<",
                "each key written out, or a whole section as an alias",
            ),
        ),
        (
            "a: *x",
            problem("server.yaml:1", "*x, with no &x that ended before it", "an alias of an earlier value"),
        ),
        (
            "a: &x [*x]",
            problem("server.yaml:1", "*x, with no &x that ended before it", "an alias of an earlier value"),
        ),
        ("a: " + "[" * 100_000, problem("server.yaml:1", "values nested 33 deep", "at most 32 levels")),
        ("a: " + "{b: " * 100, problem("server.yaml:1", "values nested 33 deep", "at most 32 levels")),
        ("#" * 300_000, problem("server.yaml", "300,000 characters", "at most 262,144")),
        (
            "#" * 2_000_000,
            problem("server.yaml", "more than 1,048,576 bytes", "at most 262,144 characters"),
        ),
        (
            "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
            problem("server.yaml:1", "more than 10,000 values, aliases expanded", "at most 10,000"),
        ),
        (
            "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 40)),
            problem("server.yaml:1", "values nested 33 deep", "at most 32 levels"),
        ),
    ],
)
def test_a_text_that_is_no_configuration(problems: Problems, text: str, expected: str) -> None:
    assert problems(text) == [expected]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").touch()
    path = tmp_path / "servr.yaml"
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path)
    expected = problem(str(path), "no such file", "a YAML file", note=f"{tmp_path} holds server.yaml")
    assert str(caught.value) == f"{path} cannot be used: 1 problem\n\n{expected}"
    with pytest.raises(ConfigError) as elsewhere:
        load_config(tmp_path / "nowhere" / "x.yaml")
    assert "note" not in str(elsewhere.value)
    assert elsewhere.value.exit_code is ExitCode.CONFIG


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_config(tmp_path)
    assert [str(p) for p in caught.value.problems] == [problem(str(tmp_path), "a directory", "a YAML file")]


@pytest.mark.timeout(20)
def test_a_fifo_is_read_once_somebody_writes_to_it_and_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell makes one of `--config <(command)`."""
    path = tmp_path / "server.yaml"
    os.mkfifo(path)
    writer = threading.Timer(0.2, path.write_text, ["workers: none"])
    writer.start()
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path)
    writer.join()
    assert any("none" in str(each) for each in caught.value.problems)
    monkeypatch.setattr(paths, "FIFO_WAIT_S", 0.1)
    with pytest.raises(InvalidConfigError, match=r"a FIFO, and nobody has written to it for 0\.1 s"):
        load_config(path)


def test_a_path_that_is_none() -> None:
    with pytest.raises(InvalidConfigError, match=r"a file that cannot be read \(.*null"):
        load_config("a\0b")


def test_a_file_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InvalidConfigError, match=r"a file that cannot be read \(Permission denied\)"):
        load_config("server.yaml")


def test_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_bytes(VALID.encode() + "run: {directory: läufe}".encode("latin-1"))
    with pytest.raises(InvalidConfigError) as caught:
        load_config(path)
    expected = problem(f"{path}:11", "the byte 0xe4, which is not UTF-8", "text in UTF-8")
    assert [str(p) for p in caught.value.problems] == [expected]


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path, load: Load) -> None:
    path = tmp_path / "marked.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + VALID.encode())
    assert load_config(path) == load(VALID)


def test_all_problems_are_shown_at_once_in_the_order_of_the_file(problems: Problems) -> None:
    text = """\
workers: none
task: {name: digits, batchsize: 8}
algorithm:
  name: afl-br
  rounds: 0
  eta_w: theory
  uplink: {name: top-k}
  setting: 1
server:
  heartbeat: 1m
  listen: silo
"""
    shown = problems(text, ["run.seed=-1", "worker.threads=0"])
    assert [one.splitlines()[0] for one in shown] == [
        "server.yaml:1: workers",
        "server.yaml:2: task.batchsize",
        "server.yaml:3: algorithm.eta_q",
        "server.yaml:3: algorithm.smoothness",
        "server.yaml:5: algorithm.rounds",
        "server.yaml:7: algorithm.uplink",
        "server.yaml:8: algorithm.setting",
        "server.yaml:9: server.peer_timeout",
        "server.yaml:11: server.listen",
        "--set run.seed=-1: run.seed",
        "--set worker.threads=0: worker.threads",
    ]


class TestNumbersAsTheyAreWritten:
    @pytest.mark.parametrize(
        ("text", "value"),
        [("1e-3", 0.001), (".3", 0.3), ("3.", 3.0), ("+2E2", 200.0), ("2", 2.0), ("0.05", 0.05)],
    )
    def test_a_number(self, load: Load, text: str, value: float) -> None:
        assert load(VALID, [f"algorithm.eta_w={text}"]).algorithm.eta_w == value

    @pytest.mark.parametrize(("text", "value"), [("010", 10), ("0x1F", 31), ("0o17", 15), ("+7", 7)])
    def test_a_whole_number(self, load: Load, text: str, value: int) -> None:
        assert load(VALID, [f"workers={text}"]).workers == value

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("1:30", "1:30"),
            ("2024-01-01", "2024-01-01"),
            ("y", "y"),
            ("True", True),
            ("~", None),
            ("NULL", None),
            ("'no'", "no"),
            ("1.2.3", "1.2.3"),
            ("0x", "0x"),
            ("{1: 2, on: [a, 'b']}", {"1": 2, "on": ["a", "b"]}),
        ],
    )
    def test_anything_in_a_task_s_options(self, load: Load, text: str, value: object) -> None:
        assert load(VALID, [f"task.options.x={text}"]).task.options == {"x": value}

    @pytest.mark.parametrize(
        "text",
        ["0", "0x0", "340282366920938463463374607431768211455", "'0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF'"],
    )
    def test_a_seed(self, load: Load, text: str) -> None:
        assert load(VALID, [f"run.seed={text}"]).run.seed in {0, 2**128 - 1}


class TestVariables:
    def test_an_unquoted_value_is_typed_after_it_is_filled_in(self, load: Load) -> None:
        text = VALID.replace("workers: 3", "workers: ${M}").replace("eta_w: 0.05", "eta_w: ${A}e-${B}")
        config = load(text, environment={"M": "12", "A": "5", "B": "2"})
        assert (config.workers, config.algorithm.eta_w) == (12, 0.05)

    def test_a_quoted_value_stays_text(self, load: Load) -> None:
        options = load(VALID, ['task.options={a: "${N}"}'], {"N": "1"}).task.options
        assert options == {"a": "1"}

    @pytest.mark.parametrize(
        ("environment", "expected"),
        [({}, "fallback:1"), ({"HOST": ""}, "fallback:1"), ({"HOST": "silo"}, "silo:1")],
    )
    def test_a_default_stands_in_for_what_is_unset_or_empty(
        self, load: Load, environment: dict[str, str], expected: str
    ) -> None:
        assert str(load(VALID, ["server.listen=${HOST:-fallback}:1"], environment).server.listen) == expected

    def test_an_empty_default_is_null(self, load: Load) -> None:
        assert load(VALID, ["run.directory=${DIR:-}"]).run.directory is None

    def test_what_is_filled_in_is_not_filled_in_again(self, load: Load) -> None:
        options = load(VALID, ["task.options.x=${A}"], {"A": "${B}", "B": "no"}).task.options
        assert options == {"x": "${B}"}

    def test_two_dollars_stand_for_the_text(self, load: Load) -> None:
        assert load(VALID, ["task.options.x=$${A} costs $5"]).task.options == {"x": "${A} costs $5"}

    def test_the_process_s_environment_is_used(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "server.yaml"
        path.write_text(VALID.replace("workers: 3", "workers: ${AFL_TEST_WORKERS}"))
        monkeypatch.setenv("AFL_TEST_WORKERS", "17")
        assert load_config(path).workers == 17

    def test_an_ambiguous_word_filled_in_is_refused_too(self, problems: Problems) -> None:
        assert problems(VALID, ["task.options.x=${A}"], {"A": "off"}) == [
            problem(
                "--set task.options.x=${A}: task.options.x",
                "off, a boolean to some readers of YAML and text to others",
                'true or false, or "off" in quotes if the text is meant',
                note="filled in from ${A}",
            )
        ]


class TestOverrides:
    def test_a_value_a_section_and_what_is_not_in_the_file(self, load: Load) -> None:
        config = load(
            VALID,
            [
                "algorithm.rounds=7",
                "algorithm.uplink={name: top-k, ratio: 0.5}",
                "algorithm.uplink.ratio=0.25",
                "evaluation.every=2",
                "run.seed=0x10",
                "server.http=",
            ],
        )
        assert config.algorithm.rounds == 7
        assert config.algorithm.uplink_compressor.options == {"ratio": 0.25}
        assert (config.evaluation.every, config.run.seed, config.server.http) == (2, 16, None)

    def test_a_later_one_wins(self, load: Load) -> None:
        assert load(VALID, ["workers=1", "workers=2"]).workers == 2

    def test_the_value_may_hold_an_equals_sign(self, load: Load) -> None:
        assert load(VALID, ["task.options.x=a=b"]).task.options == {"x": "a=b"}

    def test_it_mends_a_mistake_of_the_file(self, load: Load) -> None:
        text = VALID.replace("workers: 3", "workers: ${M}").replace("rounds: 100", "rounds: zero")
        text += "  heartbeat: 20s\n"
        assert load(text, ["workers=2", "algorithm.rounds=5", "server.heartbeat=20s"]).workers == 2

    @pytest.mark.parametrize("listen", re.findall(r"(\S*:50051'?)(?: |,)", LISTEN))
    def test_an_address_of_the_help_is_one_in_a_file_and_in_a_shell(self, load: Load, listen: str) -> None:
        text = f"{VALID}  insecure: true\n"
        in_file = load(f"{text}  listen: {listen}\n").server.listen
        (typed,) = shlex.split(f"server.listen={listen}")
        assert load(text, [typed]).server.listen == in_file

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("server.listen=[::1]:50099", "[::1]:50099"),
            ("server.listen='[::1]:50099'", "[::1]:50099"),
            ("server.listen=[::1]:${PORT}", "[::1]:7"),
            ("server.listen=*:50099", "[::]:50099"),
            ("server.http=${HTTP}", "None"),
            ("server.http=null", "None"),
            ("run.description=Sites: A, B #1", "Sites: A, B #1"),
            ("run.description={three} sites", "{three} sites"),
            ('run.description="Sites: A"', "Sites: A"),
            ("run.directory=@runs", "@runs"),
        ],
    )
    def test_text_needs_no_quotes_but_the_shell_s(self, load: Load, override: str, expected: str) -> None:
        environment = {"PORT": "7", "HTTP": "null"}
        config = load(VALID, [override, "server.insecure=true"], environment)
        section, _, key = override.partition("=")[0].partition(".")
        assert str(getattr(getattr(config, section), key)) == expected

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("workers=0", problem("--set workers=0: workers", "0", COUNT)),
            (
                "workrs=4",
                problem("--set workrs=4: workrs", "4, under an unknown key", ROOT_KEYS, nearest="workers"),
            ),
            (
                "algorithm.uplink={name: top-k, ratio: 3}",
                problem(
                    "--set algorithm.uplink={name: top-k, ratio: 3}: algorithm.uplink.ratio",
                    "3",
                    RATIO,
                ),
            ),
            (
                "algorithm=3",
                problem(
                    "--set algorithm=3: algorithm", "3", "a section with " + ALGORITHM_KEYS[len("one of ") :]
                ),
            ),
            ("workers", problem("--set workers", '"workers"', "key=value, such as algorithm.rounds=100")),
            ("=3", problem("--set =3", '"=3"', "key=value, such as algorithm.rounds=100")),
            ("a..b=3", problem("--set a..b=3", '"a..b=3"', "key=value, such as algorithm.rounds=100")),
            (
                "workers.x=3",
                problem(
                    "--set workers.x=3: workers.x",
                    "3 at workers, which is no section",
                    "a key inside a section, or --set workers=...",
                ),
            ),
            (
                "workers=[",
                problem(
                    "--set workers=[: workers",
                    "at column 2: " + UNFINISHED,
                    YAML,
                ),
            ),
            (
                "workers=${M}",
                problem(
                    "--set workers=${M}: workers",
                    "${M}, and M is not set",
                    "M set in the environment, or ${M:-default}",
                ),
            ),
            (
                "evaluation={every: 1, every: 2}",
                problem(
                    "--set evaluation={every: 1, every: 2}: evaluation.every",
                    "a second value; the first is at --set evaluation={every: 1, every: 2}",
                    "each key once in a section",
                ),
            ),
        ],
    )
    def test_a_mistake_names_it(self, problems: Problems, override: str, expected: str) -> None:
        assert problems(VALID, [override]) == [expected]


class TestPlainValues:
    def test_they_are_checked_in_the_same_way(self, load: Load) -> None:
        values = {
            "workers": 3,
            "task": {"name": "digits"},
            "algorithm": {"name": "afl-com", "rounds": 100, "eta_w": 0.05, "eta_q": 0.1},
        }
        assert config_from_mapping(values) == load(VALID)
        with pytest.raises(InvalidConfigError) as caught:
            config_from_mapping(values | {"workers": 0}, "the demo")
        assert str(caught.value) == f"the demo cannot be used: 1 problem\n\n{problem('workers', '0', COUNT)}"

    def test_a_model_made_by_hand_obeys_the_rules_too(self, load: Load) -> None:
        config = load(VALID)
        with pytest.raises(ValueError, match="only eta_w: theory uses it"):
            type(config.algorithm)(name="afl-br", rounds=1, eta_w=1.0, eta_q=1.0, smoothness=1.0)
        with pytest.raises(ValueError, match=r"at least server\.chunk_bytes"):
            type(config.server).model_validate({"reorder_buffer": "4KiB"})

    def test_they_cannot_be_changed(self, load: Load) -> None:
        config = load(VALID)
        with pytest.raises(ValueError, match="frozen"):
            config.workers = 4  # type: ignore[misc]


class TestCompressorsOfOthers:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def found(*, group: str) -> list[EntryPoint]:
            assert group == "afl.compressors"
            own = {"power-sgd": "elsewhere:PowerSgd", "new": "afl.core.compressors.new:New"}
            return [*entry_points(group=group), *(EntryPoint(*one, group) for one in own.items())]

        monkeypatch.setattr(compressors, "entry_points", found)

    @pytest.mark.parametrize("name", ["power-sgd", "new"])
    def test_their_options_are_theirs_to_check(self, load: Load, name: str) -> None:
        config = load(VALID, [f"algorithm.uplink={{name: {name}, rank: 4, ratio: 17}}"])
        assert config.algorithm.uplink_compressor.name == name
        assert config.algorithm.uplink_compressor.options == {"rank": 4, "ratio": 17}

    def test_their_names_are_offered(self) -> None:
        with pytest.raises(InvalidConfigError) as caught:
            compressors.check_compressor("powersgd", {})
        assert str(caught.value) == "compressor powersgd cannot be used: 1 problem\n\n" + problem(
            "name",
            '"powersgd"',
            "an installed compressor: " + ", ".join(sorted([*compressor_names(), "power-sgd", "new"])),
            nearest="power-sgd",
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("identity", {}),
        ("scaled-sign", {}),
        ("top-k", {"ratio": 1}),
        ("rand-k", {"ratio": 1e-9}),
        ("projection", {"ratio": 0.5}),
        ("dct-projection", {"ratio": "theory"}),
    ],
)
def test_the_built_in_compressors_take_their_options(name: str, options: dict[str, Any]) -> None:
    compressors.check_compressor(name, options)


@pytest.mark.parametrize("value", ["tensorboard", "[tensorboard, tensorboard]", "[3]", "['']"])
def test_trackers_are_a_list_of_names_each_once(value: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "workers: 1\ntask: {name: digits}\nalgorithm: {name: afl-br, rounds: 1, eta_w: 1.0, eta_q: 0.0}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(path, [f"run.trackers={value}"])
    assert "run.trackers" in str(raised.value)
    assert "a list of names, each once" in str(raised.value)
