"""Keeps activations in the host's memory between forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from diagnose.actions._memory import refuse_unless_short
from diagnose.actions._routes import all_routed, models_with_weights, routes_in_force
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

SMALL_BYTES = 1 << 20
"""Smaller tensors stay: a copy costs more than its bytes, and they are not what fills a device."""


class SaveOnCpu(Action):
    """Moves what the forward pass saves for the backward pass to the host's memory, and back when needed.

    ## What it does
    Tensors of one megabyte and more that autograd saves inside the model's call are copied to pinned
    memory of the host, once each; parameters and buffers stay. The backward pass copies them back.

    ## When it takes effect
    At the next call of the model.

    ## When it cannot help
    Each byte crosses the bus twice, so it costs time whenever the model computes faster than the bus
    carries, and it makes no step faster: named with `--only`, or in a file for `--apply`, it stays for the
    memory that it frees, unless steps take twice as long. On a CPU there is nowhere to move things to. What
    the loss saves stays on the device.

    ## What was measured
    Losses and parameters are equal bit for bit. It is worth it in place of checkpointing where the bytes
    over the bus take less time than computing them again.
    """

    safety = Safety.EXACT
    order = 60
    excludes = frozenset({"regional-compile"})
    touches = "model"
    frees_memory = True
    hangs_on = ("models",)

    def check(self, job: Job) -> None:
        if torch.device(job.device).type == "cpu":
            raise CannotApply("the model is in the host's memory already")
        refuse_unless_short(job)
        models_with_weights(job)

    def apply(self, job: Job, prepared: Any) -> AbstractContextManager[None]:
        return all_routed(job, lambda model: saved_on_host)

    def state(self, job: Job) -> Any:
        return routes_in_force(job)


Saved = tuple[torch.Tensor, "torch.device | None"]


def saved_on_host(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A `core.job.Route` that saves a model's larger activations on the host."""
    staying = {_pointer(tensor) for tensor in (*args[0].parameters(), *args[0].buffers())}
    moved: dict[tuple[Any, ...], tuple[StorageWeakRef, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> Saved:
        num_bytes = tensor.numel() * tensor.element_size()
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if num_bytes < SMALL_BYTES or not plain or _pointer(tensor) in staying:
            return tensor, None
        storage = StorageWeakRef(tensor.untyped_storage())  # it must not keep the memory itself
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
        known = moved.get((storage.cdata, view))
        if known is None or known[0].expired():
            known = moved[storage.cdata, view] = storage, _to_host(tensor)
        return known[1], tensor.device

    def unpack(saved: Saved) -> torch.Tensor:
        tensor, device = saved
        return tensor if device is None else tensor.to(device, non_blocking=tensor.is_pinned())

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = call(*args, **kwargs)
    moved.clear()
    return output


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies with the strides that the tensor has: backward formulas of some kernels count on them."""
    pinned = tensor.device.type == "cuda"
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    return host.copy_(tensor.detach())
