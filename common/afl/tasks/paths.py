"""How a task's class is written on a command line: by its module, or by its file."""

from __future__ import annotations

from pathlib import Path, PurePath

from afl.errors import ConfigError

SUFFIX = ".py"


def as_module_path(name: str) -> str:
    """``folder/file.py:Class`` as ``folder.file:Class``; any other name as it is.

    Raises:
        afl.ConfigError: if the file is not in or below the working directory, or no module can have its name.
    """
    file, separator, attribute = name.rpartition(":")
    if not separator or not file.endswith(SUFFIX):
        return name
    here = Path.cwd()
    path = PurePath(here, file)
    if path.is_relative_to(here) and ".." not in path.parts:
        parts = path.relative_to(here).with_suffix("").parts
        if all(part.isidentifier() for part in parts):
            return f"{'.'.join(parts)}:{attribute}"
        raise ConfigError(
            f"task {name}: a module is named by letters, digits and underscores; rename {file} or its folder"
        )
    raise ConfigError(
        f"task {name}: {file} is not in or below the folder {here}, from which tasks are loaded; go to its"
        f" folder, and name it {path.name}:{attribute}"
    )
