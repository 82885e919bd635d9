"""The flat parameter vector of any module: views, other types, ties, frozen parts, hashes and bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from afl.core.model.parameters import ParameterVector
from afl.errors import TaskError


class Bare(nn.Module):
    """Just the parameters given, by name."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            setattr(self, name, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor))


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


INPUTS = torch.linspace(-1, 1, 15).view(5, 3)


def gradient_of(vector: ParameterVector, loss: Callable[[nn.Module], Tensor]) -> list[float]:
    vector.clear_gradient()
    loss(vector.module).backward()  # type: ignore[no-untyped-call]
    found = torch.empty(vector.dim)
    vector.gradient().write(found)
    return found.tolist()


def squared_output(module: nn.Module) -> Tensor:
    return (module(INPUTS) ** 2).mean()


# Layout.


def test_values_are_the_parameters_in_named_parameters_order() -> None:
    module = Bare(b=torch.tensor([1.0, 2.0]), a=torch.tensor([[3.0, 4.0], [5.0, 6.0]]), c=torch.tensor(7.0))
    vector = ParameterVector(module)
    assert vector.dim == 7
    assert vector.values.dtype == torch.float32
    assert vector.values.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_float32_parameters_are_views() -> None:
    vector = ParameterVector(small())
    start = 0
    for parameter in vector.module.parameters():
        assert parameter.data_ptr() == vector.values[start:].data_ptr()
        start += parameter.numel()
    assert start == vector.dim == 3 * 4 + 4 + 4 * 2 + 2
    vector.values.zero_()
    assert vector.module(INPUTS).abs().max() == 0


def test_the_gradient_is_autograd_s_and_is_taken_from_the_module() -> None:
    twin = small()
    right = torch.autograd.grad(squared_output(twin), list(twin.parameters()))
    vector = ParameterVector(small())
    assert gradient_of(vector, squared_output) == torch.cat([part.reshape(-1) for part in right]).tolist()
    assert all(parameter.grad is None for parameter in vector.module.parameters())
    # A second round does not add to the first.
    assert gradient_of(vector, squared_output) == torch.cat([part.reshape(-1) for part in right]).tolist()


def test_a_sparse_gradient_is_made_dense() -> None:
    vector = ParameterVector(nn.Embedding(3, 2, sparse=True))
    found = gradient_of(vector, lambda m: m(torch.tensor([2, 0, 2])).sum())
    assert found == [1, 1, 0, 0, 2, 2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(12.0).view(3, 4)[:, ::2],
        torch.arange(8.0)[::2].view(2, 2),
        torch.tensor(5.0).expand(3, 2),
    ],
    ids=["transposed", "strided", "every-second", "expanded"],
)
def test_a_parameter_that_is_not_contiguous_keeps_its_logical_order(tensor: Tensor) -> None:
    module = Bare(before=torch.zeros(1), p=nn.Parameter(tensor))
    vector = ParameterVector(module)
    assert vector.values[1:].tolist() == [value for row in tensor.tolist() for value in row]
    assert torch.equal(module.get_parameter("p"), tensor)
    weights = torch.arange(float(tensor.numel())).view(tensor.shape)
    found = gradient_of(vector, lambda m: (m.get_parameter("p") * weights).sum())
    assert found == [0.0, *weights.reshape(-1).tolist()]


def test_a_channels_last_convolution_computes_the_same_and_has_the_same_gradient() -> None:
    images = torch.linspace(-1, 1, 2 * 3 * 5 * 5).view(2, 3, 5, 5)

    def loss(module: nn.Module) -> Tensor:
        result: Tensor = (module(images.to(memory_format=torch.channels_last)) ** 2).sum()
        return result

    torch.manual_seed(1)
    plain = nn.Conv2d(3, 4, 3)
    twin = nn.Conv2d(3, 4, 3)
    twin.load_state_dict(plain.state_dict())
    right = torch.autograd.grad(loss(twin), list(twin.parameters()))
    vector = ParameterVector(plain.to(memory_format=torch.channels_last))
    assert vector.values.tolist() == [*twin.weight.detach().reshape(-1).tolist(), *twin.bias.tolist()]  # type: ignore[union-attr]
    np.testing.assert_allclose(
        gradient_of(vector, loss), torch.cat([part.reshape(-1) for part in right]), rtol=1e-4, atol=1e-5
    )


