"""Calls the script's model beside its training, with its latest inputs, and takes gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from diagnose.actions._distance import Tensors
from diagnose.actions._module_hooks import hooks_of
from diagnose.actions._nested import differentiable, mapped_once, tensors
from diagnose.actions._routes import REPLAYED, is_replayed
from diagnose.actions._untouched import (
    CannotCheck,
    RandomState,
    devices_of,
    random_numbers_again,
    refuse_lasting_writes,
    untouched,
)
from diagnose.actions._watch import (
    Watch,
    in_autocast,
    latest_call,
    refuse_lasting_changes,
    unwrapped,
)
from diagnose.actions.tf32_matmul import TENSOR_CORES
from diagnose.core.job import Job
from diagnose.hooks.device_settings import device_now

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

TF32 = 2.0**-10
"""What TF32 rounds the inputs of a product by, relative: like float16 it keeps ten bits after the first."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What one computation gave.

    Attributes:
        outputs: Tensors of the output.
        gradients: Of parameters and of inputs that take one.
        buffers: Afterwards.
        random: The generators afterwards.
        sent: The gradients sent into the output.
    """

    outputs: Tensors
    gradients: Tensors
    buffers: Tensors
    random: RandomState
    sent: Sequence[torch.Tensor]


class Shadow:
    """One model of the job, with its latest inputs, to be called beside the training.

    Attributes:
        job: The job.
        model: The model, as the loop calls it.
        call: What is remembered of its latest call.
        inner: The model itself.
        devices: Where its parameters and inputs lie.
        unit: What the coarsest floating type in its own computation rounds by, relative; TF32 is one.
        tf32: Whether products of its own may be TF32's.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job = job
        self.model = model
        self.unit = 0.0
        self.tf32 = False
        self.call = latest_call(job, model)
        self.inner = unwrapped(model)
        self._refuse()
        self.devices = devices_of([*tensors(self.inputs), *self.inner.parameters()])

    def rehearse(self) -> None:
        """Makes sure, with a first call, that the model can be called without harm; once per model.

        Raises:
            CannotCheck: If it cannot.
        """
        with self.beside():
            inputs = self.copies()
            with refuse_lasting_writes(self.inner, tensors(inputs)) as due:
                if due:
                    self.called(inputs)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, the model may be called with gradients; what that changes is put back on leaving."""
        with random_numbers_again(self.devices), untouched(self.inner), torch.enable_grad():
            yield

    @property
    def inputs(self) -> Inputs:
        """What the script gave the model last."""
        return self.job.inputs[id(self.model)]

    def copies(self, order: torch.Tensor | None = None) -> Inputs:
        """Copies the inputs, cut from the graph they came of; a tensor that is there twice stays one.

        Args:
            order: Another order of the samples.
        """
        size = batch_size(self.inputs)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            copy = in_order(tensor.detach(), order, size).clone()
            return copy.requires_grad_(tensor.requires_grad)

        args, kwargs = mapped_once(copied, self.inputs)
        return args, kwargs

    def compute(
        self,
        *,
        gradients: Sequence[torch.Tensor] | None = None,
        order: torch.Tensor | None = None,
    ) -> Result:
        """Calls the model and sends gradients back.

        Args:
            gradients: What to send into the output; else what the script's loss sent, or made-up numbers.
            order: Another order of the samples.

        Raises:
            CannotCheck: If the output does not fit the gradients.
        """
        with self.beside():
            inputs = self.copies(order)
            with self._types_noted() if gradients is None else nullcontext():
                output = self.called(inputs)
            ends = differentiable(output)
            starts = [p for p in [*self.inner.parameters(), *tensors(inputs)] if p.requires_grad]
            if gradients is None:
                gradients = self._sent(ends)
            if [end.shape for end in ends] != [sent.shape for sent in gradients]:
                raise CannotCheck("the model's output has other tensors that carry a gradient than before")
            outputs = [tensor.detach() for tensor in tensors(output)]
            sent = [given.to(end.dtype) for given, end in zip(gradients, ends, strict=True)]
            pulled: Tensors = ()
            if ends and starts:
                pulled = torch.autograd.grad(ends, starts, sent, allow_unused=True)
            return Result(
                outputs=outputs,
                gradients=pulled,
                buffers=list(self.inner.buffers()),
                random=RandomState(self.devices),
                sent=gradients,
            )

    @contextmanager
    def _types_noted(self) -> Iterator[None]:
        """Sees the types in which the model computes by what it saves for the backward pass."""

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point() or tensor.is_complex():
                self.unit = max(self.unit, torch.finfo(tensor.dtype).eps)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        for parameter in self.inner.parameters():
            note(parameter)
        if any(computes_in_tf32(self.inner, device) for device in self.devices):
            self.unit, self.tf32 = max(self.unit, TF32), True

    def called(self, inputs: Inputs) -> Any:
        """Calls the model through the routes that lie on it now, and under the script's own autocast."""

        def original(model: Any, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

        call: Callable[..., Any] = original
        for route in reversed(self.job.routes.get(id(self.model), ())):
            if not isinstance(route, Watch):
                call = partial(_through, route, call)
        with in_autocast(self.call.autocast if self.call is not None else []):
            return call(self.model, *inputs[0], **inputs[1])

    def _sent(self, ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients that came back in the script's last step, or, if unknown, made-up ones."""
        call = self.call
        if call is not None and call.gradients and call.differentiable == len(ends):
            sent = [call.gradients.get(index) for index in range(len(ends))]
            if all(g is None or g.shape == end.shape for g, end in zip(sent, ends, strict=True)):
                return [torch.zeros_like(e) if g is None else g for g, e in zip(sent, ends, strict=True)]
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(end.shape, generator=generator, device="cpu").to(device=end.device, dtype=end.dtype)
            for end in ends
        ]

    def _refuse(self) -> None:
        if id(self.model) not in self.job.inputs:
            raise CannotCheck("no call of the model has been seen")
        if not self.model.training:
            raise CannotCheck("the model is not in training mode now")
        for module in self.inner.modules():
            if is_replayed(module):
                raise CannotCheck(f"{type(module).__name__} {REPLAYED}")
            if (
                isinstance(module, torch.jit.ScriptModule)
                or "FullyShardedDataParallel" in type(module).__name__
            ):
                raise CannotCheck(f"{type(module).__name__} cannot be called beside the training")
        if _hooks_of_the_script(self.inner):
            raise CannotCheck("the model has hooks of the script's, which would hear of another call")
        if any(hasattr(parameter, "_local_tensor") for parameter in self.inner.parameters()):
            raise CannotCheck("its parameters are spread over ranks")
        refuse_lasting_changes(self.call)
        versions = self.call.versions if self.call is not None else ()
        if any(tensor._version != version for tensor, version in versions):
            raise CannotCheck("the script has changed the model's last inputs since")
        if any(_is_freed(tensor) for tensor in tensors(self.inputs)):
            raise CannotCheck("the script has freed the model's last inputs")


def computes_in_tf32(model: nn.Module, device: torch.device) -> bool:
    """Whether products of float32 on a device may be TF32's: those of convolutions, unless the script has
    said no, and others where it has said yes. Which are, cuDNN decides by their layout."""
    if device.type != "cuda" or all(p.dtype is not torch.float32 for p in model.parameters()):
        return False
    now = device_now(device.index)
    if now["hip"] or tuple(now["capability"]) < TENSOR_CORES:
        return False
    convolves = any(isinstance(module, _ConvNd) for module in model.modules())
    return bool(now["tf32"] or (convolves and now["cudnn_tf32"]))


def _hooks_of_the_script(model: nn.Module) -> bool:
    """Whether a call of the model runs hooks that are neither torch's, as of a spectral norm, nor ours."""
    hooks = [hook for found in hooks_of(model) for hook in found.values()]
    homes = {str(getattr(hook, "__module__", None) or type(hook).__module__) for hook in hooks}
    return not {home.partition(".")[0] for home in homes} <= {"torch", "diagnose"}


def _is_freed(tensor: torch.Tensor) -> bool:
    return bool(tensor.layout is torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes())


def _through(route: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
    return route(call, args, kwargs)


def batch_size(inputs: Inputs) -> int:
    """Returns the first length of the first input that has one; 0 if there is none."""
    return next((int(tensor.shape[0]) for tensor in tensors(inputs) if tensor.dim()), 0)


def in_order(tensor: torch.Tensor, order: torch.Tensor | None, size: int) -> torch.Tensor:
    """Returns the tensor with its samples in another order, if it holds `size` of them."""
    if order is None or not tensor.dim() or tensor.shape[0] != size:
        return tensor
    return tensor[order.to(tensor.device)]
