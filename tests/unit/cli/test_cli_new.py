"""``afl new``: the project that it writes, and the names that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from afl.config import load_config
from afl_cli.main import main
from afl_cli.new import FILES, class_name_of, project_files

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_project_is_written(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "my_study"]) == 0
    assert {path.name for path in (here / "my_study").iterdir()} == set(FILES)
    config = load_config(here / "my_study" / "server.yaml")
    assert config.task.name == "task:MyStudy"
    assert config.workers == 3
    assert config.algorithm.uplink_compressor.options == {"ratio": 0.1, "bits": 8}
    assert (config.task.held_out, config.algorithm.dual_loss) == (0.2, "held-out")
    assert config.divergence_watch is not None, "a run that gets worse and worse ends"
    said = capsys.readouterr().out
    for words in ("cd my_study", "afl check task.py:MyStudy --config server.yaml", "afl run server.yaml"):
        assert words in said
    for text in project_files("my_study").values():
        assert "@" not in text


def test_a_private_project_masks_its_messages_and_hides_losses(here: Path) -> None:
    assert main(["new", "my_study", "--private"]) == 0
    config = load_config(here / "my_study" / "server.yaml")
    assert config.privacy.secure_aggregation
    assert config.privacy.losses == "hidden"
    assert config.algorithm.uplink_compressor.options == {"ratio": 0.1, "bits": 16}
    readme = (here / "my_study" / "README.md").read_text()
    assert "--peer-keys keys/peers.txt --signing-key keys/signing-0.key" in readme
    for text in project_files("my_study", is_private=True).values():
        assert "@" not in text


def test_its_task_is_about_thirty_lines() -> None:
    code = [
        line
        for line in project_files("study")["task.py"].splitlines()
        if line.strip() and not line.strip().startswith(("#", '"""'))
    ]
    assert len(code) <= 30


def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "study").mkdir()
    (here / "study" / "task.py").write_text("precious")
    assert main(["new", "study"]) == 2
    assert "study already exists" in capsys.readouterr().err
    assert (here / "study" / "task.py").read_text() == "precious"
    (here / "file").write_text("precious")
    assert main(["new", "file"]) == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-study", "such as my_study"),
        ("9lives", "such as study_9lives"),
        ("_", "such as study"),
        ("_9", "such as study_9"),
        ("", "such as study"),
        ("a/b", "such as a_b"),
        ("../up", "such as up"),
        ("größe", "such as"),
        ("class", "such as class_study"),
        ("none", "such as none_study"),
        ("json", "such as json_study"),
        ("sys", "is the name of a Python module that is installed here"),
        ("torch", "such as torch_study"),
        ("afl", "such as afl_study"),
        ("afl_worker", "such as afl_worker_study"),
    ],
)
def test_names_that_are_refused(here: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", name]) == 2
    assert said in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_what_lies_in_the_current_folder_is_no_module(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a second try of the same name would be told of a module, and not of the folder."""
    monkeypatch.syspath_prepend(str(here))
    assert main(["new", "study"]) == 0
    assert main(["new", "study"]) == 2
    assert "study already exists" in capsys.readouterr().err


def test_the_class_is_named_after_the_project() -> None:
    assert class_name_of("my_study") == "MyStudy"
    assert class_name_of("x") == "X"
    assert class_name_of("aB_c2") == "ABC2"


def test_the_package_brings_the_templates() -> None:
    folder = ROOT / "cli" / "afl_cli" / "project"
    assert {path.name for path in folder.glob("*.template")} == {f"{name}.template" for name in FILES}
