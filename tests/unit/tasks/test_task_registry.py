from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from afl.errors import ConfigError, ExitCode, TaskCodeError
from afl.tasks import known_tasks, load_task, registry, task_identity
from afl.tasks.digits import Digits
from afl.tasks.femnist import Femnist

MODULE = """
from torch import nn
from afl.tasks import Classification, WorkerData

class Unfinished(Classification):
    def model(self):
        return nn.Linear(1, 1)

class Mine(Unfinished):
    def __init__(self, width, *, depth=1):
        self.width = width + 0
    def data(self, worker, context):
        return WorkerData((), ())

not_a_class = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_task_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "my_task_module"
    sys.modules.pop("my_task_module", None)


def test_the_installed_tasks_load_by_name() -> None:
    assert {"cifar10", "digits", "fashion-mnist", "femnist", "synthetic"} <= set(known_tasks())
    task = load_task("digits", {"hidden": [8]})
    assert isinstance(task, Digits)
    assert task.options.hidden == (8,)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"no such task; did you mean digits\? installed: cifar10, digits, "
    ):
        load_task("digit", {})


def test_a_path_loads_where_it_is_allowed(module: str) -> None:
    task = load_task(f"{module}:Mine", {"width": 3}, allow_path=True)
    assert vars(task) == {"width": 3}
    with pytest.raises(ConfigError, match=rf"only if .* names it: add --task {module}:Mine$"):
        load_task(f"{module}:Mine", {"width": 3})


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("{}:Nine", {}, r"my_task_module has no Nine; did you mean Mine\?"),
        ("{}:not_a_class", {}, "3 is not a subclass of afl.Task"),
        ("{}:Unfinished", {}, "Unfinished does not define data"),
        ("{}:Mine", {"widht": 3}, r"task\.options\.widht: unknown option of .*did you mean width\?"),
        ("{}:Mine", {}, r"Mine\(width, \*, depth=1\) cannot be made .*missing .* 'width'"),
        ("no_such_module_here:Mine", {}, "cannot import no_such_module_here"),
        ("my task:Mine", {}, "written package.module:Class"),
        ("{}:", {}, "written package.module:Class"),
    ],
)
def test_a_wrong_path_class_or_option_says_what_to_do(
    module: str, path: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(path.format(module), options, allow_path=True)


def test_what_a_task_s_own_code_raises_names_the_line(module: str) -> None:
    with pytest.raises(TaskCodeError) as caught:
        load_task(f"{module}:Mine", {"width": "a"}, allow_path=True)
    line = MODULE.splitlines().index("        self.width = width + 0") + 1
    assert str(caught.value) == (
        "task my_task_module:Mine: making Mine with task.options {'width': 'a'} raised TypeError: can only "
        f'concatenate str (not "int") to str (my_task_module.py:{line}, in __init__)'
    )
    assert caught.value.exit_code == ExitCode.CONFIG


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (
            "1 / 0",
            TaskCodeError,
            r"importing my_task_module raised ZeroDivisionError: division by zero",
        ),
        ("raise SystemExit(3)", TaskCodeError, r"ends the program \(my_task_module\.py:1, .*__main__"),
        ("import no_such_package", ConfigError, r"my_task_module\.py:1, .*\); install it on this machine"),
        ("def broken(:", ConfigError, r"cannot import my_task_module: .*\(my_task_module\.py, line 1\)"),
        (
            "class Mine: pass",
            ConfigError,
            "the class Mine is not a subclass of afl.Task; name",
        ),
    ],
)
def test_a_module_that_cannot_be_imported(
    module: str, code: str, error: type[Exception], message: str
) -> None:
    Path("my_task_module.py").write_text(code, encoding="utf-8")
    with pytest.raises(error, match=message):
        load_task(f"{module}:Mine", {}, allow_path=True)


def test_a_module_that_needs_the_extra_names_it(module: str) -> None:
    Path("my_task_module.py").write_text("raise ModuleNotFoundError('none', name='torchvision.io')")
    with pytest.raises(ConfigError, match=r"pip install 'afl\[tasks\]'"):
        load_task(f"{module}:Mine", {}, allow_path=True)


def test_a_name_and_its_path_are_the_same_task() -> None:
    assert task_identity("digits") == task_identity("afl.tasks.digits:Digits") == "afl.tasks.digits:Digits"
    with pytest.raises(ConfigError, match="no such task"):
        task_identity("nothing-like-it")


def test_two_packages_that_give_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [EntryPoint("twice", f"{package}:Task", registry.GROUP) for package in ("first", "second")]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    with pytest.raises(ConfigError, match="first:Task and to second:Task"):
        known_tasks()


def test_options_of_a_machine_are_taken_from_that_machine_alone() -> None:
    sent = {"data_dir": "/elsewhere", "file": "theirs.npz", "classes": 10}
    task = load_task("femnist", sent, local={"file": "mine.npz"})
    assert isinstance(task, Femnist)
    assert task.options.data_dir is None
    assert task.options.file == Path("mine.npz")
    assert task.options.classes == 10


def test_an_option_of_the_run_cannot_be_set_on_one_machine() -> None:
    with pytest.raises(ConfigError, match=r"--task-option classes: .*those are: data_dir, file"):
        load_task("femnist", {}, local={"classes": 10})


def test_a_file_without_a_class_is_asked_for_one() -> None:
    with pytest.raises(ConfigError, match=r"task mine\.py: a file; which class of it\? .* mine\.py:MyTask"):
        load_task("mine.py", {}, allow_path=True)
