"""What can be said of a command line without running it: whether all that it names is there."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import re
import shlex
import tomllib
from collections.abc import Sequence

from afl.config import document
from afl_cli.main import make_afl_parser
from afl_server.main import make_server_parser
from afl_tools.docs import chart
from afl_worker.main import make_worker_parser
from support.pages import ROOT, blocks, pages

PARSERS = {"afl": make_afl_parser, "afl-server": make_server_parser, "afl-worker": make_worker_parser}

OTHERS = {
    *("cat", "cd", "cp", "curl", "docker", "export", "flower-superlink", "flower-supernode", "flwr"),
    *(
        "journalctl",
        "helm",
        "kind",
        "kubectl",
        "make",
        "mkdir",
        "mv",
        "openssl",
        "podman",
        "pip",
        "printf",
        "prometheus",
        "python",
    ),
    *("python3", "ssh", "systemctl", "tr", "useradd", "/opt/afl/bin/pip"),
}
"""What else pages tell a reader to run; a misspelt one is not among them."""


class CommandError(AssertionError):
    """A command line names something that is not there."""


def check(line: str) -> None:
    """See that all that a command line names is there.

    Raises:
        CommandError: if a program, option, key, target, extra, module, file, unit or object is not.
    """
    words = shlex.split(line, comments=True)
    program, arguments = words[0], words[1:]
    must(program in PARSERS or program in OTHERS, f"no page runs {program}", line)
    for word in words:
        must(not re.match(r"(deploy|docs)/", word) or (ROOT / word).exists(), f"there is no {word}", line)
    if program in PARSERS:
        parse(program, arguments)
    elif program == "python":
        module = arguments[1] if len(arguments) > 1 and arguments[0] == "-m" else ""
        must(
            is_module(module) if module else is_shown(arguments[0]),
            "no such module, and no page shows it",
            line,
        )
        parse(module, arguments[2:])
    elif program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        must(
            {word for word in arguments if "=" not in word} <= {*targets},
            "the Makefile has no such target",
            line,
        )
    elif program.endswith("pip"):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
            "optional-dependencies"
        ]
        named = {extra for word in re.findall(r"\[([\w,]+)\]", line) for extra in word.split(",")}
        must(named <= extras.keys(), f"pyproject.toml has no extra {named - extras.keys()}", line)
    elif program in {"systemctl", "journalctl"}:
        unit = re.sub(r"@.*", "@", arguments[-1])
        must((ROOT / "deploy" / "systemd" / f"{unit}.service").is_file(), "there is no such unit", line)
    elif program in {"docker", "podman"}:
        check_image(words, line)
    elif program == "kubectl":
        templates = "\n".join(path.read_text(encoding="utf-8") for path in chart.CHART.rglob("*.yaml"))
        for kind, name in re.findall(r"\s(service|statefulset|job)/afl([\w-]+)", line):
            of_release = re.escape('{{ include "afl.name" . }}' + name)
            found = re.search(
                rf"^kind: {kind}\n(?:.+\n)*?  name: {of_release}$", templates, re.MULTILINE | re.IGNORECASE
            )
            must(found, f"the chart has no {kind} afl{name}", line)
    elif program == "helm":
        known = {value.name for value in chart.values()}
        for key in re.findall(r"--set(?:-file)? \"?([\w.]+)", line):
            must(key in known, f"the chart has no value {key}", line)


def check_image(words: Sequence[str], line: str) -> None:
    """A build's target and arguments are in the container file; a container's arguments are its program's."""
    text = (ROOT / "deploy" / "containers" / "Containerfile").read_text(encoding="utf-8")
    for target in re.findall(r"--target (\S+)", line):
        must(f" AS {target}\n" in text, f"there is no target {target}", line)
    for argument in re.findall(r"--build-arg (\w+)", line):
        must(f"ARG {argument}=" in text, f"there is no argument {argument}", line)
    images = {
        image
        for page in pages()
        for block in blocks(page, "sh")
        for image in re.findall(r"-t (\S+)", block.text)
    }
    if words[1] == "run":
        place = next((index for index, word in enumerate(words) if word in images), 0)
        must(place, "no page builds this image", line)
        parse(re.split("[/:]", words[place])[-2], words[place + 1 :] or ["--config", "server.yaml"])


def parse(program: str, arguments: Sequence[str]) -> None:
    """Hold arguments against the program's own parser, and the keys of ``--set`` against the configuration's.

    Raises:
        CommandError: if it does not take them.
    """
    make = PARSERS.get(program) or (program and getattr(importlib.import_module(program), "_parser", None))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            if make:
                make().parse_args(list(arguments))
    except SystemExit as end:
        must(end.code == 0, said.getvalue(), shlex.join([program, *arguments]))
    keys = {key.name for key in document.all_keys()}
    for option, value in itertools.pairwise(arguments):
        key = value.partition("=")[0]
        known = key in keys or re.match(r"task\.options|algorithm\.(?:up|down)link", key)
        must(option != "--set" or known, f"no configuration has the key {key}", shlex.join(arguments))


def is_module(name: str) -> bool:
    """Whether there is one of this name."""
    return importlib.util.find_spec(name) is not None


def is_shown(name: str) -> bool:
    """Whether a script is one that a page shows, or one of a project that ``afl new`` makes."""
    shown = {block.file for page in pages() for block in blocks(page, "python")}
    return name in shown or (ROOT / "cli" / "afl_cli" / "project" / f"{name}.template").is_file()


def must(condition: object, message: str, line: str) -> None:
    if not condition:
        raise CommandError(f"{line}\n{message}")
