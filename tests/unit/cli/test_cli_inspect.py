"""``afl inspect`` on files as a run writes them, on damaged ones and on others'."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from afl.runs.files import read_model
from afl_cli.main import main

COUNT = {
    "wire_bytes": 1000,
    "wire_bytes_by_kind": {"gradient": 900, "model": 0, "evaluation": 50, "control": 50},
    "payload_bytes_by_part": {"values": 800, "indices": 0, "scalars": 100, "envelope": 100},
    "frames": 10,
    "float_equivalents": 200.0,
    "float_equivalents_as_bytes": 800.0,
}

SUMMARY = {
    "run_id": "20260101-000000-abcdef",
    "afl_version": "0.1.0",
    "result": "ok",
    "reason": "the run is complete",
    "algorithm": "afl-com",
    "task": "digits",
    "workers": 2,
    "rounds": 40,
    "seconds": 12.5,
    "last": None,
    "best": None,
    "communication": {"uplink": COUNT, "downlink": COUNT},
    "models": [],
}


def metrics_lines(rounds: int, *, accuracy: bool = True) -> list[str]:
    lines = []
    for round_ in range(1, rounds + 1):
        sizes = {"uplink_bytes": 1000 * round_, "downlink_bytes": 2000 * round_}
        line = {"event": "round", "round": round_, "seconds": 0.25, "loss_max": 2.0, "loss_max_worker": 1}
        lines.append({**line, "loss_mean": 1.5, "dual_weight_max": 0.6, **sizes})
        evaluation = {"event": "evaluation", "round": round_, "worst_worker": round_ % 2, "max_loss": 1.5}
        accuracies = {
            "worst_accuracy": round_ / 100 if accuracy else None,
            "mean_accuracy": 0.9 if accuracy else None,
        }
        lines.append({**evaluation, "mean_loss": 1.25, **accuracies, **sizes})
    return [json.dumps(line) for line in lines]


def test_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model-final.safetensors"
    tensors = {"0.weight": torch.ones(3, 4), "0.bias": torch.zeros(3, dtype=torch.bfloat16)}
    tensors |= {"scale": torch.tensor(2.0), "empty": torch.zeros(0, 5)}
    save_file(tensors, path, {"afl_version": "0.1.0", "task": "digits", "rounds_applied": "7"})
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "16 in 4 tensors",
        "3 x 4",
        "bfloat16",
        "scalar",
        "0 x 5",
        "digits",
        read_model(path).digest,
    ):
        assert expected in shown
    assert "not written by afl" not in shown


def test_a_models_digest_is_of_its_parameters_alone(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2)}
    one, other, changed = (tmp_path / f"{name}.safetensors" for name in ("one", "other", "changed"))
    save_file(tensors, one, {"run_id": "1"})
    save_file(dict(reversed(tensors.items())), other, {"run_id": "2"})
    assert read_model(one).digest == read_model(other).digest
    for change in ({"b": torch.tensor([0.0, -0.0])}, {"a": torch.arange(6.0).reshape(3, 2)}):
        save_file({**tensors, **change}, changed, {"run_id": "1"})
        assert read_model(changed).digest != read_model(one).digest
    save_file({"a": tensors["a"], "c": tensors["b"]}, changed)
    assert read_model(changed).digest != read_model(one).digest


def test_names_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]52;c;ZXZpbA==\x07\u202e\nforged"
    model = tmp_path / "model-final.safetensors"
    save_file({evil: torch.zeros(2)}, model, {"task": evil})
    lines = [json.loads(line) for line in metrics_lines(2)]
    for line in lines:
        line["workers"] = [{"loss": 1.0, evil: 2.0}] * 2
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    for path in (model, tmp_path / "metrics.jsonl"):
        assert main(["inspect", str(path)]) == 0
        shown = capsys.readouterr().out
        assert "\\x1b]52" in shown
        assert not {"\x1b", "\x07", "\u202e"} & set(shown)


def test_somebody_elses_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.safetensors"
    save_file({f"layer.{index}": torch.zeros(1) for index in range(30)}, path)
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "not written by afl" in shown
    assert "and 10 more (--all shows them)" in shown
    assert main(["inspect", "--all", str(path)]) == 0
    assert "more (" not in capsys.readouterr().out


def test_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(metrics_lines(50)) + "\n")
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    for expected in ("50 closed", "0.0100", "0.5000", "20 of 50", "100.00 kB"):
        assert expected in shown
    assert main(["inspect", "--all", str(path)]) == 0
    assert "0.4900" in capsys.readouterr().out


def test_metrics_where_dual_weights_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics_lines(15)]
    for line in lines:
        if line["event"] == "evaluation":
            line |= {"block": 4, "rounds_since_restart": (line["round"] - 1) % 4 + 1}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    text = " ".join(shown.replace("\u2502", " ").split())
    # Rounds 12 to 15.
    assert (
        "worst accuracy 0.135 (mean over workers 0.900), mean of 4 evaluations in the last 4 rounds" in text
    )
    rows = [line.split("\u2502") for line in shown.splitlines() if "kB" in line]
    assert [(row[1].strip(), row[2].strip()) for row in rows][-3:] == [("13", "1"), ("14", "2"), ("15", "3")]


def test_metrics_without_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(metrics_lines(3, accuracy=False)) + "\n")
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "largest loss" in shown
    assert "mean accuracy" not in shown
    assert "own metrics" not in shown
    assert "warning" not in shown


def test_metrics_of_the_task_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics_lines(30, accuracy=False)]
    for line in lines:
        if line["event"] == "evaluation":
            entries = [{"loss": 1.0, "mae": 0.125}, {"loss": 1.5, "mae": 0.375}]
            line["workers"] = [{**entry, "r2": 0.5, "a": 1, "b": 2, "c": 3} for entry in entries]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out.partition("The task's own metrics")[2]
    rows = [line.replace("│", "").split() for line in shown.splitlines() if "│" in line]
    assert rows[:2] == [
        ["1", "1", "1", "1", "2", "2", "3", "3", "0.375", "0.25"],
        ["2", "0", "1", "1", "2", "2", "3", "3", "0.125", "0.25"],
    ]
    assert len(rows) == 20
    assert "20 of 30 evaluations, 4 of 5 metrics (--all shows every one)" in shown
    assert main(["inspect", "--all", str(path)]) == 0
    everything = capsys.readouterr().out.partition("The task's own metrics")[2]
    assert "its r2" in " ".join(everything.split())
    assert "--all" not in everything


def test_metrics_with_residuals_by_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics_lines(5)]
    for line in lines[1::2]:
        norms = {f"layers.{index}.weight": 10.0 * index * line["round"] for index in range(30)}
        line["tensor_residual_norms"] = {**norms, "layers.7.weight": 0.125}
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out.partition("Residuals: the largest norm")[2]
    assert [f"after round {round_}" in " ".join(shown.split()) for round_ in range(1, 6)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    rows = [line.replace("│", "").split() for line in shown.splitlines() if "layers" in line]
    assert rows[0] == ["layers.29.weight", "290", "870", "1450"]
    assert len(rows) == 20
    assert "20 of 30 tensors (--all shows every one)" in shown
    assert main(["inspect", "--all", str(path)]) == 0
    everything = capsys.readouterr().out.partition("Residuals: the largest norm")[2]
    assert ["layers.7.weight", *["0.125"] * 3] in [
        line.replace("│", "").split() for line in everything.splitlines()
    ]


def test_metrics_of_a_loss_that_has_grown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics_lines(3)]
    lines[-1]["max_loss"] = 4e9
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert main(["inspect", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert (
        "the largest loss has grown from 1.5 after round 1 to 4e+09 after round 3; begin again with" in said
    )


def test_metrics_with_a_warning_of_a_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = metrics_lines(3)
    warned = {**json.loads(lines[-1]), "warnings": ["worker 1 is served worst (\x07)"]}
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*lines[:-1], json.dumps({**warned, "sites": ["north", "south"]})]), "utf-8")
    assert main(["inspect", str(path)]) == 0
    assert "worker 1 (south) is served worst (\\x07)" in capsys.readouterr().out
    path.write_text("\n".join([json.dumps(warned), *lines]), "utf-8")
    assert main(["inspect", str(path)]) == 0
    assert "served worst" not in capsys.readouterr().out, "it is so no more"


def test_metrics_cut_in_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(metrics_lines(3))[:-20])
    assert main(["inspect", str(path)]) == 0
    assert "cut in the middle" in capsys.readouterr().out


def test_metrics_damaged_before_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = metrics_lines(3)
    path.write_text("\n".join([lines[0], lines[1][:10], *lines[2:]]))
    assert main(["inspect", str(path)]) == 7
    assert f"{path}:2" in capsys.readouterr().err


def test_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(SUMMARY))
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    for expected in ("20260101-000000-abcdef", "40 in 12.5 s", "gradient", "900 B", "envelope", "uplink"):
        assert expected in shown


def test_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "workers: 4\n"
        "task: {name: synthetic}\n"
        "algorithm: {name: afl-com, rounds: 100, eta_w: theory, smoothness: 2.0, eta_q: 0.5,\n"
        "            uplink: {name: top-k, ratio: 0.5}}\n"
    )
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    for expected in ("valid", "100 rounds", "every 10", "from theory", "top-k (ratio 0.5)", "parameters"):
        assert expected in shown


@pytest.mark.parametrize(
    ("compressors", "values", "integers"),
    [
        (
            "uplink: {name: rand-k, ratio: 0.5}",
            "200 B up a worker, 200 B down a connection; uncompressed 404 B each",
            "",
        ),
        (
            "uplink: {name: rand-k, ratio: 0.5, bits: 4}",
            "at most 27 B up a worker, at most 40 B down a connection; uncompressed 404 B each",
            "4 bits up, 6 down at fixed width, which is the most; entropy-coded where that is shorter",
        ),
        (
            "uplink: {name: rand-k, ratio: theory}, downlink: {bits: 8}",
            "344 B up a worker, at most 103 B down a connection; uncompressed 404 B each",
            "8 down at fixed width, which is the most",
        ),
    ],
)
def test_the_values_of_a_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compressors: str, values: str, integers: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "workers: 4\ntask: {name: synthetic, options: {dim: 101}}\n"
        f"algorithm: {{name: afl-com, rounds: 3, eta_w: 0.1, eta_q: 0.1, {compressors}}}\n"
    )
    assert main(["inspect", str(path)]) == 0
    shown = [line.replace("│", "").split() for line in capsys.readouterr().out.splitlines() if "│" in line]
    text = " ".join(" ".join(line) for line in shown)
    assert values in text
    assert integers in text
    assert ("integers" in text) is bool(integers)


@pytest.mark.parametrize(
    ("server", "seed", "said"),
    [
        ("{listen: '127.0.0.1:0', http: '127.0.0.1:0'}", "17", "a free port of 127.0.0.1; http on a free"),
        ("{listen: '127.0.0.1:5', http: null}", "'0x11'", "127.0.0.1:5; no http"),
    ],
)
def test_a_configuration_s_seed_and_ports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], server: str, seed: str, said: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"workers: 4\ntask: {{name: synthetic}}\nserver: {server}\nrun: {{seed: {seed}}}\n"
        "algorithm: {name: afl-br, rounds: 3, eta_w: 0.1, eta_q: 0.1}\n"
    )
    assert main(["inspect", str(path)]) == 0
    shown = [line.replace("│", "").split() for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = {line[0]: " ".join(line[1:]) for line in shown}
    assert rows["seed"] == "17"
    assert rows["listens"].startswith(said)
    assert "127.0.0.1:0" not in rows["listens"]


def test_a_configuration_whose_task_is_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')\n")
    path = tmp_path / "run.yaml"
    path.write_text(
        "workers: 1\ntask: {name: 'evil:Task'}\n"
        "algorithm: {name: afl-br, rounds: 3, eta_w: 0.1, eta_q: 0.1}\n"
    )
    assert main(["inspect", str(path)]) == 0
    assert "not loaded to inspect" in capsys.readouterr().out


def test_a_wrong_configuration_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("workers: 4\ntask: {name: digits}\nalgoritm: {}\n")
    assert main(["inspect", str(path)]) == 2
    assert "algorithm" in capsys.readouterr().err


def test_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "metrics.jsonl").write_text("\n".join(metrics_lines(3)))
    served = {"random": {}, "final": {"max_loss": "0.5625"}}
    served["best"] = {"max_loss": "0.5", "worst_accuracy": "0.875"}
    for name, metadata in served.items():
        path = tmp_path / f"model-{name}.safetensors"
        save_file({"w": torch.ones(2)}, path, {"afl_version": "0.1.0", "rounds_applied": "3", **metadata})
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for expected in ("Evaluations", read_model(path).digest):
        assert expected in shown
    for name, said in (("random", "not evaluated"), ("final", "loss 0.5625"), ("best", "accuracy 0.8750")):
        (line,) = [line for line in shown.splitlines() if f"model-{name}" in line]
        assert said in line
    assert "UNFINISHED" not in shown


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "none was closed"),
        ("\n".join(metrics_lines(3)) + "\n", "3 is the last that metrics.jsonl has"),
        ("\n".join(metrics_lines(3))[:-200], "2 is the last that metrics.jsonl has"),
    ],
)
def test_a_run_directory_whose_server_died(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    (tmp_path / "config.yaml").write_text(
        "workers: 2\ntask: {name: digits}\nalgorithm: {name: afl-br, rounds: 9, eta_w: 0.1, eta_q: 0.1}\n"
    )
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for expected in ("UNFINISHED", "no summary.json", said, "9 rounds"):
        assert expected in shown


@pytest.mark.parametrize(
    ("name", "content", "code", "said"),
    [
        ("missing.yaml", None, 2, "no such file"),
        ("notes.txt", b"hello", 2, "not a file that afl writes"),
        ("m.safetensors", b"PK\x03\x04 a zip archive", 7, "damaged"),
        ("m.safetensors", b"\xff" * 16, 7, "damaged"),
        ("m.safetensors", b"", 7, "damaged"),
        ("package.json", b'{"name": "x"}', 2, "not the summary of a run"),
        ("summary.json", b"{", 7, "not JSON"),
        ("summary.json", json.dumps({**SUMMARY, "communication": {"uplink": {}}}).encode(), 7, "lacks"),
        ("metrics.jsonl", b"", 2, "no rounds"),
        ("metrics.jsonl", b'{"event": "evaluation", "round": 1}\n', 7, "lacks"),
        ("metrics.jsonl", b"[1]\n", 7, "not an object"),
        ("run.yaml", b"\xff\xfe", 2, "UTF-8"),
    ],
)
def test_other_files_are_named_for_what_they_are_not(
    name: str,
    content: bytes | None,
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["inspect", str(path)]) == code
    error = capsys.readouterr().err
    assert said in error
    assert name in error


def test_an_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
