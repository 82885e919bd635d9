"""Finding a task: by its name among the installed ones, or by ``package.module:Class`` (``file.py:Class``).

A name resolves to what is installed on this machine (the entry points of the group ``afl.tasks``), so a
name may come from another machine. A path imports any module, so it may come from this machine's own
command line only.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afl.config.problems import nearest
from afl.core.installed import entry_points
from afl.errors import ConfigError, TaskCodeError
from afl.optional_dependencies import INSTALL_HINT, PROVIDED
from afl.tasks.base import Task
from afl.tasks.options import hint_of
from afl.user_code import SUFFIX, as_module_path, calling, ending_forks, users_line

GROUP = "afl.tasks"


def known_tasks() -> dict[str, str]:
    """The installed tasks' names, ascending, each with its ``package.module:Class``; imports none of them."""
    found: dict[str, str] = {}
    for entry in sorted(entry_points(group=GROUP)):
        path = f"{entry.module}:{entry.attr}"
        other = found.setdefault(entry.name, path)
        if other != path:
            raise ConfigError(
                f"task {entry.name}: two installed packages give this name, to {other} and to {path}; "
                "uninstall one"
            )
    return found


def task_identity(name: str) -> str:
    """What two machines compare to know that they run the same task: its ``package.module:Class``.

    A name and the path of the class that it stands for have the same identity. Nothing is imported.

    Raises:
        afl.ConfigError: if there is no such name.
    """
    if ":" in name:
        return as_module_path(name)
    if name.endswith(SUFFIX):
        raise ConfigError(f"task {name}: a file; which class of it? Name it as in {name}:MyTask")
    known = known_tasks()
    if name not in known:
        meant = nearest(name, known)
        hint = f"did you mean {meant}? " if meant else ""
        raise ConfigError(
            f"task {name}: no such task; {hint}installed: {', '.join(known) or 'none'}. A class of your own "
            "is named with its file or module, as in task.py:MyTask (task.name of the configuration, --task "
            "of a worker)"
        )
    return known[name]


def check_task(name: str) -> None:
    """Raise :class:`afl.ConfigError` if this machine's own command line names a task that is not there. What
    is wrong with the code of one that is there, :func:`load_task` says."""
    path = task_identity(name)
    if ":" in name:
        _prepare_import(path)
    try:
        with ending_forks():
            is_there = importlib.util.find_spec(path.partition(":")[0]) is not None
    except ModuleNotFoundError:
        is_there = False
    except (Exception, SystemExit):  # noqa: BLE001  # a package's own code may raise anything
        return
    if not is_there:
        _imported(f"task {name}", path)


def load_task(
    name_or_path: str,
    options: Mapping[str, Any],
    *,
    allow_path: bool = False,
    local: Mapping[str, Any] | None = None,
) -> Task:
    """The task, made with its options.

    Args:
        name_or_path: an installed task's name, or ``package.module:Class``, or ``file.py:Class``. For a path,
            modules in and below the working directory are found too, and first.
        options: keyword arguments of the class (``task.options``).
        allow_path: whether this machine's own command line said it, so that it may be a path.
        local: where ``options`` came from another machine, this one's values of the class's
            ``local_options``, which replace the other's.

    Raises:
        afl.ConfigError: if there is no such task, it cannot be imported or made, or it is not a task.
    """
    path = task_identity(name_or_path)
    name = path if ":" in name_or_path else name_or_path
    if name == path:
        if not allow_path:
            raise ConfigError(
                f"task {name}: a class that is named by its module is loaded only if this machine's own "
                f"command line names it: add --task {name}"
            )
        _prepare_import(path)
    cls = _checked_class(name, _imported(f"task {name}", path))
    if local is not None:
        foreign = sorted(set(local) - cls.local_options)
        if foreign:
            own = ", ".join(sorted(cls.local_options)) or "none"
            raise ConfigError(
                f"--task-option {foreign[0]}: not an option of this machine for the task {name} (those are: "
                f"{own}); all others come from the run's configuration"
            )
        options = {key: value for key, value in options.items() if key not in cls.local_options} | dict(local)
    return _made(cls, name, options)


