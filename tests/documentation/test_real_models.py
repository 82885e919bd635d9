"""The tasks of docs/real-models.md: each is checked and simulated as a reader would do it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

from support.commands import run_command
from support.longer import but_long
from support.pages import blocks

PAGE = "docs/real-models.md"

HAS_PEFT = all(importlib.util.find_spec(name) is not None for name in ("transformers", "peft"))


MAKE_BASE = """
from transformers import BertConfig, BertForSequenceClassification

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
config = BertConfig(vocab_size=100, num_labels=2, **sizes)
BertForSequenceClassification(config).save_pretrained("base")
"""


def make_adapted(folder: Path) -> None:
    base = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    save_file(base.state_dict(), folder / "base.safetensors")


def make_sentences(folder: Path) -> None:
    """A small model with random weights, and sentences of random words."""
    # The library leaves threads behind.
    subprocess.run([sys.executable, "-c", MAKE_BASE], cwd=folder, capture_output=True, check=True)
    for worker in range(2):
        (folder / "data" / f"site-{worker}").mkdir(parents=True)
        for part, count in (("train", 64), ("test", 16)):
            words = torch.randint(1, 100, (count, 12))
            columns = {
                "input_ids": words,
                "attention_mask": torch.ones_like(words),
                "labels": words[:, 0] % 2,
            }
            save_file(columns, folder / "data" / f"site-{worker}" / f"{part}.safetensors")


def make_mapped(folder: Path, count: int = 4000) -> None:
    for worker in range(2):
        site = folder / "data" / f"site-{worker}"
        site.mkdir(parents=True)
        x = np.lib.format.open_memmap(site / "x.npy", mode="w+", dtype=np.float32, shape=(count, 20))
        y = np.lib.format.open_memmap(site / "y.npy", mode="w+", dtype=np.int64, shape=(count,))
        x[:4000] = np.random.default_rng(worker).normal(size=(4000, 20))
        y[:4000] = x[:4000, 0] > 0


def nothing(folder: Path) -> None:
    """The task draws its data."""


TASKS: dict[str, Callable[[Path], None]] = {
    "adapted:Adapted": make_adapted,
    "sentences:Sentences": make_sentences,
    "notes:Diagnosis": nothing,
    "rough:Rough": nothing,
    "mapped:Mapped": make_mapped,
    "weighted:Weighted": nothing,
}


def write_page(folder: Path) -> None:
    for block in blocks(PAGE, "python"):
        (folder / block.file).write_text(block.text, encoding="utf-8")


def configured(folder: Path, task: str) -> Path:
    config = {
        "workers": 2,
        "task": {"name": task, "batch_size": 16},
        "algorithm": {"name": "afl-br", "rounds": 4, "eta_w": 0.05, "eta_q": 0.05},
        "evaluation": {"every": 2},
        "run": {"seed": 3},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def afl(folder: Path, *arguments: str) -> str:
    """What the command prints; it ends with 0."""
    done = run_command("-m", "afl_cli", *arguments, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def checked(folder: Path, task: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        afl(folder, "check", "--config", str(configured(folder, task)), "--json")
    )
    return found


def test_every_task_of_the_page_is_here() -> None:
    defined = {
        f"{block.file.removesuffix('.py')}:{line.split()[1].partition('(')[0]}"
        for block in blocks(PAGE, "python")
        for line in block.text.splitlines()
        if line.startswith("class ") and "(afl." in line
    }
    assert defined == TASKS.keys()


@pytest.mark.parametrize("task", but_long(TASKS, "adapted:Adapted", "notes:Diagnosis", "rough:Rough"))
def test_a_task_passes_every_check_and_a_few_rounds(task: str, tmp_path: Path) -> None:
    if task == "sentences:Sentences" and not HAS_PEFT:
        pytest.skip("transformers and peft are not installed")
    write_page(tmp_path)
    TASKS[task](tmp_path)
    report = checked(tmp_path, task)
    assert not [finding for finding in report["findings"] if finding["level"] != "note"], report["findings"]
    assert report["ready"]


def test_a_file_that_is_larger_than_memory_is_trained_on(tmp_path: Path) -> None:
    """It is sparse: what was never written takes no place on the disk."""
    rows = 2 * psutil.virtual_memory().total // (20 * 4)
    write_page(tmp_path)
    make_mapped(tmp_path, rows)
    configured(tmp_path, "mapped:Mapped")
    afl(tmp_path, "simulate", "run.yaml", "--jobs", "1")
    (summary,) = (tmp_path / "simulations").rglob("summary.json")
    assert json.loads(summary.read_text(encoding="utf-8"))["result"] == "ok"
