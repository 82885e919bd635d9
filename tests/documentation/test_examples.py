"""The examples of every page: Python is run; configurations, log lines and the rest are read.

Python and YAML with the comment ``# NAME`` on the first line are also written to that file. A page's blocks
are evaluated in order, in a folder of their own; test_commands.py looks at commands.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

from afl.config import config_from_mapping, load_config
from afl.runs.tracking.following import Following
from afl.site.policy import Policy, SitePolicy
from afl_lab.simulation.run import simulate
from support.log_lines import check_line
from support.packages import install
from support.pages import ROOT, Block, blocks, pages

WITH_BLOCKS = [page for page in pages() if blocks(page)]

MINIMAL: Mapping[str, Any] = {
    "workers": 2,
    "task": {"name": "synthetic"},
    "algorithm": {
        "name": "afl-com",
        "rounds": 4,
        "eta_w": 0.05,
        "eta_q": 0.1,
        "uplink": {"name": "rand-k", "ratio": 0.1},
    },
}
"""What a part of a configuration is put into."""

THE_READERS_OWN = {"module", "MyTask"}
"""Names that stand for what a reader has; of a block with one only the imports are run."""

NOT_INSTALLED = {"flwr", "peft", "transformers"}

INSTRUCTIONS = {"FROM", "COPY", "RUN", "ENV", "ARG", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}


def evaluate_python(example: Example) -> None:
    source = str(example.parsed)
    write(example)
    tree = ast.parse(source)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    imported = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.name for alias in imported}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    if {module.partition(".")[0] for module in modules} & NOT_INSTALLED:
        return
    if {
        node.id for node in names if isinstance(node.ctx, ast.Load)
    } & THE_READERS_OWN - example.namespace.keys():
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), example.path, "exec"), example.namespace)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = example.namespace.get(node.value.id)
                assert not isinstance(owner, ModuleType) or hasattr(owner, node.attr), node.attr
        return
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        PythonEvaluator()(example)
    example.namespace["_printed"] = printed.getvalue()


def evaluate_text(example: Example) -> None:
    """What the Python block before it has printed; after commands it is a picture."""
    printed = example.namespace.pop("_printed", "")
    assert not printed or str(example.parsed) == printed


def evaluate_yaml(example: Example) -> None:
    """A Kubernetes manifest, a site's policy, or a configuration or a part of one."""
    write(example)
    value = yaml.safe_load(str(example.parsed))
    if "apiVersion" in value:
        kubernetes_validate.validate(value, kubernetes_validate.latest_version(), strict=True)
    elif value.keys() <= Policy.model_fields.keys():
        Path("site.yaml").write_text(str(example.parsed), encoding="utf-8")
        SitePolicy.load(Path("site.yaml"))
    else:
        whole = {"workers", "task", "algorithm"} <= value.keys()
        config_from_mapping(value if whole else merged(MINIMAL, value), example.path)


def evaluate_toml(example: Example) -> None:
    """Entry points of a package that this page has shown: they are installed, as far as Python can see."""
    groups = tomllib.loads(str(example.parsed))["project"]["entry-points"]
    for points in groups.values():
        for value in points.values():
            module, _, attribute = value.partition(":")
            assert hasattr(importlib.import_module(module), attribute), value
    install(Path(), "shown", groups)


def evaluate_json(example: Example) -> None:
    """Log lines."""
    for line in map(json.loads, str(example.parsed).splitlines()):
        assert {"time", "level", "logger", "message"} <= line.keys(), line
        assert not check_line(line)


def evaluate_ini(example: Example) -> None:
    """Variables that a unit reads."""
    units = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "deploy" / "systemd").iterdir())
    for line in str(example.parsed).splitlines():
        assert re.search(rf"\b{re.escape(line.partition('=')[0])}\b", units), f"no unit reads {line}"


def evaluate_dockerfile(example: Example) -> None:
    assert {line.split()[0] for line in str(example.parsed).splitlines()} <= INSTRUCTIONS


