"""``afl demo``: what it would run, what it says when something fails, and one real demo."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from afl.config import config_from_mapping, load_config
from afl.errors import AflError, ConfigError
from afl_cli.federation import demo
from afl_cli.federation.children import Children
from afl_cli.federation.local import failure_of
from afl_cli.federation.peers import by_certificates
from afl_cli.federation.plan import setting
from afl_cli.main import main, make_afl_parser
from afl_worker.main import make_worker_parser, worker_options


def options(*arguments: str) -> argparse.Namespace:
    return make_afl_parser().parse_args(["demo", *arguments])


def test_every_worker_is_hosted_once() -> None:
    for workers in range(1, 13):
        for processes in range(1, workers + 1):
            groups = demo.checked_groups(options("--workers", str(workers), "--processes", str(processes)))
            assert [worker for group in groups for worker in group] == list(range(workers))
            assert len(groups) == processes
            sizes = [len(group) for group in groups]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("compressor", ["rand-k", "top-k", "identity"])
@pytest.mark.parametrize("rounds", ["1", "150"])
def test_the_configuration_is_valid(compressor: str, rounds: str) -> None:
    chosen = options("--compressor", compressor, "--rounds", rounds)
    config = config_from_mapping(demo.configuration(chosen))
    assert config.algorithm.rounds == int(rounds)
    assert config.algorithm.uplink_compressor.name == compressor
    assert config.server.listen.is_loopback
    assert config.server.listen.port == 0


@pytest.mark.parametrize("compressor", ["rand-k", "identity"])
def test_a_private_demo_masks_and_hides_all(compressor: str, tmp_path: Path) -> None:
    chosen = options("--compressor", compressor, "--private")
    groups = demo.checked_groups(chosen)
    tls, own = by_certificates(tmp_path, groups)
    config = config_from_mapping(demo.configuration(chosen, tls))
    assert config.privacy.secure_aggregation
    assert config.privacy.losses == "hidden"
    assert config.algorithm.uplink_compressor.options["bits"] == 16
    assert config.server.tls is not None
    assert config.server.tls.client_ca is not None
    assert set(own) == set(groups)
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    for arguments in own.values():
        # As the worker itself reads them.
        worker_options(make_worker_parser().parse_args(["--id", "0", "--server", "127.0.0.1:1", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "2"], "at least 3"),
        (["--processes", "2"], "at least 3"),
        (["--compressor", "top-k"], "rand-k or identity"),
    ],
)
def test_what_hides_nothing_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--private", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "0"],
        ["--workers", "51"],
        ["--rounds", "0"],
        ["--processes", "11"],
        ["--processes", "0"],
        ["--seed", "-1"],
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_directory_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").touch()
    assert main(["demo", "--keep", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"afl\[tasks\]"):
        demo.checked_groups(options())


def _module(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return name


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules children can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_childs_log_is_kept_and_followed(on_path: Path) -> None:
    module = _module(
        on_path,
        "chatty",
        "import sys\n"
        'print(\'{"event": "hello", "message": "hi", "level": "info"}\', file=sys.stderr)\n'
        "print('plain words', file=sys.stderr)\n"
        "sys.exit(7)\n",
    )
    with Children() as children:
        child = children.start("chatty", module, [], on_path / "log")
        events = [children.next_event(timeout=30), children.next_event(timeout=30)]
        assert [event.name for event in events if event is not None] == ["hello", ""]
        assert child.wait() == 7
        failure = failure_of(child)
    assert failure.exit_code == 7
    for said in ("chatty", "exit code 7", "info: hi", "plain words", str(on_path / "log")):
        assert said in str(failure)
    assert (on_path / "log").read_text().endswith("plain words\n")


@pytest.mark.long
def test_a_real_private_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "kept"
    arguments = ["--private", "--workers", "4", "--processes", "3", "--rounds", "6", "--keep", str(directory)]
    assert main(["demo", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "the server learns their sums" in shown
    assert f"afl capture {directory}/sent-by-0" in shown
    for log in directory.glob("workers-*.log"):
        assert '"event": "keys_agreed"' in log.read_text()
        assert '"event": "peers_unchecked"' not in log.read_text()
    assert main(["capture", str(directory / "sent-by-0"), "--losses", "hidden"]) == 0


SLEEPER = "import time\ntime.sleep(600)\n"

STUBBORN = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    'print(\'{"event": "up"}\', file=sys.stderr, flush=True)\n'
    "time.sleep(600)\n"
)


def test_a_child_that_will_not_end_is_killed(on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afl_cli.federation.children.END_GRACE_S", 0.2)
    module = _module(on_path, "stubborn", STUBBORN)
    with Children() as children:
        child = children.start("stubborn", module, [], on_path / "log")
        event = children.next_event(timeout=30)
        assert event is not None
        assert event.name == "up"
    assert child.process.returncode == -signal.SIGKILL


def test_a_signal_is_an_event(on_path: Path) -> None:
    module = _module(on_path, "sleeper", SLEEPER)
    before = signal.getsignal(signal.SIGTERM)
    with Children() as children:
        os.kill(os.getpid(), signal.SIGTERM)
        child = children.start("sleeper", module, [], on_path / "log")
        with pytest.raises(KeyboardInterrupt):
            children.next_event(timeout=30)
    assert child.process.returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def _fail_with_a_child(children: Children, folder: Path) -> None:
    with children:
        children.start("sleeper", _module(folder, "sleeper", SLEEPER), [], folder / "log")
        raise AflError("broken")


def test_children_end_when_their_command_fails(on_path: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(AflError, match="broken"):
        _fail_with_a_child(Children(), on_path)
    assert psutil.Process().children() == before


def test_a_real_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Uncompressed, so that what was sent is what uncompressed training sends."""
    directory = tmp_path / "kept ${HOME}"
    arguments = ["--workers", "3", "--processes", "2", "--rounds", "6", "--compressor", "identity"]
    assert main(["demo", *arguments, "--keep", str(directory)]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "3 workers hold handwritten digits",
        "worst worker, at the start",
        "worst worker, at the end",
        "1.0 times",
        "plain averaging (FedAvg)",
        "afl inspect",
    ):
        assert expected in shown
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["rounds"] == 6
    sent = sum(direction["wire_bytes"] for direction in summary["communication"].values())
    assert sent == summary["uncompressed_bytes"]
    assert (directory / "model-final.safetensors").is_file()
    assert (directory / "workers-0.log").is_file()
    assert (directory / "workers-1-2.log").is_file()
    assert main(["inspect", str(directory)]) == 0


