"""``afl new``: a small project that runs at once, to be filled with your own model and data."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Final

from afl.errors import ConfigError, ExitCode, StorageError, why_unwritable
from afl.runs.durable import write_whole

HELP = "write a small project: a task, its configuration and its test"

TEMPLATES: Final = "afl_cli.project"

FILES: Final = ("README.md", "server.yaml", "task.py", "test_task.py")

ENDING: Final = ".template"
"""Of the files' names in the package: none of them is a module of it."""


_PRIVATE: Final = {
    "bits: 8 ": "bits: 16",
    "\nevaluation:\n": """
privacy:
  secure_aggregation: true  # the server learns the sum of the workers' messages, and nothing else
  losses: hidden            # nor any worker's loss, metrics or dual weight

evaluation:
""",
    "\nafl-server --config": "\nafl certs keys --workers 3 --signing-keys\nafl-server --config",
    "--task task:@CLASS@": "--task task:@CLASS@ --peer-keys keys/peers.txt --signing-key keys/signing-0.key",
}
"""What the templates say otherwise where messages are masked."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    folder = "the new folder; letters, digits and underscores, such as my_study"
    parser.add_argument("name", metavar="NAME", help=folder)
    private = "the server learns only sums: of the workers' updates, losses and metrics"
    parser.add_argument("--private", action="store_true", help=private)


def run(options: argparse.Namespace) -> ExitCode:
    """Write the project into a new folder."""
    name = checked_name(options.name)
    folder = Path(name)
    try:
        folder.mkdir()
        for file, text in project_files(name, is_private=options.private).items():
            write_whole(folder / file, text.encode(), mode=0o644)
    except FileExistsError as error:
        exists = f"{folder} already exists, and nothing is overwritten"
        raise ConfigError(f"{exists}; choose another name") from error
    except OSError as error:
        raise StorageError(f"{folder} cannot be written here: {why_unwritable(error)}") from error
    check = f"afl check task.py:{class_name_of(name)} --config server.yaml"
    print(
        f"Written to {folder}: {', '.join(FILES)}\n\n"
        f"  cd {folder}\n"
        f"  {'python test_task.py':<54}try the task; python -m pytest does it too\n"
        f"  {check:<54}the same, in more words\n"
        f"  {'afl run server.yaml':<54}a federation on this machine\n\n"
        "Then put your model and data into task.py; README.md says where."
    )
    return ExitCode.OK


def project_files(name: str, *, is_private: bool = False) -> dict[str, str]:
    """The text of each file, for a project of this name."""
    folder = resources.files(TEMPLATES)
    texts = {file: (folder / f"{file}{ENDING}").read_text(encoding="utf-8") for file in FILES}
    filled = {"@NAME@": name, "@CLASS@": class_name_of(name)}
    for changes in (_PRIVATE if is_private else {}, filled):
        for before, after in changes.items():
            texts = {file: text.replace(before, after) for file, text in texts.items()}
    return texts


def class_name_of(name: str) -> str:
    """The task's class: ``my_study`` has ``MyStudy``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def checked_name(name: str) -> str:
    """A name that a folder, and in another form a class, can have, and that no module has."""
    class_name = class_name_of(name)
    if not name.isidentifier() or not name.isascii() or not class_name.isidentifier():
        kept = re.sub("[^A-Za-z0-9]", "_", name).strip("_")
        suggested = kept if kept[:1].isalpha() else f"study_{kept}".rstrip("_")
        rule = "a project is named by letters, digits and underscores, and begins with a letter"
        raise ConfigError(f"{name!r}: {rule}, such as {suggested}")
    if keyword.iskeyword(name) or keyword.iskeyword(class_name):
        raise ConfigError(f"{name!r} is a word of Python itself; choose another, such as {name}_study")
    if is_module(name):
        module = (
            "the name of a Python module that is installed here, in whose place the folder could be imported"
        )
        raise ConfigError(f"{name!r} is {module}; choose another, such as {name}_study")
    return name


def is_module(name: str) -> bool:
    """Whether Python, or what is installed beside ``afl``, has a module of this name.

    What lies in the current folder does not count: nothing there is overwritten anyway.
    """
    if name in sys.stdlib_module_names:
        return True
    places: list[str] = []
    for finder in sys.meta_path:
        if spec := finder.find_spec(name, None):
            places += [spec.origin] if spec.origin else spec.submodule_search_locations or []
    return any(not Path(place).absolute().is_relative_to(Path.cwd()) for place in places)