def test_tied_parameters_count_once_and_gather_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(2, 2, bias=False)
            self.decode = nn.Linear(2, 2, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.decode(self.encode(x))
            return result

    module = Tied()
    with torch.no_grad():
        module.encode.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    vector = ParameterVector(module)
    assert vector.dim == 4
    assert module.decode.weight is module.encode.weight
    # f(w) = 1' w w x with x = (1, 2), at w = 1: the gradient is 1 x' + 1 x'.
    found = gradient_of(vector, lambda m: m(torch.tensor([1.0, 2.0])).sum())
    assert found == [2.0, 4.0, 2.0, 4.0]


def test_zero_elements_and_scalars_have_their_places() -> None:
    module = Bare(empty=torch.zeros(0, 3), scalar=torch.tensor(2.0), none=torch.zeros(0), pair=torch.ones(2))
    vector = ParameterVector(module)
    assert vector.values.tolist() == [2.0, 1.0, 1.0]
    found = gradient_of(
        vector, lambda m: m.get_parameter("scalar") * m.get_parameter("pair").sum() + m.empty.sum()
    )
    assert found == [2.0, 2.0, 2.0]
    vector.load(np.array([5, 6, 7], np.float32))
    assert module.get_parameter("scalar").item() == 5.0
    assert module.get_parameter("empty").shape == (0, 3)


# Other floating types.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_type_has_a_float32_master_copy(dtype: torch.dtype) -> None:
    module = Bare(p=torch.tensor([1.0, 2.0], dtype=dtype), q=torch.tensor([3.0]))
    vector = ParameterVector(module)
    parameter = module.get_parameter("p")
    assert parameter.dtype == dtype
    assert vector.values.tolist() == [1, 2, 3]
    found = gradient_of(
        vector, lambda m: (m.get_parameter("p").to(torch.float32) ** 2).sum() + m.get_parameter("q").sum()
    )
    assert found == [2.0, 4.0, 1.0]
    # Too small a step for the parameter's own type is kept in the master copy.
    vector.values -= torch.tensor([2.0**-12, 0.5, 1.0])
    assert parameter.tolist() == [1.0, 2.0]
    vector.publish()
    assert parameter.tolist() == [1 - 2.0**-12 if dtype == torch.float64 else 1.0, 1.5]
    vector.values -= torch.tensor([2.0**-12, 0.0, 0.0])
    assert vector.values[0].item() == 1 - 2.0**-11


def test_bfloat16_steps_too_small_to_see_add_up() -> None:
    module = Bare(p=torch.ones(1, dtype=torch.bfloat16))
    vector = ParameterVector(module)
    for _ in range(64):
        vector.values -= 2.0**-13
        vector.publish()
    assert module.get_parameter("p").item() == 1 - 2.0**-7


def test_a_bfloat16_gradient_does_not_add_to_the_round_before() -> None:
    vector = ParameterVector(Bare(p=torch.ones(2, dtype=torch.bfloat16)))
    for _ in range(3):
        assert gradient_of(vector, lambda m: (3 * m.get_parameter("p")).sum().float()) == [3.0, 3.0]


def test_a_float64_parameter_is_rounded_once() -> None:
    module = Bare(p=torch.tensor([0.1], dtype=torch.float64))
    vector = ParameterVector(module)
    assert vector.values.item() == float(np.float32(0.1))
    vector.publish()
    assert module.get_parameter("p").item() == float(np.float32(0.1))


# What a task's code may do to gradients.


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_task_may_call_zero_grad_in_any_round(set_to_none: bool) -> None:
    vector = ParameterVector(Bare(p=torch.ones(2), q=torch.ones(2)))

    def loss(round_: int) -> Callable[[nn.Module], Tensor]:
        def compute(module: nn.Module) -> Tensor:
            if round_ in {1, 4}:
                module.zero_grad(set_to_none=set_to_none)
            used = "p" if round_ in {1, 2, 4} else "q"
            return (float(round_) * module.get_parameter(used)).sum()

        return compute

    found = [gradient_of(vector, loss(round_)) for round_ in range(1, 6)]
    assert found == [[1, 1, 0, 0], [2, 2, 0, 0], [0, 0, 3, 3], [4, 4, 0, 0], [0, 0, 5, 5]]


def test_a_parameter_that_nothing_flows_to_has_a_zero_gradient() -> None:
    vector = ParameterVector(Bare(p=torch.ones(2), q=torch.ones(1, dtype=torch.float64)))
    assert gradient_of(vector, lambda m: m.get_parameter("p").sum()) == [1, 1, 0]
    assert gradient_of(vector, lambda m: m.get_parameter("q").sum()) == [0, 0, 1]
    assert gradient_of(vector, lambda m: m.get_parameter("p").sum()) == [1, 1, 0]


def test_a_sparse_gradient_is_collected_densely() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    vector = ParameterVector(module)
    picked = torch.tensor([1, 3, 3])
    for _ in range(2):
        assert gradient_of(vector, lambda m: m(picked).sum()) == [0, 0, 1, 1, 0, 0, 2, 2]


# What is refused.


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)],
)
def test_running_statistics_are_refused_unless_local(layer: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(3, 3), layer)
    with pytest.raises(TaskError) as caught:
        ParameterVector(module)
    message = str(caught.value)
    assert "the model Sequential has floating-point buffers (1.running_mean, 1.running_var" in message
    assert f"from {type(layer).__name__}" in message
    assert '`buffers = "local"`' in message
    assert '`buffers = "mean"`' in message
    assert ParameterVector(module, buffers="local").dim == 9 + 3 + 3 + 3