@pytest.fixture
def heeded_sigint() -> Iterator[None]:
    """A job in the background has SIGINT ignored, and its children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def both_children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The demo's server and its worker process, once they are there."""
    deadline = time.monotonic() + 90
    children: list[psutil.Process] = []
    while len(children) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
        children = psutil.Process(process.pid).children()
    return children


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted_it_leaves_no_process(
    number: signal.Signals, tmp_path: Path, heeded_sigint: None
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "afl_cli", "demo", "--workers", "2", "--processes", "1"]
    with subprocess.Popen(
        [*command, "--rounds", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        children = both_children(process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert b"interrupted" in errors
    assert not any(child.is_running() for child in children)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
def test_killed_it_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "afl_cli", "demo", "--workers", "2", "--processes", "1"]
    with subprocess.Popen(
        [*command, "--rounds", "100000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=tmp_path,
    ) as process:
        children = both_children(process)
        process.send_signal(number)
        assert process.wait(30) == -number
    left = psutil.wait_procs(children, timeout=30)[1]
    for child in left:
        child.kill()
    assert not left


@pytest.mark.parametrize("directory", ["runs/Zürich 🎿", "runs/a: b #2", "runs/${HOME}", 'runs/"x"'])
def test_any_name_of_a_directory_reaches_the_server(directory: str, tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(
        "{workers: 1, task: {name: digits}, algorithm: {name: afl-br, rounds: 1, eta_w: 1, eta_q: 1}}"
    )
    _, override = setting("run.directory", directory)
    assert load_config(config, [override]).run.directory == Path(directory)
