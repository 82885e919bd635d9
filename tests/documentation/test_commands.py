"""Every command that a page shows, or names in passing, is one; so is every path."""

from __future__ import annotations

import pytest
from commands import CommandError, check

from support.pages import ROOT, commands, inline, pages, paths


@pytest.mark.parametrize("page", pages())
def test_the_commands_of_a_page_are_commands(page: str) -> None:
    for line in commands(page):
        check(line)


@pytest.mark.parametrize("page", pages())
def test_commands_in_passing_are_commands(page: str) -> None:
    """Between back-ticks, and perhaps only the beginning of one."""
    for line in inline(page, "afl", "afl-server", "afl-worker", "make", "pip", "python"):
        program, *words = line.split()
        if words and line != "python -m":
            check(f"{line} --help" if program == "afl" and len(words) == 1 and words[0][0] != "-" else line)


def test_every_path_in_passing_is_there() -> None:
    named = [(page, path) for page in pages() for path in paths(page)]
    assert len(named) > 20
    assert not [f"{page}: {path}" for page, path in named if not list(ROOT.glob(path.rstrip("/")))]


@pytest.mark.parametrize(
    "line",
    [
        "afl stat",
        "afl status --wach",
        "afl run server.yaml --set algorithm.round=3",
        "afl-server --help-configuration",
        "afl-server --config deploy/serve.yaml",
        "docker build -f deploy/containers/Containerfile --target both -t x .",
        "docker run ghcr.io/OWNER/afl-worker:9 --id 3",
        "kubectl logs -n afl statefulset/afl-serve",
        "helm install afl deploy/helm/af",
        "helm install afl deploy/helm/afl --set server.wrokers=4",
        "make tests",
        "pip install 'afl[frills]'",
        "pipp install afl",
        "python -m afl_lab.benches",
        "python -m afl_reproduction.bounds --wrokers 4",
        "python use_it.py",
        "systemctl enable --now afl-serve",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises(CommandError):
        check(line)
