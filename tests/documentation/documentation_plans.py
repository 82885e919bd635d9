"""How each page is followed: what it presumes, what is other than it says, and what of it cannot be run here.

A new page needs an entry in :data:`PAGES`; its blocks are then followed as :mod:`documentation_reader` says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from documentation_exempt import NOT_RUN
from documentation_reader import MINIMAL, Page, PageError, Reader, Replacement

from afl.runs.tracking.following import Following
from afl.tasks.registry import load_task
from support import Federation
from support.identities import Identities, Pair, tls
from support.pages import PROJECT, ROOT, blocks, inline

DATA = os.environ.get("AFL_DATA")
"""Where the data sets are; the tests themselves do without it but for the whole version of one page."""

__all__ = ["NOT_RUN", "PAGES", "REPLACEMENTS", "follow"]

SMALL = "--set task.name=synthetic --set workers=4 --set algorithm.rounds=6 --set evaluation.every=3"
IN_SMALL = "Fashion-MNIST is not everywhere, and 2000 rounds take minutes"

TOP_K = "afl run server.yaml --set run.directory=runs/top-k --set algorithm.uplink.name=top-k"

SERVER = "afl-server --config deploy/server.yaml"


OUTSIDE = "afl-worker --id {} --server server.example.org:50051 --ca ca.pem"
THREE = f"{OUTSIDE.format('3')} --certificate worker-3.pem --key worker-3.key"


def a_run(reader: Reader, directory: str) -> None:
    """A small run that is complete, in this directory."""
    reader.run(f"{SERVER} {SMALL} --set run.directory={directory}")
    reader.run("afl-worker --id 0-3 --server 127.0.0.1:50051")
    reader.settle()


# README.md


def an_environment(reader: Reader) -> None:
    """What make finds installed: it has nothing to fetch."""
    folder = reader.top.parent / "venv"
    folder.mkdir()
    (folder / "bin").symlink_to(reader.programs)
    for stamp in (".tasks", ".dev"):
        (folder / stamp).touch()


def readme_holds(reader: Reader) -> None:
    """The project has made a run."""
    summary = json.loads((reader.top / "hospital/runs/first/summary.json").read_text(encoding="utf-8"))
    assert summary["result"] == "ok"


# docs/tasks.md and docs/run-files.md


def tasks_holds(reader: Reader) -> None:
    """The task of one's own has learned, and the run has written what the table of files says."""
    summary = json.loads((reader.top / "my_run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["result"] == "ok"
    assert summary["last"]["worst_accuracy"] > 0.8
    text = (ROOT / "docs" / "run-files.md").read_text(encoding="utf-8")
    files = r"^\| `([^`/]+\.(?:yaml|jsonl|json|safetensors)|state)/?` \|"
    made = {path.name for path in (reader.top / "my_run").iterdir()} - {"logs"}
    assert made == set(re.findall(files, text, re.MULTILINE))


def run_files_names(reader: Reader) -> dict[str, Any]:
    """``module`` is the module of the task that was trained."""
    return {"module": load_task("synthetic", {}).model()}


def run_files_presumes(reader: Reader) -> None:
    """A complete run, in whose folder the reader is."""
    a_run(reader, "runs/first")
    reader.folder = reader.top / "runs" / "first"


# README.md of a project that `afl new` makes


def project_presumes(reader: Reader) -> None:
    """The project."""
    reader.run("afl new hospital")
    reader.folder = reader.top / "hospital"


def project_holds(reader: Reader) -> None:
    """The folders that it names are there, and a second run is one."""
    for folder in ("runs/first/logs", "runs/separate"):
        assert (reader.folder / folder).is_dir(), folder


# docs/first-hour.md


def first_hour_holds(reader: Reader) -> None:
    """What each section has led to."""
    runs = reader.top / "hospital" / "runs"
    made = ("first", "own", "separate", "machines", *(() if reader.is_quick else ("top-k",)))
    for run in made:
        summary = json.loads((runs / run / "summary.json").read_text(encoding="utf-8"))
        assert summary["result"] == "ok", run
        assert summary["rounds"] == (20 if reader.is_quick else 300)
        assert summary["last"]["worst_accuracy"] > (0.2 if reader.is_quick else 0.5)
    checked = reader.said["afl check task.py:Hospital --config server.yaml"]
    assert "task:Hospital" in checked
    assert "720 to train on, 180 to test on" in " ".join(checked.split())
    assert "LayerNorm" in reader.said["python use.py"]
    # Separate processes of the same seed have made what afl run has.
    models = [(runs / run / "model-final.safetensors").read_bytes() for run in ("own", "separate")]
    assert _tensors(models[0]) == _tensors(models[1])


def _tensors(model: bytes) -> bytes:
    """What follows the header, which names the run."""
    length = int.from_bytes(model[:8], "little")
    return model[8 + length :]


# docs/guide.md


def guide_holds(reader: Reader) -> None:
    """What the commands have made makes a federation, and a site's own key speaks for it."""
    config: dict[str, Any] = reader.configurations[0]
    config["task"] = {"name": "synthetic", "batch_size": 8}
    config["algorithm"]["rounds"] = 5
    certs = reader.top / "certs"
    config["server"] |= {"listen": "localhost:0", "http": "127.0.0.1:0"}
    config["server"]["tls"] = tls(Pair(certs / "server.pem", certs / "server.key"), certs / "ca.pem")
    config["run"]["directory"] = str(reader.top / "federation" / "run")
    made = Pair(reader.top / "worker-0.pem", reader.top / "worker-0.key")
    sent = [Pair(certs / f"worker-{number}.pem", certs / f"worker-{number}.key") for number in (1, 2)]
    with Federation(config, reader.top / "federation") as federation:
        where = f"localhost:{federation.port}"
        trusted = ("--ca", str(certs / "ca.pem"))
        outside = federation.start("1", *trusted, *made.worker_options, server=where)
        outside.expect(3)
        assert "speaks for worker 0, not for worker 1" in outside.text
        for worker, pair in enumerate((made, *sent)):
            federation.start(str(worker), *trusted, *pair.worker_options, server=where)
        federation.finish()


# docs/security.md


def security_presumes(reader: Reader) -> None:
    """Files as another authority has made them, under the names that the page's commands have."""
    identities = Identities(reader.top / "made")
    identities.server()
    three = identities.worker("3")
    identities.worker("0-2", name="others")
    # Worker 3's token is made by hand, as the page says; the line in the server's file is for all four.
    make, digest = [line for line in inline("docs/security.md", "openssl", "tr") if "token-3" in line]
    reader.run(make)
    reader.run(digest)
    (reader.top / "token-3").chmod(0o600)
    line = f"0-3 sha256:{reader.said[digest].split()[0]}\n"
    (reader.top / "made" / "tokens").write_text(line, encoding="utf-8")
    (reader.top / "ca.pem").symlink_to(identities.ca)
    (reader.top / "worker-3.pem").symlink_to(three.certificate)
    (reader.top / "worker-3.key").symlink_to(three.key)


SECURED = (
    f"{SERVER} {SMALL} --set server.listen=:50051"
    " --set server.tls.certificate=made/server.pem --set server.tls.key=made/server.key"
)


# docs/tracking.md


def tracking_presumes(reader: Reader) -> None:
    """Two runs to compare."""
    for name in ("first", "second"):
        a_run(reader, f"runs/{name}")


def tracking_holds(reader: Reader) -> None:
    """The tracker that is shown is told of a round."""
    found: dict[str, Any] = {}
    exec((reader.top / "my_tracker.py").read_text(encoding="utf-8"), found)
    told: list[tuple[object, ...]] = []
    found["print"] = lambda *words: told.append(words)
    folder = reader.top / "tracked"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"event": "round", "round": 1, "loss_max": 0.5}\n')
    following = Following({"printer": found["Printer"]()}, "run-1", folder, reader.configuration({}))
    following.start()
    following.end("finished")
    assert told == [("begins", "run-1", "afl-com"), (1, 0.5), ("finished",)]
    assert (reader.top / "plots").is_dir()


# docs/models.md


def models_presumes(reader: Reader) -> None:
    """A complete run of the task of docs/tasks.md, in the folder that the page names."""
    for block in blocks("docs/tasks.md"):
        name = block.text.partition("\n")[0].removeprefix("# ")
        if name in {"my_task.py", "make_data.py", "my_run.yaml"}:
            (reader.top / name).write_text(block.text, encoding="utf-8")
    reader.run("python make_data.py")
    few = "--set algorithm.rounds=6 --set evaluation.every=3 --set run.directory=runs/fashion-mnist"
    reader.run(f"afl-server --config my_run.yaml {few}")
    reader.run("afl-worker --id 0-1 --server 127.0.0.1:50051 --task my_task:MyTask")
    reader.settle()


def models_names(reader: Reader) -> dict[str, Any]:
    """``MyTask`` is the class of the task that was trained."""
    found: dict[str, Any] = {}
    exec((reader.top / "my_task.py").read_text(encoding="utf-8"), found)
    return {"MyTask": found["MyTask"]}


def protocol_picture(text: str) -> None:
    """The messages in the picture are those of the schema."""
    schema = (ROOT / "proto" / "afl" / "v1" / "federation.proto").read_text(encoding="utf-8")
    for name in ("Join", "Welcome", "Ready", "Step", "Commit", "Report", "Goodbye"):
        if f" {name}" not in text or f"message {name} {{" not in schema:
            raise PageError(f"{name} is not in both the picture and the schema")


# docs/network.md and docs/reproduction.md


def small_fashion_mnist(folder: Path) -> None:
    """Random images in Fashion-MNIST's own files."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (1000, 28, 28), dtype=np.uint8)
    labels = np.arange(1000, dtype=np.uint8) % 10
    for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
        header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
        (raw / f"train-{kind}-ubyte").write_bytes(header + values.tobytes())


def network_presumes(reader: Reader) -> None:
    """Data, and an experiment that is small enough."""
    small_fashion_mnist(reader.top / "data")
    folder = reader.top / "small"
    folder.mkdir()
    method = {"rand-k": {"label": "AFL-Com(R)", "config": "rand-k.yaml"}}
    parts = {"main": {"title": "One method", "seeds": [1]}}
    experiment = {"title": "Two workers", "methods": method, "parts": parts}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(experiment), encoding="utf-8")
    # More rounds than are waited for: an evaluation every 10 of them must come.
    algorithm = {**MINIMAL["algorithm"], "rounds": 50}
    config = {
        **MINIMAL,
        "algorithm": algorithm,
        "task": {"name": "fashion-mnist", "options": {"hidden": [], "partition": "iid"}},
    }
    (folder / "rand-k.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def reproduction_presumes(reader: Reader) -> None:
    """The data sets, or for the short version some images of the size of one."""
    if reader.is_quick:
        small_fashion_mnist(reader.top / "DIR")
    elif DATA is None:
        pytest.skip("the data sets of $AFL_DATA are not here")
    else:
        (reader.top / "DIR").symlink_to(DATA)


def reproduction_holds(reader: Reader) -> None:
    """Something was drawn, and drawn again."""
    drawn = [text for command, text in reader.said.items() if "fashion-mnist" in command]
    assert len(drawn) == 2
    assert all("drawn: main" in text for text in drawn)


LINKS = "python -m afl_benchmarks.over_links --data-dir data --set evaluation.every=10"
SMALL_LINKS = f"{LINKS} --experiment small --methods rand-k --rounds 10"
FEW = "--skip-search --seeds 1 --set algorithm.rounds=2 --set evaluation.every=2 --results small"

# Pages with nothing to hold but what they print.


def as_in_the_first_hour(text: str) -> None:
    """Part of what the first hour's own block shows, which is held against the command."""
    shown = [
        line.strip() for block in blocks("docs/first-hour.md", "text") for line in block.text.splitlines()
    ]
    missing = [line for line in text.splitlines() if line.strip() not in shown]
    if missing:
        raise PageError(f"the first hour shows no such line: {missing[0]}")


def flower_holds(reader: Reader) -> None:
    """The third site is served as the page says."""
    for run, worst in {"fedavg": 0.55, "separate": 0.875}.items():
        summary = json.loads((reader.top / run / "summary.json").read_text(encoding="utf-8"))
        assert summary["last"]["worst_worker"] == 2
        # Another processor rounds otherwise, and the site tests on 40 examples.
        assert abs(summary["last"]["worst_accuracy"] - worst) <= 0.075, run


PAGES: Mapping[str, Page] = {
    page.path: page
    for page in (
        Page(
            "README.md",
            presumes=an_environment,
            holds=readme_holds,
            programs=("make",),
        ),
        Page(PROJECT, presumes=project_presumes, holds=project_holds),
        Page("docs/algorithm.md"),
        Page("docs/compressors.md"),
        Page("docs/costs.md"),
        Page(
            "docs/dual-weights.md",
            pictures={"worker 0  ▃▃▃▃▃▂▃▄▄▃▃▃▃▃▃▃▄▄▃▃▃▃▂▂▃▄▄▃▃▃▃▃▃▃▄▄  0.332": as_in_the_first_hour},
        ),
        Page(
            "docs/first-hour.md",
            holds=first_hour_holds,
            whole_texts=("run           2026",),
            modules=("cryptography",),
            has_whole=True,
        ),
        Page("docs/kubernetes.md", modules=("cryptography",), programs=("kubectl",)),
        Page("docs/from-flower.md", holds=flower_holds),
        Page("docs/guide.md", holds=guide_holds, modules=("cryptography",), programs=("openssl",)),
        Page("docs/models.md", presumes=models_presumes, names=models_names),
        Page("docs/network.md", presumes=network_presumes, has_whole=True),
        Page("docs/observability.md", programs=("prometheus",)),
        Page(
            "docs/protocol.md",
            pictures={"worker process                                        server": protocol_picture},
        ),
        Page(
            "docs/reproduction.md",
            presumes=reproduction_presumes,
            holds=reproduction_holds,
            modules=("matplotlib",),
            has_whole=True,
        ),
        Page("docs/security.md", presumes=security_presumes, modules=("cryptography",)),
        Page("docs/run-files.md", presumes=run_files_presumes, names=run_files_names),
        Page("docs/status-page.md"),
        Page("docs/tasks.md", holds=tasks_holds),
        Page("docs/theory.md"),
        Page(
            "docs/tracking.md",
            presumes=tracking_presumes,
            holds=tracking_holds,
            modules=("matplotlib",),
        ),
    )
}
"""Every page that has blocks."""

REPLACEMENTS = (
    Replacement(
        "docs/costs.md",
        "afl check task.py:Hospital --config server.yaml",
        "",
        "what the first hour's test has is not done again",
    ),
    Replacement(
        "docs/from-flower.md",
        "afl run fedavg.yaml",
        "afl run fedavg.yaml --processes 1",
        "three processes",
    ),
    Replacement("docs/from-flower.md", "afl run afl-com.yaml", "", "the processes below are the same run"),
    Replacement(
        "README.md",
        "make demo",
        'make demo VENV=../venv ARGS="--workers 3 --rounds 6 --processes 1"',
        "nothing is installed; and six rounds",
        needs="sklearn",
    ),
    Replacement(
        "README.md",
        "make demo",
        "make --dry-run demo VENV=../venv",
        "its images come with scikit-learn",
        lacks="sklearn",
    ),
    Replacement(
        "README.md", "make test", "make test VENV=../venv JOBS=0 ARGS=--version", "a test runs this already"
    ),
    Replacement(
        "README.md",
        "afl run server.yaml",
        "afl run server.yaml --set algorithm.rounds=20 --processes 1",
        "300 rounds",
    ),
    Replacement(PROJECT, "@CLASS@", "Hospital", "`afl new` fills it in", part=True),
    Replacement(
        PROJECT,
        "afl run server.yaml",
        "afl run server.yaml --set algorithm.rounds=20 --processes 1",
        "300 rounds",
    ),
    Replacement(
        PROJECT,
        "afl-server --config server.yaml --set run.directory=runs/separate",
        "afl-server --config server.yaml --set run.directory=runs/separate --set algorithm.rounds=20",
        "300 rounds",
    ),
    Replacement(PROJECT, "--id 0 ", "--id 0-2 ", "the sentence before has the others", part=True),
    *(
        Replacement(
            "docs/first-hour.md",
            command,
            f"{command} --set algorithm.rounds=20 --processes 1",
            "300 rounds",
            version="short",
        )
        for command in (
            "afl run server.yaml",
            "afl run server.yaml --set run.directory=runs/own",
        )
    ),
    *(
        Replacement(
            "docs/first-hour.md", command, "", "what the README's test has is not done again", version="short"
        )
        for command in ("python test_task.py", TOP_K)
    ),
    *(
        Replacement(
            "docs/first-hour.md",
            f"afl-server --config server.yaml --set run.directory=runs/{run}",
            f"afl-server --config server.yaml --set algorithm.rounds=20 --set run.directory=runs/{run}",
            "300 rounds",
            part=True,
            version="short",
        )
        for run in ("separate", "machines")
    ),
    *(
        Replacement(
            "docs/kubernetes.md",
            f"kubectl create {what}",
            f"kubectl create --dry-run=client -o name {what}",
            "there is no cluster",
            part=True,
        )
        for what in ("namespace", "secret generic -n afl afl-server", "secret generic -n afl afl-workers")
    ),
    *(
        Replacement(
            "docs/network.md",
            f"{LINKS}{mbit} --out links.jsonl",
            "",
            "33 processes and many minutes",
            version="short",
        )
        for mbit in ("", " --mbit 0")
    ),
    Replacement(
        "docs/network.md",
        "--table links.jsonl",
        "--table docs/network/links.jsonl",
        "nothing was run",
        part=True,
        version="short",
    ),
    *(
        Replacement(
            "docs/network.md",
            f"{LINKS}{mbit} --out links.jsonl",
            f"{SMALL_LINKS}{mbit} --out links.jsonl",
            "a method with two workers instead of three with ten, over ten rounds",
        )
        for mbit in ("", " --mbit 0")
    ),
    *(
        Replacement(
            "docs/reproduction.md",
            f"python -m afl_reproduction {experiment} --jobs 2",
            f"python -m afl_reproduction {experiment} --jobs 2 {options}",
            "an afternoon",
            part=True,
            version=version,
        )
        for experiment, options, version in (
            ("fashion-mnist", f"--parts main {FEW}", ""),
            ("cifar10", "--draw", "short"),
            ("scaling", "--draw", "short"),
            ("cifar10", FEW, "whole"),
            ("scaling", f"--parts femnist-20 digits-500 cifar10-dirichlet-100 {FEW}", "whole"),
        )
    ),
    Replacement(
        "docs/reproduction.md",
        "python -m afl_reproduction fashion-mnist --draw",
        "python -m afl_reproduction fashion-mnist --draw --parts main --results small",
        "the runs are there",
        part=True,
    ),
    Replacement(
        "docs/models.md",
        "afl export runs/fashion-mnist --out exported --force --torchscript --onnx",
        "afl export runs/fashion-mnist --out exported --force --torchscript --onnx --task my_task:MyTask",
        "the task is not an installed one, and the page says what then",
    ),
    Replacement(
        "docs/models.md",
        " --onnx",
        "",
        "onnx is not installed",
        part=True,
        lacks="onnx",
    ),
    Replacement(
        "docs/security.md",
        OUTSIDE.format("3"),
        f"{SECURED} --set run.directory=runs/tls\n{OUTSIDE.format('0-3')}",
        "it needs a server, and all four workers",
    ),
    Replacement(
        "docs/security.md",
        THREE,
        f"{SECURED} --set server.tls.client_ca=made/ca.pem --set run.directory=runs/mutual\n"
        f"{OUTSIDE.format('0-2')} --certificate made/others.pem --key made/others.key\n{THREE}",
        "it needs a server, and all four workers",
    ),
    Replacement(
        "docs/security.md",
        f"{OUTSIDE.format('3')} --token-file token-3",
        f"{SECURED} --set server.tokens=made/tokens --set run.directory=runs/tokens\n"
        f"{OUTSIDE.format('0-3')} --token-file token-3",
        "it needs a server, and all four workers",
    ),
    Replacement(
        "docs/theory.md",
        "python -m afl_reproduction.bounds --workers 4 16 64 256 --centres 2",
        "python -m afl_reproduction.bounds --workers 4 16 --centres 2 --rounds 9",
        "5 minutes",
    ),
    Replacement("docs/theory.md", "--rounds 10000", "--rounds 100", "1.5 minutes", part=True),
)
"""All that is other than on the pages, but for what the reader does everywhere."""


def follow(path: str, folder: Path, *, is_quick: bool = True) -> None:
    """Do what a page says, in an empty folder."""
    page = PAGES[path]
    for module in page.modules:
        pytest.importorskip(module)
    for program in page.programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on this machine")
    Reader(page, folder, replacements=REPLACEMENTS, not_run=NOT_RUN, is_quick=is_quick).follow()
