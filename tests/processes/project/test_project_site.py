"""The documentation as a site: it builds without a warning, and needs nobody else's server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from afl_tools.docs.site import rewritten

ROOT = Path(__file__).resolve().parents[3]

pytest.importorskip("mkdocs", reason="MkDocs is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")

FETCHED = re.compile(
    r"""<(?:script|img|iframe|link rel="(?:stylesheet|icon|preload)")[^>]*?(?:src|href)="([^"]+)\""""
)


class _Loader(yaml.SafeLoader):
    """Leaves MkDocs' own tags unread."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)  # type: ignore[no-untyped-call]


def in_navigation(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        (target,) = entry.values()
        if isinstance(target, str):
            yield target
        else:
            yield from in_navigation(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    answer = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert (answer.returncode, answer.stdout + answer.stderr) == (0, "")
    return folder


def test_every_page_is_in_the_navigation_and_built(site: Path) -> None:
    settings = yaml.load(
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader
    )  # a SafeLoader's subclass
    pages = {
        path.relative_to(ROOT / "docs").as_posix()
        for folder in ("docs", "docs/reference")
        for path in (ROOT / folder).glob("*.md")
    }
    assert set(in_navigation(settings["nav"])) == pages
    for page in pages:
        assert (site / page).with_suffix(".html").is_file(), page


def test_nothing_comes_from_another_server(site: Path) -> None:
    fetched = {
        target
        for path in site.rglob("*.html")
        for target in FETCHED.findall(path.read_text(encoding="utf-8"))
    }
    assert any(target.endswith(".css") for target in fetched)
    assert any(target.endswith(".js") for target in fetched)
    assert not [target for target in fetched if re.match(r"(?:\w+:)?//", target)]


def test_the_reference_holds_what_is_public(site: Path) -> None:
    shown = (site / "reference" / "api.html").read_text(encoding="utf-8")
    import afl  # noqa: PLC0415
    import afl.theory  # noqa: PLC0415

    for name in (*afl.__all__, *(f"theory.{name}" for name in afl.theory.__all__)):
        if not name.startswith("__"):
            assert f'id="afl.{name}"' in shown, name
    assert not re.search(r":(?:class|func|mod):", shown)


def test_a_link_out_of_the_documents_becomes_one_into_the_repository_or_a_path() -> None:
    text = "See [the file](../deploy/server.yaml#L3), [docs/a.md](a.md) and [lab/x.py](../lab/x.py).\n"
    assert rewritten(text, "guide.md", "") == (
        "See the file (`deploy/server.yaml`), [docs/a.md](a.md) and lab/x.py.\n"
    )
    assert "[the file](https://example.org/afl/blob/main/deploy/server.yaml#L3)" in rewritten(
        text, "guide.md", "https://example.org/afl/"
    )
    assert rewritten("[p](../protocol.md) [s](../../deploy/x)", "reference/messages.md", "") == (
        "[p](../protocol.md) s (`deploy/x`)"
    )


def test_code_is_left_alone() -> None:
    code = "```text\n[the file](../deploy/server.yaml)\n```\n"
    assert rewritten(code, "guide.md", "") == code