EVALUATORS = {
    "dockerfile": evaluate_dockerfile,
    "ini": evaluate_ini,
    "json": evaluate_json,
    "python": evaluate_python,
    "text": evaluate_text,
    "toml": evaluate_toml,
    "yaml": evaluate_yaml,
}
PARSERS = [CodeBlockParser(language, evaluator) for language, evaluator in EVALUATORS.items()]


def write(example: Example) -> None:
    name = Block(example.path, example.line, "", str(example.parsed)).file
    if name:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(str(example.parsed), encoding="utf-8")


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        replaces = not isinstance(value, Mapping) or "name" in value or key not in below
        result[key] = value if replaces else merged(below[key], value)
    return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, where Python looks first, and of which nothing stays imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def evaluate(page: str) -> dict[str, Any]:
    """Evaluate a page's examples; what they have defined."""
    document = Document.parse(str(ROOT / page), *PARSERS)
    document.namespace["__name__"] = "page"
    for example in document.examples():
        example.evaluate()
    return document.namespace


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_the_examples_of_a_page(page: str, folder: Path) -> None:
    evaluate(page)


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_every_block_says_its_language(page: str) -> None:
    """What is no code is ``text``."""
    assert {block.language for block in blocks(page)} <= {"mermaid", "sh", *EVALUATORS}


@pytest.mark.parametrize(
    ("language", "text", "wrong"),
    [
        ("python", "1 / 0", ZeroDivisionError),
        ("python", "import afl\nafl.load_modle('x', MyTask)", AssertionError),
        ("yaml", "server:\n  heartbeet: 3s", Exception),
        ("yaml", "apiVersion: v1\nkind: Pod\nspec: {}\nspeck: {}", Exception),
        (
            "json",
            '{"time": "", "level": "info", "logger": "afl", "message": "", "event": "joint"}',
            AssertionError,
        ),
        ("ini", "AFL_SERVE=x", AssertionError),
        ("dockerfile", "FORM x", AssertionError),
        ("python", "print(41)\n```\n\n```text\n42", AssertionError),
    ],
)
def test_what_is_wrong_is_found(language: str, text: str, wrong: type[Exception], folder: Path) -> None:
    (folder / "page.md").write_text(f"# Title\n\n```{language}\n{text}\n```\n", encoding="utf-8")
    with pytest.raises(wrong):
        evaluate(str(folder / "page.md"))


def test_the_tracker_that_is_shown_is_told_of_a_run(folder: Path) -> None:
    tracker = evaluate("docs/tracking.md")["Printer"]()
    (folder / "metrics.jsonl").write_text('{"event": "round", "round": 1, "loss_max": 0.5}\n')
    following = Following({"printer": tracker}, "run-1", folder, config_from_mapping(MINIMAL))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        following.start()
        following.end("finished")
    assert printed.getvalue() == "begins run-1 afl-com\n1 0.5\nfinished\n"


def test_the_task_that_is_shown_learns_and_its_run_writes_what_is_said(folder: Path) -> None:
    (page,) = {
        block.page for page in pages() for block in blocks(page, "yaml") if block.file == "my_run.yaml"
    }
    evaluate(page)
    simulate(load_config("my_run.yaml", ["run.seed=1"]), folder / "run")
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["last"]["worst_accuracy"] > 0.8
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in pages()]
    (text,) = (text for text in texts if "\n| `config.yaml` |" in text)
    named = set(re.findall(r"^\| `([\w.-]+\.(?:yaml|jsonl?|safetensors))` \|", text, re.MULTILINE))
    assert {path.name for path in (folder / "run").iterdir()} == named


@pytest.mark.long
def test_the_third_site_is_served_as_the_page_for_flower_says(folder: Path) -> None:
    evaluate("docs/from-flower.md")
    page = (ROOT / "docs" / "from-flower.md").read_text(encoding="utf-8")
    for name, worst in {"fedavg": 0.55, "afl-com": 0.875}.items():
        assert str(worst) in page
        simulate(load_config(f"{name}.yaml"), folder / name, saves_models=False)
        last = json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))["last"]
        assert last["worst_worker"] == 2
        # Another processor rounds otherwise, and the site tests on 40 examples.
        assert abs(last["worst_accuracy"] - worst) <= 0.075