def test_integer_buffers_are_no_obstacle() -> None:
    module = small()
    module.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    assert ParameterVector(module).dim == 26


@pytest.mark.parametrize(
    ("module", "count"),
    [
        (nn.Sequential(), 0),
        (nn.Sequential(nn.ReLU()), 0),
        (Bare(p=frozen(torch.ones(3))), 1),
        (Bare(p=torch.zeros(0, 4)), 1),
    ],
)
def test_a_model_with_nothing_to_train_is_refused(module: nn.Module, count: int) -> None:
    with pytest.raises(TaskError) as caught:
        ParameterVector(module)
    assert str(caught.value) == (
        f"the model {type(module).__name__} has no trainable parameter ({count} parameters, all frozen or "
        "empty); a run needs at least one with requires_grad"
    )


def test_a_complex_parameter_is_refused_by_name() -> None:
    with pytest.raises(TaskError, match=r"the parameter z is torch\.complex64"):
        ParameterVector(Bare(z=torch.ones(2, dtype=torch.complex64)))


# Hashes and digests.


def layout(**parameters: Tensor) -> bytes:
    return ParameterVector(Bare(**parameters)).layout_hash()


def test_the_layout_hash_is_about_names_shapes_order_and_types_only() -> None:
    def base() -> dict[str, Tensor]:
        return {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": frozen(torch.zeros(2))}

    right = layout(**base())
    assert len(right) == 16
    assert layout(**{**base(), "a": torch.ones(2, 3), "c": frozen(torch.ones(2))}) == right
    others = [
        {**base(), "a": torch.zeros(3, 2)},
        {**base(), "a": torch.zeros(6)},
        {"b": torch.zeros(4), "a": torch.zeros(2, 3), "c": frozen(torch.zeros(2))},
        {"A": torch.zeros(2, 3), "b": torch.zeros(4), "c": frozen(torch.zeros(2))},
        {**base(), "b": torch.zeros(4, dtype=torch.bfloat16)},
        {**base(), "c": torch.zeros(2)},
        {**base(), "b": frozen(torch.zeros(4))},
        {**base(), "d": torch.zeros(0)},
        {**base(), "c": frozen(torch.zeros(2, dtype=torch.float64))},
        {"a": torch.zeros(2, 3), "b": torch.zeros(4)},
    ]
    assert len({right, *(layout(**other) for other in others)}) == 1 + len(others)


def test_the_digest_is_of_the_little_endian_float32_bytes() -> None:
    vector = ParameterVector(Bare(p=torch.tensor([1.0, -2.0])))
    nothing_frozen = hashlib.sha256(b"").digest()
    right = hashlib.sha256(nothing_frozen + b"\x00\x00\x80\x3f\x00\x00\x00\xc0").digest()
    assert vector.digest() == right


def test_the_digest_sees_every_bit() -> None:
    vector = ParameterVector(Bare(p=torch.zeros(2)))
    seen = {vector.digest()}
    for value in (-0.0, 2.0**-149, 1.0, 1 + 2.0**-23):
        vector.values[1] = value
        seen.add(vector.digest())
    assert len(seen) == 5


def test_the_digest_sees_frozen_parameters_that_are_sent() -> None:
    vector = ParameterVector(Bare(p=torch.zeros(2), f=frozen(torch.ones(2))))
    before, kept = vector.digest(), vector.frozen_bytes()
    vector.load_frozen(bytes(8))
    assert vector.digest() != before
    vector.load_frozen(kept)
    assert vector.digest() == before


# Values in and out.


def test_load_replaces_the_values_and_what_the_module_computes() -> None:
    vector = ParameterVector(small())
    values = np.random.default_rng(0).standard_normal(26).astype(np.float32)
    vector.load(values)
    hidden = np.tanh(INPUTS.numpy() @ values[:12].reshape(4, 3).T + values[12:16])
    right = hidden @ values[16:24].reshape(2, 4).T + values[24:]
    np.testing.assert_allclose(vector.module(INPUTS).detach(), right, rtol=1e-5, atol=1e-6)
    values[0] = 99.0
    assert vector.numpy()[0] != 99.0


def test_load_reaches_a_bfloat16_parameter() -> None:
    module = Bare(p=torch.zeros(2, dtype=torch.bfloat16))
    ParameterVector(module).load(np.array([1.5, -3.0], np.float32))
    assert module.get_parameter("p").tolist() == [1.5, -3.0]


def test_another_length_is_not_loaded() -> None:
    with pytest.raises(AssertionError):
        ParameterVector(small()).load(np.zeros(25, np.float32))


def test_named_values_load_strictly_into_a_fresh_module() -> None:
    torch.manual_seed(3)
    source = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    source[0].weight.requires_grad_(requires_grad=False)
    vector = ParameterVector(source)
    vector.load(np.arange(14, dtype=np.float32) / 7)
    named = vector.named_values()
    assert [*named] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(tensor.is_contiguous() for tensor in named.values())
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    fresh.load_state_dict(named, strict=True)
    assert torch.equal(fresh(INPUTS), source(INPUTS))


def test_named_values_of_a_bfloat16_model_are_the_master_copy() -> None:
    vector = ParameterVector(Bare(p=torch.ones(1, dtype=torch.bfloat16)))
    vector.values -= 2.0**-12
    (value,) = vector.named_values().values()
    assert value.dtype == torch.float32
    assert value.item() == 1 - 2.0**-12


def test_frozen_bytes_are_raw_and_little_endian_and_load_again() -> None:
    def parts(filled: bool) -> dict[str, Tensor]:
        short = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
        table = {
            "trained": torch.zeros(2),
            "ints": torch.tensor([1, -1]),
            "short": short,
            "none": torch.zeros(0),
            "grid": torch.arange(4.0).view(2, 2).t(),
            "scalar": torch.tensor(0.5, dtype=torch.float64),
        }
        return {
            name: (tensor if name == "trained" else frozen(tensor if filled else torch.zeros_like(tensor)))
            for name, tensor in table.items()
        }

    source, target = ParameterVector(Bare(**parts(True))), ParameterVector(Bare(**parts(False)))
    data = source.frozen_bytes()
    right = "0100000000000000 ffffffffffffffff803f 00c000000000 00000040 0000803f 00004040000000000000e03f"
    assert data == bytes.fromhex(right)
    assert source.frozen_length == len(data) == 44
    assert target.layout_hash() == source.layout_hash()
    target.load_frozen(data)
    for name, parameter in source.module.named_parameters():
        assert torch.equal(target.module.get_parameter(name), parameter)
    assert not target.module.get_parameter("ints").requires_grad


def test_a_frozen_parameter_stays_outside_the_vector() -> None:
    module = Bare(a=frozen(torch.ones(5)), b=torch.ones(2))
    vector = ParameterVector(module)
    assert vector.dim == 2
    vector.values.fill_(9.0)
    assert module.get_parameter("a").tolist() == [1.0] * 5


def test_the_saved_model_loads_strictly_with_tied_parameters_and_integer_buffers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.register_buffer("order", torch.tensor([2, 0, 1]))
            self.register_buffer("scratch", torch.tensor([5]), persistent=False)

    vector = ParameterVector(Tied())
    vector.load(np.arange(9, dtype=np.float32))
    fresh = Tied()
    fresh.load_state_dict(vector.named_values())
    assert fresh.second.weight.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