def local_options(name: str) -> frozenset[str]:
    """The options that are each machine's own; none of a class that is named by its module, whose code is not
    loaded for it, or of a task that is not installed here."""
    path = known_tasks().get(name)
    return (
        frozenset() if path is None else _checked_class(name, _imported(f"task {name}", path)).local_options
    )


def make_task(cls: type[Task], options: Mapping[str, Any]) -> Task:
    """A task of a class that the caller has, made with its options.

    Raises:
        afl.ConfigError: if it cannot be made, or is not a task.
    """
    name = getattr(cls, "__name__", repr(cls))
    return _made(_checked_class(name, cls), name, options)


def _prepare_import(path: str) -> None:
    if not all(map(str.isidentifier, re.split("[.:]", path))):
        raise ConfigError(
            f"task {path}: a class is written package.module:Class or file.py:Class, with letters, digits "
            "and underscores in each name"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        # First, as `python -m` has it, but only from here on: what a command itself needs was found without
        # it. It stays there: the user's module may import its neighbours later.
        sys.path.insert(0, here)


def _imported(what: str, path: str) -> object:
    module, _, attribute = path.partition(":")
    try:
        with calling(f"{what}: importing {module}"):
            value: Any = importlib.import_module(module)
    except TaskCodeError as failure:
        error = failure.__cause__
        if not isinstance(error, ImportError | SyntaxError):
            raise
        raise ConfigError(f"{what}: cannot import {module}: {error}{_import_hint(module, error)}") from error
    for step in attribute.split("."):
        if not hasattr(value, step):
            classes = [name for name, member in inspect.getmembers(value, _is_task)]
            raise ConfigError(f"{what}: {module} has no {attribute}; {hint_of(step, classes)}")
        value = getattr(value, step)
    return value


def _import_hint(module: str, error: ImportError | SyntaxError) -> str:
    """What to do about a module that cannot be imported; empty where the error says it."""
    if not isinstance(error, ImportError):
        return ""
    missing = (error.name or "").partition(".")[0]
    if missing in PROVIDED:
        return f": {INSTALL_HINT}"
    if missing == module.partition(".")[0]:
        return f"; it is neither installed nor in the current folder ({Path.cwd()})"
    line = users_line(error)
    return f" ({line[0]}); install it on this machine, or fix the import" if line else ""


def _is_task(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Task) and not value.__module__.endswith("tasks.base")


def _checked_class(name: str, loaded: object) -> type[Task]:
    if not inspect.isclass(loaded) or not issubclass(loaded, Task):
        what = f"the class {loaded.__name__}" if inspect.isclass(loaded) else repr(loaded)
        raise ConfigError(
            f"task {name}: {what} is not a subclass of afl.Task; name the class that is, or derive it from "
            "afl.Task or afl.Classification"
        )
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(loaded.__abstractmethods__))
        raise ConfigError(f"task {name}: {loaded.__name__} does not define {missing}; every task must")
    return loaded


def _made(cls: type[Task], name: str, options: Mapping[str, Any]) -> Task:
    signature = inspect.signature(cls)
    parameters = signature.parameters.values()
    accepted = [one.name for one in parameters if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}]
    unknown = [option for option in options if option not in accepted]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in parameters):
        raise ConfigError(
            f"task.options.{unknown[0]}: unknown option of task {name}; {hint_of(unknown[0], accepted)}"
        )
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"task {name}: {cls.__name__}{signature} cannot be made with the options "
            f"{dict(options)!r}: {error}; task.options must match the arguments of its __init__"
        ) from error
    given = f" with task.options {dict(options)!r}" if options else ""
    with calling(f"task {name}: making {cls.__name__}{given}"):
        return cls(**options)
