"""The trainable parameters of any module as one flat float32 vector."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from afl.core.model.buffers import BufferPolicy, ModuleBuffers
from afl.core.vectors import Weighted, overwrite
from afl.errors import TaskError

DIGEST_BYTES = 16

FrozenPolicy: TypeAlias = Literal["sent", "local"]
"""Where the parameters that are not trained come from, as :class:`afl.Task` describes it."""


class _Entry(NamedTuple):
    """A trainable parameter, with the part of the vector that is its own, in its shape."""

    parameter: nn.Parameter
    values: Tensor


class ParameterVector:
    """A module's trainable parameters, in ``named_parameters()`` order, as one float32 vector.

    A float32 parameter becomes a view into :attr:`values`. A parameter of another floating type (bfloat16,
    float64) keeps its type; :attr:`values` is its float32 master copy, written to it by :meth:`publish`.
    Gradients are taken from autograd by :meth:`gradient`: adding them up in place would read and write each
    twice more. Frozen parameters stay outside the vector. Tied parameters count once.

    Args:
        module: changed in place; moved to ``device``.
        device: where the vectors live.
        buffers: what becomes of floating-point buffers, as in :class:`afl.Task`.
        frozen: where frozen parameters come from, as there. With ``local`` nothing here gives them away.

    Attributes:
        tensors: how many values each trainable parameter has, in order.
        names: theirs.
        buffers: the module's buffers, a set for each hosted worker.
        initial_digest: of the file that the run began with, 32 hexadecimal digits; empty if it began with the
            task's own values.

    Raises:
        TaskError: if there is nothing to train, a parameter is complex, or there are floating-point
            buffers without a policy, or with values of which no mean can be taken.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str = "cpu",
        *,
        buffers: BufferPolicy = "refuse",
        frozen: FrozenPolicy = "sent",
    ) -> None:
        self.module = module.to(device)
        if buffers == "refuse":
            _refuse_float_buffers(module)
        self._buffers_are_shared = buffers == "mean"
        self.buffers = ModuleBuffers(self.module, averaged=self._buffers_are_shared)
        named = list(module.named_parameters())
        for name, parameter in named:
            if is_lazy(parameter):
                raise TaskError(
                    f"the parameter {name} of the model {type(module).__name__} has no shape yet (a lazy "
                    "layer); call the module once on an example batch in model(), or give the layer its size"
                )
        trainable = [(name, p) for name, p in named if p.requires_grad]
        untrained = [(name, p) for name, p in named if not p.requires_grad and p.numel()]
        self._base = dict(untrained) if frozen == "local" else {}
        self._frozen = [] if frozen == "local" else [p for _, p in untrained]
        self._frozen_is_local = frozen == "local"
        sizes = [p.numel() for _, p in trainable]
        self.tensors = tuple(sizes)
        self.names = tuple(name for name, _ in trainable)
        self.dim = sum(sizes)
        if self.dim == 0:
            raise TaskError(
                f"the model {type(module).__name__} has no trainable parameter "
                f"({len(named)} parameters, all frozen or empty); a run needs at least one with requires_grad"
            )
        self.values = torch.empty(self.dim, dtype=torch.float32, device=device)
        self._sizes = sizes
        self._entries: list[_Entry] = []
        for (name, parameter), values in zip(trainable, torch.split(self.values, sizes), strict=True):
            if not parameter.dtype.is_floating_point:
                raise TaskError(
                    f"the parameter {name} is {parameter.dtype}; trainable parameters are real "
                    "floating-point: convert it, or set requires_grad = False"
                )
            entry = _Entry(parameter, values.view(parameter.shape))
            entry.values.copy_(parameter.detach())
            if parameter.dtype == torch.float32:
                parameter.data = entry.values
                parameter.grad = None
            self._entries.append(entry)
        self._copied = [entry for entry in self._entries if entry.parameter.dtype != torch.float32]
        self.initial_digest = ""

    def publish(self) -> None:
        """Make the module compute with :attr:`values`; call after every change of them."""
        with torch.no_grad():
            for entry in self._copied:
                entry.parameter.copy_(entry.values)

    def clear_gradient(self) -> None:
        """Drop what earlier calls of ``backward`` left; before ``backward``."""
        for entry in self._entries:
            entry.parameter.grad = None

    def gradient(self, factor: float = 1.0) -> Weighted:
        """Take the module's gradient after ``backward``, times a factor; zero where nothing flowed."""
        parts: list[Tensor | None] = []
        for entry in self._entries:
            grad, entry.parameter.grad = entry.parameter.grad, None
            parts.append(grad if grad is None or grad.layout == torch.strided else grad.to_dense())
        return Weighted(parts, self._sizes, factor)

    def load(self, values: NDArray[np.float32]) -> None:
        """Replace all values; float32 ``[dim]``."""
        assert values.shape == (self.dim,)
        overwrite(self.values, values)
        self.publish()

    def numpy(self) -> NDArray[np.float32]:
        """The values on the host: a view on CPU, a copy from a GPU."""
        array: NDArray[np.float32] = self.values.cpu().numpy()
        return array

    def digest(self, *beside: bytes) -> bytes:
        """32 bytes (SHA-256) that two copies of the parameters, also of frozen ones that are sent, of the
        buffers that are averaged, and of what goes with them, share exactly if they are equal to the bit."""
        digest = hashlib.sha256(self._frozen_sent)
        for values in (self.numpy(), self.buffers.values()):
            digest.update(np.ascontiguousarray(values, dtype="<f4").data)
        for content in beside:
            digest.update(content)
        return digest.digest()

    def layout_hash(self) -> bytes:
        """16 bytes over names, shapes and types, in order, of the parameters and of the buffers that are
        averaged: equal for models whose vectors correspond."""
        layout: list[list[object]] = [
            [name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in self.module.named_parameters()
        ]
        layout += self.buffers.layout
        text = json.dumps(layout, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()

    def named_values(self) -> dict[str, Tensor]:
        """What ``load_state_dict`` of a fresh module takes, on the CPU; on a CPU these are views.

        Every parameter by each of its names (tied ones have several), trained in float32 and frozen in
        its own type unless it is each site's own, and the persistent buffers. Floating-point buffers that
        stay local to the workers are not the server's to give: loading such a model takes ``strict=False``.
        """
        trained = {id(entry.parameter): entry.values for entry in self._entries}
        named = {
            name: trained.get(id(parameter), parameter.detach())
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
            if parameter.requires_grad or not self._frozen_is_local
        }
        names_kept = self.module.state_dict().keys()
        named.update(
            (name, buffer)
            for name, buffer in self.module.named_buffers(remove_duplicate=False)
            if name in names_kept and (self._buffers_are_shared or not buffer.dtype.is_floating_point)
        )
        return {name: tensor.cpu().contiguous() for name, tensor in named.items()}

    @property
    def stored_buffers(self) -> str:
        """What :meth:`named_values` holds of floating-point buffers: ``mean``, ``local`` (nothing, since they
        are the workers' own), or ``none`` where the module has none."""
        if not self.buffers.has_floats:
            return "none"
        return "mean" if self._buffers_are_shared else "local"

    def is_sent(self, tensor: Tensor) -> bool:
        """Whether a parameter or buffer of the module goes to each worker with its first model."""
        if isinstance(tensor, nn.Parameter):
            return tensor.requires_grad or not self._frozen_is_local
        return self.buffers.is_averaged(tensor)

    def trained(self, tensor: Tensor) -> Tensor:
        """Where the values of one of the module's tensors are changed: in the vector, if it is trained."""
        return next((entry.values for entry in self._entries if entry.parameter is tensor), tensor.detach())

    @cached_property
    def frozen_digest(self) -> str:
        """By which sites that have the frozen parameters of their own know that these are the same (32
        hexadecimal digits); empty where they are sent."""
        return digest_of(sorted(self._base.items())) if self._frozen_is_local else ""

    @property
    def base_length(self) -> int:
        """Bytes of the frozen parameters that are each site's own."""
        return sum(p.numel() * p.element_size() for p in self._base.values())

    def frozen_bytes(self) -> bytes:
        """The frozen parameters that are sent, end to end, in order, as raw little-endian bytes."""
        flat = (p.detach().cpu().contiguous().reshape(-1) for p in self._frozen)
        return b"".join(part.view(torch.uint8).numpy().tobytes() for part in flat)

    @cached_property
    def _frozen_sent(self) -> bytes:
        return hashlib.sha256(self.frozen_bytes()).digest()

    def load_frozen(self, data: bytes) -> None:
        """Replace the frozen parameters by those of :meth:`frozen_bytes`; lengths were checked before."""
        assert len(data) == self.frozen_length
        self.__dict__.pop("_frozen_sent", None)
        start = 0
        with torch.no_grad():
            for p in self._frozen:
                raw = bytearray(data[start : start + p.numel() * p.element_size()])
                p.copy_(torch.frombuffer(raw, dtype=torch.uint8).view(p.dtype).view(p.shape))
                start += len(raw)

    @property
    def frozen_length(self) -> int:
        """The length of :meth:`frozen_bytes`."""
        return sum(p.numel() * p.element_size() for p in self._frozen)


def digest_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """32 hexadecimal digits over names, types, shapes and bytes, in this order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in named:
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, dtype, list(tensor.shape)]).encode() + b"\n")
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _refuse_float_buffers(module: nn.Module) -> None:
    """Raise for buffers that training would change at each worker alone."""
    names = [name for name, buffer in module.named_buffers() if buffer.dtype.is_floating_point]
    if names:
        owners = {type(module.get_submodule(name.rpartition(".")[0])).__name__ for name in names}
        raise TaskError(
            f"the model {type(module).__name__} has floating-point buffers ({', '.join(names[:4])}"
            f"{', ...' if len(names) > 4 else ''}, from {', '.join(sorted(owners))}), and training may "
            "change them at each worker alone; use a layer without running statistics (GroupNorm, "
            'LayerNorm), or set `buffers = "local"` in the task to keep each worker\'s own (right too for '
            'buffers that never change), or `buffers = "mean"` to evaluate with the mean of all workers\''
        )
