"""Sums of single records' clipped gradients, whatever the module.

Each record's loss is that of a batch of one under ``torch.func.vmap``, so nothing that a task or a layer does
can mix records; each record has its own view of the parameters, so that the gradients at the views, by plain
autograd, are the records'. The weight of a linear layer that sees one vector a record has the gradient
``g a^T``, of the gradient g at the bias and the input a: its norm is ``|g| |a|``, and the weighted sum over
records one product, so it is never made for a single record (Goodfellow, "Efficient per-example gradient
computations", 2015). All other tensors' gradients are made, some records at a time.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from afl.errors import TaskError
from afl.tasks.base import Batch
from afl_worker.training.examples import mapped
from afl_worker.training.oracle import differentiable

MARGIN: Final = 1e-5
"""By how much a clipped gradient is shorter than the limit: float32's products and sums err by less."""

LONGEST: Final = 1e30
"""A gradient that is longer than the limit by more counts as not finite."""

COMPARED: Final = 4
"""Records of which the loss is compared with the mean of theirs, and the two ways to a gradient."""

ALIKE: Final = 1e-3
"""The largest relative difference that is taken for rounding."""

UNLIKE: Final = 0.3
"""The smallest difference of gradients, relative to the sum of the records' norms, that no rounding makes."""

_IN_PLACE: Final = ("vmap: inplace", "match the broadcast shape")
"""What PyTorch says of a tensor that is changed in place by what differs from record to record."""

_VALUE_BYTES: Final = 4


