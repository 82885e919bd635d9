"""How commands begin: cheap checks before large imports, interrupts at any moment, outputs that are "
"closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from afl.errors import ExitCode

CHECKED = """
import sys
from {module} import main
code = main({arguments!r})
assert "torch" not in sys.modules, "a wrong option took the time of importing PyTorch"
sys.exit(code)
"""


def worker(*options: str) -> tuple[str, tuple[str, ...]]:
    return "afl_worker.main", ("--id", "0", "--server", "127.0.0.1:1", *options)


def server(*options: str) -> tuple[str, tuple[str, ...]]:
    return "afl_server.main", options


CONFIG = """
workers: 1
task: {name: synthetic}
algorithm: {name: afl-br, rounds: 1, eta_w: 0.1, eta_q: 0.1}
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            worker("--give-up-after", "5"),
            "--give-up-after: '5' needs a unit: ms, s, m or h; write for example",
        ),
        (worker("--id", "0-9999999999"), "one process hosts at most 65536 of them; start several"),
        (worker("--id", "٣"), "--id ٣: '٣' is no worker id; write 3, 0-9 or 3,7"),
        (worker("--id", "1,0-1"), "--id 1,0-1: worker 1 is named twice; name each once"),
        (worker("--http", "here"), "--http: 'here' has no port"),
        (worker("--task-option", "x=["), "--task-option x=[: the value is not YAML; put it in quotes"),
        (worker("--ca", "nowhere.pem"), "--ca nowhere.pem cannot be read"),
        (server("--config", "nowhere.yaml"), "nowhere.yaml cannot be used"),
        (server("--resume", "nowhere"), "(no folder nowhere/state); give the run.directory of one that was"),
        (
            server("--config", "c.yaml", "--set", "server.listen=:5"),
            "server.listen: [::]:5 is reachable from",
        ),
        (server("--config", "c.yaml", "--set", "server.tokens=no"), "server.tokens no cannot be read"),
    ],
)
def test_a_wrong_option_is_said_before_pytorch_is_imported(
    command: tuple[str, tuple[str, ...]], said: str, tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    module, arguments = command
    program = CHECKED.format(module=module, arguments=list(arguments))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert said in done.stderr
    assert done.returncode == ExitCode.CONFIG, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_the_middle_of_an_import_ends_the_command_in_a_line(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)\n")
    program = (
        "import sys; from afl.terminal.entry import enter; sys.exit(enter('slow', 'slow', needs_linux=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, error = process.communicate()
    assert (process.returncode, error) == (ExitCode.INTERRUPTED, "interrupted\n")


@pytest.mark.parametrize("begins", ["enter('lost', 'lost', needs_linux=True)", "main(arguments)"])
def test_an_interrupt_ends_a_process_whose_standard_error_nobody_reads(begins: str, tmp_path: Path) -> None:
    """Libraries try imports, and go on after whatever error: one of the line that cannot be written, too."""
    (tmp_path / "lost.py").write_text("""
import os, signal
try:
    os.kill(os.getpid(), signal.SIGTERM)
except Exception:
    pass

def main():
    return 0
""")
    # The worker's own handler, which begins before the import of PyTorch.
    (tmp_path / "torch.py").write_text("import lost\nraise SystemExit(0)\n")
    program = f"""
import os, sys
from afl.terminal.entry import enter
from afl_worker.main import main
arguments = ["--id", "0", "--server", "127.0.0.1:1"]
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 2)
sys.exit({begins})
"""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, timeout=60, check=False
    )
    assert done.returncode == ExitCode.INTERRUPTED


FINALIZED = """
import os, signal, sys, time, weakref
from afl.terminal.entry import enter

class Watched:
    pass

def end():
    watched = Watched()
    seen = weakref.ref(watched, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del watched
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("main = end\nsys.exit(enter('finalized', 'finalized', needs_linux=True))", "finalized: interrupted"),
        (
            """
from afl.errors import SignalError
from afl.terminal.children import let_come_again
from afl_worker.process import interrupt
signal.signal(signal.SIGTERM, interrupt)
let_come_again(SignalError, interrupt)
try:
    end()
except SignalError as error:
    print(error, file=sys.stderr)
    sys.exit(130)
""",
            "SIGTERM",
        ),
    ],
    ids=["command", "worker"],
)
def test_an_interrupt_that_comes_while_something_is_finalized_is_not_lost(
    rest: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "finalized.py").write_text(f"{FINALIZED}\nmain = end\n")
    done = subprocess.run(
        [sys.executable, "-c", f"{FINALIZED}\n{rest}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, f"{said}\n")


def test_what_is_left_behind_holds_no_process_whose_standard_error_nobody_reads(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text("""
import os, threading

def main():
    threading.Thread(target=threading.Event().wait).start()
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    return 7
""")
    program = "from afl.terminal import entry; entry.END_GRACE_S = 0.1; entry.enter('left', 'left')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 7


@pytest.mark.parametrize(
    "command", [["afl_server", "--config", "c.yaml"], ["afl_worker", "--id", "0", "--server", "127.0.0.1:1"]]
)
def test_a_daemon_takes_sigterm_while_it_imports_pytorch(command: list[str], tmp_path: Path) -> None:
    """As a container's first process it would outlive a signal that it does not take."""
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, "-m", *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch" not in maps.read_text():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate()
    assert process.returncode == ExitCode.INTERRUPTED, error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "line",
    [
        "-m afl_server --help-config | head -1",
        "-m afl_server --help-config >&-",
        "-m afl_cli theory --workers 2 --rounds 9 >&-",
    ],
)
def test_outputs_that_are_closed(line: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} {line}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["afl_server --help-config", "afl_cli theory --workers 2 --rounds 9"])
def test_an_output_on_a_full_disk_is_said_in_a_line(command: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m {command} > /dev/full"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.STORAGE
    assert done.stderr.endswith(": No space left on device; free some space\n"), done.stderr
    assert done.stderr.count("\n") == 1


def test_an_option_that_is_not_there_shows_the_subcommand_s_usage() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "afl_cli", "status", "--server", "x:1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.startswith("usage: afl status")
    assert "unrecognized arguments: --server" in done.stderr


@pytest.mark.parametrize(("given", "found"), [({}, "NONE"), ({"GRPC_VERBOSITY": "DEBUG"}, "DEBUG")])
def test_grpc_writes_past_the_log_only_if_it_is_asked_to(
    given: dict[str, str], found: str, tmp_path: Path
) -> None:
    (tmp_path / "said.py").write_text(
        "import os\ndef main():\n    print(os.environ['GRPC_VERBOSITY'])\n    return 0\n"
    )
    inherited = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "from afl.terminal.entry import enter; enter('said', 'said')"],
        env={**inherited, "PYTHONPATH": path, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{found}\n"


@pytest.mark.parametrize("daemon", ["afl_server", "afl_worker"])
def test_a_daemon_on_another_system_says_that_it_needs_linux(daemon: str) -> None:
    program = f"import sys; sys.platform = 'darwin'; from {daemon}.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = f"{daemon.replace('_', '-')}: this is darwin, and it runs on Linux only\n"
    assert (done.returncode, done.stderr) == (ExitCode.CONFIG, said)


def test_an_interrupt_while_a_process_is_forked_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(
        "import os, time\ndef main():\n    os.fork() or os._exit(0)\n    time.sleep(60)\n"
    )
    program = (
        "import os, signal, sys; from afl.terminal.entry import enter; "
        "os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT)); "
        "sys.exit(enter('forks', 'forks'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, "forks: interrupted\n")


ARENAS = """
import ctypes, threading

def main():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.fopen.restype = ctypes.c_void_p, ctypes.c_void_p
    together = threading.Barrier(4)

    def allocate():
        libc.malloc(1000)
        together.wait()

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = ctypes.c_void_p(libc.fopen(b"arenas.xml", b"w"))
    libc.malloc_info(0, told)
    libc.fclose(told)
    return 0
"""


@pytest.mark.parametrize(
    ("is_daemon", "setting", "is_one"),
    [(True, {}, True), (True, {"MALLOC_ARENA_MAX": "8"}, False), (False, {}, False)],
)
def test_the_threads_of_a_daemon_share_one_arena(
    tmp_path: Path, is_daemon: bool, setting: dict[str, str], is_one: bool
) -> None:
    (tmp_path / "arenas.py").write_text(ARENAS, encoding="utf-8")
    program = f"from afl.terminal.entry import enter; enter('arenas', 'arenas', needs_linux={is_daemon})"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env={**environment, **setting}, check=True)
    arenas = (tmp_path / "arenas.xml").read_text(encoding="utf-8").count("<heap nr=")
    assert (arenas == 1) == is_one
