"""How each page is followed: what it presumes, what is other than it says, and what of it cannot be run here.

A new page needs an entry in :data:`PAGES`; its blocks are then followed as :mod:`documentation_reader` says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from documentation_exempt import NOT_RUN
from documentation_reader import Page, PageError, Reader, Replacement

from afl.tasks.registry import load_task
from afl.tracking.following import Following
from support import Federation
from support.identities import Identities, Pair, tls
from support.pages import ROOT, blocks

__all__ = ["NOT_RUN", "PAGES", "REPLACEMENTS", "follow"]

SMALL = "--set task.name=synthetic --set workers=4 --set algorithm.rounds=6 --set evaluation.every=3"
IN_SMALL = "Fashion-MNIST is not everywhere, and 2000 rounds take minutes"

SERVER = "afl-server --config deploy/server.yaml"
TLS = (
    "--set server.listen=:50051 --set server.tls.certificate=certs/server.pem --set server.tls.key=certs/server.key"
    " --set server.tls.client_ca=certs/ca.pem"
)


def four_workers(ca: str, certificate: str, key: str) -> str:
    """The commands of workers 0 to 3, in whose file names N is the id."""
    return "\n".join(
        f"afl-worker --id {n} --server server.example.org:50051"
        f" --ca {ca} --certificate {certificate} --key {key}".replace("-N.", f"-{n}.")
        for n in range(4)
    )


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


def readme_names(reader: Reader) -> dict[str, Any]:
    """``module`` is the module of the task that was trained."""
    return {"module": load_task("synthetic", {}).model()}


def readme_holds(reader: Reader) -> None:
    """The task of one's own has learned, and the run has written what the table says."""
    summary = json.loads((reader.top / "my_run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["result"] == "ok"
    assert summary["last"]["worst_accuracy"] > 0.8
    assert (reader.top / "plots").is_dir()
    assert (reader.top / "exported" / "card.json").is_file()


# docs/first-hour.md


def first_hour_holds(reader: Reader) -> None:
    """What each section has led to."""
    runs = reader.top / "hospital" / "runs"
    for run in ("first", "top-k", "own", "separate", "machines"):
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
    """The configuration and the certificates that the commands have made run, and a site's own key speaks for it."""
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
    server, three = identities.server(), identities.worker("3")
    identities.worker("0-2", name="others")
    (reader.top / "token-3").write_bytes(identities.token("0-3").read_bytes())
    (reader.top / "token-3").chmod(0o600)
    (reader.top / "ca.pem").symlink_to(identities.ca)
    (reader.top / "worker-3.pem").symlink_to(three.certificate)
    (reader.top / "worker-3.key").symlink_to(three.key)
    (reader.top / "made" / "server.pem").exists()
    assert server.key.is_file()


SECURED = (
    f"{SERVER} {SMALL} --set server.listen=:50051"
    " --set server.tls.certificate=made/server.pem --set server.tls.key=made/server.key"
)


# docs/tracking.md


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
    """A complete run of the README's own task, in the folder that the page names."""
    for block in blocks("README.md"):
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


PAGES: Mapping[str, Page] = {
    page.path: page
    for page in (
        Page(
            "README.md",
            presumes=an_environment,
            names=readme_names,
            holds=readme_holds,
            back_at=("A first federation across machines",),
            modules=("cryptography", "matplotlib"),
            programs=("make",),
        ),
        Page("docs/compressors.md"),
        Page("docs/first-hour.md", holds=first_hour_holds, modules=("cryptography",), has_whole=True),
        Page("docs/guide.md", holds=guide_holds, modules=("cryptography",), programs=("openssl",)),
        Page(
            "docs/models.md", presumes=models_presumes, names=models_names
        ),
        Page("docs/observability.md", programs=("prometheus",)),
        Page(
            "docs/protocol.md",
            pictures={"worker process                                        server": protocol_picture},
        ),
        Page("docs/security.md", presumes=security_presumes, modules=("cryptography",)),
        Page("docs/status-page.md"),
        Page("docs/theory.md"),
        Page(
            "docs/tracking.md",
            presumes=lambda reader: [a_run(reader, f"runs/{name}") for name in ("first", "second")] and None,
            holds=tracking_holds,
            modules=("matplotlib",),
        ),
    )
}
"""Every page that has blocks."""

REPLACEMENTS = (
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
    Replacement("README.md", SERVER, f"{SERVER} {SMALL}", IN_SMALL),
    Replacement(
        "README.md",
        f"{SERVER} {TLS}",
        f"{SERVER} {TLS} {SMALL} --set run.directory=runs/second",
        f"{IN_SMALL}; a run beside the one before needs a folder of its own",
    ),
    Replacement(
        "README.md",
        "afl-worker --id 3 --server server.example.org:50051 --ca ca.pem --certificate worker-3.pem --key worker-3.key"
        " --data-dir data",
        four_workers("certs/ca.pem", "certs/worker-N.pem", "certs/worker-N.key"),
        "all four workers are on this machine, where the files are still in certs",
    ),
    Replacement(
        "README.md",
        f"{SERVER} --set server.listen=10.8.0.1:50051 --set server.insecure=true",
        f"{SERVER} --set server.listen=10.8.0.1:50051 --set server.insecure=true {SMALL} --set run.directory=runs/third\n"
        "afl-worker --id 0-3 --server 10.8.0.1:50051 --insecure",
        f"{IN_SMALL}; the sentence below it has the workers",
    ),
    Replacement(
        "README.md",
        "afl-worker --id 3 --server 127.0.0.1:50051 --data-dir data",
        "afl-worker --id 0-3 --server 127.0.0.1:50051 --data-dir data",
        "all four workers, in one process",
    ),
    Replacement("README.md", "runs/NAME", "runs/fashion-mnist", "the name of the run", part=True),
    Replacement(
        "README.md",
        '"model-final.safetensors"',
        '"runs/fashion-mnist/model-final.safetensors"',
        "the reader is not in the run's folder",
        part=True,
    ),
    Replacement(
        "README.md",
        "afl plot runs/first runs/second",
        "afl plot runs/fashion-mnist runs/second",
        "the names of the runs",
    ),
    Replacement(
        "README.md",
        "afl-server --config my_run.yaml",
        "python make_data.py\nafl-server --config my_run.yaml",
        "the sentence before says so",
    ),
    *(
        Replacement(
            "docs/first-hour.md",
            command,
            f"{command} --set algorithm.rounds=20 --processes 1",
            "300 rounds",
            quick=True,
        )
        for command in (
            "afl run server.yaml",
            "afl run server.yaml --set run.directory=runs/top-k --set algorithm.uplink.name=top-k",
            "afl run server.yaml --set run.directory=runs/own",
        )
    ),
    *(
        Replacement(
            "docs/first-hour.md",
            f"afl-server --config server.yaml --set run.directory=runs/{run}",
            f"afl-server --config server.yaml --set algorithm.rounds=20 --set run.directory=runs/{run}",
            "300 rounds",
            part=True,
            quick=True,
        )
        for run in ("separate", "machines")
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
        "afl-worker --id 3 --server server.example.org:50051 --ca ca.pem",
        f"{SECURED} --set run.directory=runs/tls\nafl-worker --id 0-3 --server server.example.org:50051 --ca ca.pem",
        "it needs a server, and all four workers",
    ),
    Replacement(
        "docs/security.md",
        "afl-worker --id 3 --server server.example.org:50051 --ca ca.pem --certificate worker-3.pem --key worker-3.key",
        f"{SECURED} --set server.tls.client_ca=made/ca.pem --set run.directory=runs/mutual\n"
        "afl-worker --id 0-2 --server server.example.org:50051 --ca ca.pem --certificate made/others.pem"
        " --key made/others.key\n"
        "afl-worker --id 3 --server server.example.org:50051 --ca ca.pem --certificate worker-3.pem --key worker-3.key",
        "it needs a server, and all four workers",
    ),
    Replacement(
        "docs/security.md",
        "afl-worker --id 3 --server server.example.org:50051 --ca ca.pem --token-file token-3",
        f"{SECURED} --set server.tokens=made/tokens --set run.directory=runs/tokens\n"
        "afl-worker --id 0-3 --server server.example.org:50051 --ca ca.pem --token-file token-3",
        "it needs a server, and all four workers",
    ),
    Replacement(
        "docs/theory.md",
        "python -m afl_lab.bounds --workers 4 16 64 256 --centres 2",
        "python -m afl_lab.bounds --workers 4 16 --centres 2 --rounds 9",
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