class RecordGradients:
    """Of a loss module, at its parameters as they are.

    Args:
        task: its name, for messages.
        loss: takes a batch; its trained parameters are ``tensors`` long, in order.
        memory: bytes of single records' gradients that are held at once; at least one record's are.
    """

    def __init__(self, task: str, loss: nn.Module, memory: int) -> None:
        self._task, self._loss, self._memory = task, loss, memory
        self._trained = {name: p for name, p in loss.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in self._trained.items()}
        self._linear: dict[str, nn.Linear] = {}
        """Those whose weights' gradients are not made, by the weights' names."""
        self._to_make = tuple(self._trained)
        self._padded = [
            layer
            for layer in loss.modules()
            if isinstance(layer, nn.Embedding) and layer.padding_idx is not None
        ]
        self._places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self._trained}
        """The modules that have a parameter, and what they call it."""
        for module in loss.modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._places[self._names[id(parameter)]].append((module, attribute))

    @property
    def chunk(self) -> int:
        """Records whose gradients are made at once."""
        made = sum(self._trained[name].numel() for name in self._to_make)
        return max(1, self._memory // (_VALUE_BYTES * max(made, 1)))

    def look_at(self, batch: Batch) -> None:
        """Find out, by a few records, which layers need no gradients made, with the module in evaluation
        mode.

        Raises:
            TaskError: if the loss does not depend on the parameters, is no mean of its records' losses, or
                has other gradients record by record: the run would optimize another.
        """
        few = mapped(lambda tensor: tensor[:COMPARED], batch)
        ones = [
            mapped(lambda tensor, at=at: tensor[at : at + 1], few) for at in range(len(tensors_of(few)[0]))
        ]
        layers = {
            self._names[id(layer.weight)]: layer
            for layer in self._loss.modules()
            if type(layer) is nn.Linear and id(layer.weight) in self._names
        }
        differentiable(self._task, self._loss(few))
        with torch.no_grad():
            with _inputs_of(layers) as seen:
                parts = [float(self._loss(ones[0]))]
            parts += [float(self._loss(one)) for one in ones[1:]]
            whole, again = (float(self._loss(few)) for _ in range(2))
        mean = math.fsum(parts) / len(parts)
        # Of a loss that draws, such as a diffusion model's, nothing can be said.
        if whole == again and not abs(mean - whole) <= ALIKE * max(abs(whole), *map(abs, parts)):
            raise TaskError(
                f"{self._task}.loss is no mean of its records' losses, which privacy.records clips one by "
                "one; `afl check` shows the numbers"
            )
        wanted = {name: layer for name, layer in layers.items() if _is_one_vector(layer, seen[name])}
        by_making = self._sums(few, len(ones))
        if whole == again:
            self._compare(by_making, ones)
        self._leave_out(wanted)
        if not all(
            torch.allclose(own, other, rtol=ALIKE, atol=ALIKE * float(own.abs().max()))
            for own, other in zip(by_making, self._sums(few, len(ones)), strict=True)
            if own.numel()
        ):
            # A weight that is used elsewhere too, say.
            self._leave_out({})

    def _leave_out(self, linear: dict[str, nn.Linear]) -> None:
        """Make no gradients of these weights."""
        self._linear = linear
        self._to_make = tuple(name for name in self._trained if name not in linear)

    def _compare(self, found: Sequence[Tensor], ones: Sequence[Batch]) -> None:
        """Raise TaskError if plain autograd gives the records' gradients, of which ``found`` are the sums,
        otherwise."""
        wanted, sizes = [torch.zeros_like(own) for own in found], [0.0] * len(found)
        for one in ones:
            plain = torch.autograd.grad(
                self._loss(one), [*self._trained.values()], allow_unused=True, materialize_grads=True
            )
            for at, own in enumerate(plain):
                wanted[at] += own.float().reshape(-1)
                sizes[at] += float(own.float().norm())
        for name, own, right, size in zip(self._trained, found, wanted, sizes, strict=True):
            if float((own - right).norm()) > UNLIKE * size:
                raise TaskError(
                    f"{self._task}.loss gives {name.removeprefix('module.')} another gradient when "
                    "privacy.records takes records one by one, each with the modules' parameters replaced: "
                    "let it take parameters from their modules whenever it is called, and not from a list, a "
                    "closure or a cache"
                )

    def _sums(self, batch: Batch, size: int) -> list[Tensor]:
        sums = [torch.zeros(p.numel(), device=p.device) for p in self._trained.values()]
        self.add_clipped(batch, size, math.inf, math.inf, dict(zip(self._trained, sums, strict=True)))
        return sums

    def add_clipped(
        self, batch: Batch, size: int, clip: float, loss_clip: float, sums: Mapping[str, Tensor]
    ) -> float:
        """Add the records' gradients, none of a norm above ``clip``, to ``sums``, float32 ``[length]`` for
        each of the trained tensors by name; returns the sum of their losses, each in ``[0, loss_clip]``.

        A gradient or a loss that is not finite is one that a single record could bring about: it counts as
        zero, or as the largest.

        Raises:
            TaskError: if the loss cannot be taken record by record.
        """
        total, rows = 0.0, self.chunk
        for start in range(0, size, rows):
            chunk = mapped(lambda tensor, start=start: tensor[start : start + rows], batch)
            made, outputs, inputs, losses = self._gradients(chunk)
            factors = self._factors(made, outputs, inputs, clip)
            for name, gradient in made.items():
                sums[name].addmv_(gradient.T, factors)
            for name, output in outputs.items():
                weight = sums[name].view(self._linear[name].weight.shape)
                weight.addmm_((output * factors[:, None]).T, inputs[name])
            losses = losses.double().nan_to_num(nan=loss_clip, posinf=loss_clip)
            total += math.fsum(losses.clamp(0.0, loss_clip).tolist())
        return total

    def _factors(
        self, made: dict[str, Tensor], outputs: dict[str, Tensor], inputs: dict[str, Tensor], clip: float
    ) -> Tensor:
        """What each record's gradient is multiplied by, float32 ``[chunk]``; those that are not finite are
        made zero in the mappings."""
        norms = [_norms(gradient) for gradient in made.values()]
        norms += [_norms(output) * _norms(inputs[name]) for name, output in outputs.items()]
        lengths = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        # Of a factor that is far below float32's normal numbers the digits are lost, and the norm with them.
        is_sane = lengths <= min(LONGEST * clip, sys.float_info.max)
        if not is_sane.all():
            for parts in (made, outputs, inputs):
                for name, part in parts.items():
                    # Not in place: an input may be the batch itself, or a buffer that all records share.
                    parts[name] = part.masked_fill(~is_sane[:, None], 0.0)
            lengths[~is_sane] = 0.0
        if math.isinf(clip):
            return torch.ones_like(lengths, dtype=torch.float32)
        factors: Tensor = (1 - MARGIN) * clip / lengths.clamp_(min=clip)
        return factors.float()

    def _gradients(
        self, chunk: Batch
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Of each record of a chunk, as rows: gradients that are made, by tensor; those at the outputs of the
        linear layers, and their inputs, by weight; losses."""
        rows = len(tensors_of(chunk)[0])
        views = {name: _views(self._trained[name], rows) for name in self._to_make}
        places = [place for name in views for place in self._places[name]]
        in_places = [view for name, view in views.items() for _ in self._places[name]]
        at_outputs: dict[str, Tensor] = {}
        for name, layer in self._linear.items():
            trained = None if layer.bias is None else self._names.get(id(layer.bias))
            if trained is not None:
                at_outputs[name] = views[trained]
                continue
            bias = layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
            at_outputs[name] = _views(bias, rows)
            places.append((layer, "bias"))
            in_places.append(at_outputs[name])

        otherwise: set[str] = set()

        def loss_of(one: Batch, in_places: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            with (
                _inputs_of(self._linear) as seen,
                _padding_without_gradient(self._padded),
                _replaced(places, in_places),
            ):
                loss: Tensor = self._loss(one)
            otherwise.update(
                name for name, own in seen.items() if own and not _is_one_vector(self._linear[name], own)
            )
            return loss, {name: own[0] for name, own in seen.items() if own}

        sources = list({id(view): view for view in in_places}.values())
        buffers = dict(self._loss.named_buffers())
        try:
            losses, inputs = record_by_record(f"{self._task}.loss", loss_of, chunk, in_places)
        except TaskError as error:
            if buffers and any(sign in str(error) for sign in _IN_PLACE):
                raise TaskError(f"{self._of_buffers(buffers)} ({error.__cause__})") from error
            raise
        if otherwise:
            # Called in training otherwise than in evaluation, where they were looked at.
            self._leave_out({name: own for name, own in self._linear.items() if name not in otherwise})
            return self._gradients(chunk)
        with _one_by_one(f"{self._task}.loss"):
            found = torch.autograd.grad(losses.sum(), sources, materialize_grads=True)
        changed = [name for name, own in self._loss.named_buffers() if own is not buffers.get(name)]
        if changed:
            raise TaskError(self._of_buffers(changed))
        gradients = {
            id(view): gradient.reshape(rows, -1).float()
            for view, gradient in zip(sources, found, strict=True)
        }
        return (
            {name: gradients[id(view)] for name, view in views.items()},
            {name: gradients[id(at_outputs[name])] for name in inputs},
            {name: each.detach().reshape(rows, -1).float() for name, each in inputs.items()},
            losses.detach(),
        )

    def _of_buffers(self, names: Iterable[str]) -> str:
        named = ", ".join(name.removeprefix("module.") for name in names)
        return (
            f"{self._task}'s model changes a buffer ({named}) when it is called, by what it sees: "
            "privacy.records takes records one by one, and adds no noise to what a buffer would keep of "
            "them; let training change none"
        )


def _views(parameter: Tensor, rows: int) -> Tensor:
    """One for each record, of which the gradient can be taken."""
    return parameter.detach().expand(rows, *parameter.shape).requires_grad_()


@contextlib.contextmanager
def _inputs_of(layers: Mapping[str, nn.Linear]) -> Iterator[dict[str, list[Tensor]]]:
    """What these layers are given, call by call."""
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}

    def hook(own: list[Tensor]) -> Any:
        return lambda _, given, named: own.append(_first(given, named))

    handles = [
        layer.register_forward_pre_hook(hook(seen[name]), with_kwargs=True) for name, layer in layers.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _padding_without_gradient(layers: Sequence[nn.Embedding]) -> Iterator[None]:
    """What these embeddings are not to learn from: under vmap PyTorch looks for the padding's row in all
    records' weights as one."""

    def hook(layer: nn.Embedding, given: Any, named: Any, found: Tensor) -> Tensor:
        return torch.where((_first(given, named) == layer.padding_idx)[..., None], found.detach(), found)

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first(given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    return given[0] if given else next(iter(named.values()))


def _is_one_vector(layer: nn.Linear, inputs: Sequence[Tensor]) -> bool:
    """Whether these inputs of a record are a single one, of a single vector."""
    return [each.numel() for each in inputs] == [layer.in_features]


@contextlib.contextmanager
def _replaced(places: Sequence[tuple[nn.Module, str]], values: Sequence[Tensor]) -> Iterator[None]:
    """With other parameters: ``functional_call`` takes ten times as long, and gives no layer a bias that it
    lacks."""
    before = [module._parameters[attribute] for module, attribute in places]  # noqa: SLF001
    try:
        for (module, attribute), value in zip(places, values, strict=True):
            module._parameters[attribute] = value  # type: ignore[assignment]  # noqa: SLF001
        yield
    finally:
        for (module, attribute), parameter in zip(places, before, strict=True):
            module._parameters[attribute] = parameter  # noqa: SLF001


def record_by_record(what: str, of_one: Callable[..., Any], batch: Batch, *views: Any) -> Any:
    """What a function gives for each record, as rows: of a batch of it alone, and of its rows of ``views``.

    Raises:
        TaskError: if it cannot be taken record by record.
    """

    def of_rows(views: Sequence[Any], *tensors: Tensor) -> Any:
        parts = iter(tensors)
        return of_one(mapped(lambda _: next(parts).unsqueeze(0), batch), *views)

    with _one_by_one(what), _attention_in_parts():
        return vmap(of_rows, randomness="different")(views, *tensors_of(batch))


@contextlib.contextmanager
def _one_by_one(what: str) -> Iterator[None]:
    """Blame the task for what PyTorch cannot take record by record."""
    try:
        yield
    except (RuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise TaskError(
            f"{what} cannot be taken record by record, which privacy.records needs: "
            f"{str(error).splitlines()[0]}. It is called on batches of one under torch.func.vmap: "
            "without .item(), branches on values, changes of buffers, or recurrent layers"
        ) from error


@contextlib.contextmanager
def _attention_in_parts() -> Iterator[None]:
    """Fused attention, and PyTorch's fused layers in evaluation mode, have no rule for single records."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def tensors_of(batch: Batch) -> tuple[Tensor, ...]:
    """The batch's tensors, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(note, batch)
    return tuple(found)


def _norms(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms
