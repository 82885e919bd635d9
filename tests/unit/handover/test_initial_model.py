"""``run.initial_model``: what a file must hold, what the run then begins with, and what a misfit says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import afl
from afl.core.model.buffers import BufferPolicy
from afl.core.model.parameters import ParameterVector
from afl.runs.files import read_model
from afl.runs.initial_model import load_initial_model


class Odd(nn.Module):
    """bfloat16, frozen, tied, empty and transposed parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rough = nn.Parameter(torch.randn(3, 2).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.randn(2, 3).t())


def vector_of(module: nn.Module, buffers: BufferPolicy = "refuse") -> ParameterVector:
    return ParameterVector(module, buffers=buffers)


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def test_what_a_run_saved_and_a_modules_own_state_are_taken_to_the_bit(tmp_path: Path) -> None:
    source = vector_of(Odd())
    source.load(torch.randn(source.dim).numpy())
    with torch.no_grad():
        source.module.get_parameter("frozen").add_(1)
    saved = written(tmp_path / "run.safetensors", {n: t.clone() for n, t in source.named_values().items()})
    target = vector_of(Odd())
    load_initial_model(target, saved)
    assert target.digest() == source.digest()
    assert target.frozen_bytes() == source.frozen_bytes()
    assert target.initial_digest == read_model(saved).digest
    for one, other in zip(source.module.parameters(), target.module.parameters(), strict=True):
        assert torch.equal(one, other)
    # As safetensors saves a module: one name of what is tied, the module's own types, and nothing empty.
    named = dict(source.module.named_parameters())
    del named["empty"]
    other = vector_of(Odd())
    load_initial_model(other, written(tmp_path / "module.safetensors", named))
    rounded = [p.detach().float().flatten() for p in source.module.parameters() if p.requires_grad]
    assert torch.equal(other.values, torch.cat(rounded))


def test_averaged_buffers_are_begun_with_and_counts_begin_anew(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    source(torch.randn(8, 2))
    path = written(tmp_path / "m.safetensors", source.state_dict())
    target = vector_of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "mean")
    load_initial_model(target, path)
    assert torch.equal(target.module.get_buffer("1.running_var"), source.get_buffer("1.running_var"))
    assert int(target.module.get_buffer("1.num_batches_tracked")) == 0
    local = vector_of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "local")
    with pytest.raises(afl.DataError, match=r"1\.running_mean is not sent to the workers, and has other"):
        load_initial_model(local, path)
    same = {**source.state_dict(), **dict(local.module.named_buffers())}
    load_initial_model(local, written(tmp_path / "same.safetensors", same))
    assert torch.equal(local.module.get_parameter("0.weight"), source.get_parameter("0.weight"))


def test_a_narrower_type_is_taken_and_a_wider_one_is_refused(tmp_path: Path) -> None:
    half = {name: tensor.to(torch.bfloat16) for name, tensor in nn.Linear(2, 3).state_dict().items()}
    vector = vector_of(nn.Linear(2, 3))
    load_initial_model(vector, written(tmp_path / "half.safetensors", half))
    assert torch.equal(vector.module.get_parameter("weight"), half["weight"].float())
    double = {name: tensor.double() for name, tensor in half.items()}
    with pytest.raises(
        afl.DataError,
        match=r"weight is float64, and float32 in the model; bias is float64, and float32 in the model$",
    ):
        load_initial_model(vector, written(tmp_path / "double.safetensors", double))
    whole = {**half, "bias": torch.zeros(3, dtype=torch.int8)}
    with pytest.raises(afl.DataError, match="bias is int8, and float32 in the model"):
        load_initial_model(vector, written(tmp_path / "whole.safetensors", whole))


def test_everything_that_differs_is_named_and_the_model_stays(tmp_path: Path) -> None:
    vector = vector_of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    before = vector.digest()
    path = written(
        tmp_path / "other.safetensors",
        {
            "0.weight": torch.zeros(3, 3),
            "0.bias": torch.full((3,), torch.nan),
            "1.weight": torch.zeros(1, 3),
            "head.weight": torch.zeros(1),
        },
    )
    with pytest.raises(afl.DataError) as found:
        load_initial_model(vector, path)
    assert str(found.value) == (
        f"run.initial_model: {path} does not fit the model Sequential: the model has no head.weight; "
        "0.weight has the shape [3, 3], and [3, 2] in the model; 0.bias has values that are not finite; "
        "the file lacks 1.bias"
    )
    assert vector.digest() == before
    assert not vector.initial_digest


def test_tied_names_that_differ_and_a_wrappers_prefix_are_told(tmp_path: Path) -> None:
    vector = vector_of(Odd())
    tensors = {name: tensor.clone() for name, tensor in vector.named_values().items()}
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(afl.DataError, match=r"and 4 more\. Without 'module\.' in front, its names are the"):
        load_initial_model(vector, written(tmp_path / "wrapped.safetensors", wrapped))
    tensors["second.weight"] += 1
    with pytest.raises(afl.DataError, match=r"first\.weight and second\.weight share their values"):
        load_initial_model(vector, written(tmp_path / "tied.safetensors", tensors))


def test_a_file_that_is_not_there_or_no_safetensors_is_told(tmp_path: Path) -> None:
    vector = vector_of(nn.Linear(2, 3))
    with pytest.raises(afl.ConfigError, match=r"run\.initial_model: .*none: no such file; only the server"):
        load_initial_model(vector, tmp_path / "none")
    with pytest.raises(afl.ConfigError, match=r"run\.initial_model: .*: a folder, no safetensors file; only"):
        load_initial_model(vector, tmp_path)
    (tmp_path / "text").write_text("weights")
    with pytest.raises(afl.DataError, match=r"run\.initial_model: .*text: no safetensors file"):
        load_initial_model(vector, tmp_path / "text")
