"""Sums of single records' clipped gradients, whatever the module.

Each record's loss is that of a batch of one under ``torch.func.vmap``, so nothing that a task or a layer does
can mix records. A linear layer that sees one vector a record has the gradient ``g a^T``, of the gradient g at
its output and its input a: its norm is ``|g| |a|``, and the weighted sum over records one product, so it is
never made for a single record (Goodfellow, "Efficient per-example gradient computations", 2015). All other
tensors' gradients are made, some records at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
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

_VALUE_BYTES: Final = 4


@dataclass
class _Seen:
    """What linear layers have seen in one call, and what is added to their outputs, by layer."""

    added: Mapping[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    calls: list[tuple[str, bool]] = field(default_factory=list)
    """Each call, and whether it was of one vector."""


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
        """Those whose gradients are not made, by their weights' names."""
        self._to_make = tuple(self._trained)
        self._seen = _Seen({})

    @property
    def chunk(self) -> int:
        """Records whose gradients are made at once."""
        made = sum(self._trained[name].numel() for name in self._to_make)
        return max(1, self._memory // (_VALUE_BYTES * max(made, 1)))

    def look_at(self, batch: Batch) -> None:
        """Find out, by a few records, which layers need no gradients made, with the module in evaluation
        mode.

        Raises:
            TaskError: if the loss does not depend on the parameters, or is no mean of its records' losses:
                the run would optimize another.
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
            with self._watching(layers, {}):
                parts = [float(self._loss(ones[0]))]
                calls = self._seen.calls
            parts += [float(self._loss(one)) for one in ones[1:]]
            whole, again = (float(self._loss(few)) for _ in range(2))
        mean = math.fsum(parts) / len(parts)
        # Of a loss that draws, such as a diffusion model's, nothing can be said.
        if whole == again and not abs(mean - whole) <= ALIKE * max(abs(whole), *map(abs, parts)):
            raise TaskError(
                f"{self._task}.loss is no mean of its records' losses, which privacy.records clips one by "
                "one; `afl check` shows the numbers"
            )
        names = [name for name, _ in calls]
        wanted = {name: layers[name] for name, is_one in calls if is_one and names.count(name) == 1}
        by_making = self._mean(few, len(ones))
        self._leave_out(wanted)
        if not all(
            torch.allclose(own, other, rtol=ALIKE, atol=ALIKE * float(own.abs().max()))
            for own, other in zip(by_making, self._mean(few, len(ones)), strict=True)
            if own.numel()
        ):
            # A weight that is used elsewhere too, say.
            self._leave_out({})

    def _leave_out(self, linear: dict[str, nn.Linear]) -> None:
        """Make no gradients of these."""
        self._linear = linear
        left_out = set(linear) | {self._bias_of(layer) for layer in linear.values()}
        self._to_make = tuple(name for name in self._trained if name not in left_out)

    def _mean(self, batch: Batch, size: int) -> list[Tensor]:
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
            made, outputs, inputs, losses = self._gradients(batch, tensors_of(chunk))
            factors = self._factors(made, outputs, inputs, clip, losses)
            for name, gradient in made.items():
                sums[name].add_(factors @ gradient)
            for name, layer in self._linear.items():
                if name in inputs:
                    own = outputs[name] * factors[:, None]
                    sums[name].add_((own.T @ inputs[name]).reshape(-1))
                    if (bias := self._bias_of(layer)) is not None:
                        sums[bias].add_(own.sum(0))
            losses = losses.double().nan_to_num(nan=loss_clip, posinf=loss_clip)
            total += math.fsum(losses.clamp(0.0, loss_clip).tolist())
        return total

    def _factors(
        self,
        made: dict[str, Tensor],
        outputs: dict[str, Tensor],
        inputs: dict[str, Tensor],
        clip: float,
        losses: Tensor,
    ) -> Tensor:
        """What each record's gradient is multiplied by, ``[chunk]``; those that are not finite are made
        zero."""
        norms = [_norms(gradient) for gradient in made.values()]
        for name, layer in self._linear.items():
            if name in inputs:
                ones = float(self._bias_of(layer) is not None)
                norms.append(_norms(outputs[name]) * (_norms(inputs[name]).square() + ones).sqrt())
        lengths = torch.stack(norms).square().sum(0).sqrt() if norms else torch.zeros(len(losses))
        # Of a factor that is far below float32's normal numbers the digits are lost, and the norm with them.
        is_wild = ~torch.isfinite(lengths) | (lengths > LONGEST * clip)
        if is_wild.any():
            for parts in (made, outputs, inputs):
                for part in parts.values():
                    part[is_wild] = 0.0
        if math.isinf(clip):
            return torch.ones_like(lengths).float()
        return ((1 - MARGIN) * clip / lengths.clamp(min=clip)).nan_to_num(nan=0.0).float()

    def _gradients(
        self, batch: Batch, record: tuple[Tensor, ...]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Of each record of a chunk, as rows: gradients that are made, by tensor; those at the outputs of the
        linear layers, and their inputs; losses."""
        rest = {name: p.detach() for name, p in self._trained.items()}
        wanted = {name: rest.pop(name) for name in self._to_make}
        added = {name: layer.weight.new_zeros(layer.out_features) for name, layer in self._linear.items()}

        def loss_of(wanted: tuple[Any, Any], *tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            parameters, added = wanted
            parts = iter(tensors)
            one = mapped(lambda _: next(parts).unsqueeze(0), batch)
            with self._watching(self._linear, added):
                loss: Tensor = functional_call(self._loss, {**rest, **parameters}, (one,))
                return loss, self._seen.inputs

        call = vmap(
            grad_and_value(loss_of, has_aux=True),
            in_dims=(None, *[0] * len(record)),
            randomness="different",
        )
        try:
            # Fused attention has no rule for single records.
            with sdpa_kernel(SDPBackend.MATH):
                (made, outputs), (losses, inputs) = call((wanted, added), *record)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise TaskError(
                f"{self._task}.loss cannot be taken record by record, which privacy.records needs: "
                f"{str(error).splitlines()[0]}. It is called on batches of one under torch.func.vmap: "
                "without .item(), branches on values, changes of buffers, or recurrent layers"
            ) from error
        rows = len(losses)
        return (
            {name: each.reshape(rows, -1).float() for name, each in made.items()},
            {name: each.float() for name, each in outputs.items()},
            {name: each.float() for name, each in inputs.items()},
            losses,
        )

    def _bias_of(self, layer: nn.Linear) -> str | None:
        return None if layer.bias is None else self._names.get(id(layer.bias))

    @contextlib.contextmanager
    def _watching(self, layers: Mapping[str, nn.Linear], added: Mapping[str, Tensor]) -> Iterator[None]:
        """Note the layers' inputs, and add to their outputs."""
        self._seen = seen = _Seen(added)

        def hook(name: str) -> Any:
            def note(layer: nn.Linear, given: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
                is_one = given[0].numel() == layer.in_features
                seen.calls.append((name, is_one))
                if not is_one or name not in added:
                    return None
                seen.inputs[name] = given[0].reshape(-1)
                return output + added[name].view(output.shape)

            return note

        handles = [layer.register_forward_hook(hook(name)) for name, layer in layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


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
