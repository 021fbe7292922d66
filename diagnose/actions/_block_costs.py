"""What each block of a model keeps for the backward pass, and what computing it again costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from diagnose.actions._checkpointed import SLOT
from diagnose.actions._nested import tensors
from diagnose.actions._shadow_step import Shadow
from diagnose.actions._untouched import CannotCheck, storages
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job

UNITS = 1000
"""Bytes are counted in so many units of the wanted sum: the choice is exact to a tenth of a per cent."""


@dataclass(slots=True, kw_only=True)
class BlockCost:
    """One block.

    Attributes:
        block: The module.
        num_bytes: Bytes of activations that it keeps and that checkpointing frees.
        time_ns: Of its forward pass; 0 where it was not called.
    """

    block: nn.Module
    num_bytes: int = 0
    time_ns: int = 0


def measure_blocks(job: Job, model: nn.Module, blocks: Sequence[nn.Module]) -> list[BlockCost]:
    """Calls the model once beside the training, and weighs its blocks.

    Raises:
        CannotApply: If the model cannot be called so.
    """
    costs = [BlockCost(block=block) for block in blocks]
    try:
        shadow = Shadow(job, model)
        with job.unmeasured(), ExitStack() as stack:
            shadow.rehearse()
            for cost in costs:
                stack.enter_context(_weighed(cost, model))
            shadow.compute()
    except CannotCheck as error:
        raise CannotApply(f"its blocks cannot be measured: {error}") from error
    return [cost for cost in costs if cost.time_ns]


@contextmanager
def _weighed(cost: BlockCost, model: nn.Module) -> Iterator[None]:
    """Weighs a block at each call. What it keeps counts once, parameters and buffers not at all."""
    block = cost.block
    original: Callable[..., Any] = block._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        staying = storages((*model.parameters(), *model.buffers(), *tensors((args, kwargs))))
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in staying:
                kept[pointer] = tensor
            return tensor

        begun = _now_ns(args)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = original(*args, **kwargs)
        cost.time_ns += _now_ns(args) - begun
        results = storages(tensors(output))
        cost.num_bytes += sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in results)
        return output

    vars(block)[SLOT] = call
    try:
        yield
    finally:
        del vars(block)[SLOT]


def _now_ns(args: Any) -> int:
    """The time, when the device has done what it was given: this is no step of the script's."""
    for device in {tensor.device for tensor in tensors(args)}:
        if device.type != "cpu":
            torch.get_device_module(device.type).synchronize(device)
    return perf_counter_ns()


def cheapest(costs: Sequence[BlockCost], wanted_bytes: int) -> list[BlockCost]:
    """Returns the blocks that free at least so many bytes in the least time; all, if all free less."""
    if sum(cost.num_bytes for cost in costs) <= wanted_bytes:
        return [cost for cost in costs if cost.num_bytes]
    unit = max(1.0, wanted_bytes / UNITS)
    goal = int(wanted_bytes / unit)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}  # freed units -> least time, and by which
    for index, cost in enumerate(costs):
        for freed, (time_ns, chosen) in sorted(best.items(), reverse=True):
            together = min(goal, freed + int(cost.num_bytes / unit))
            candidate = (time_ns + cost.time_ns, (*chosen, index))
            if together > freed and (together not in best or candidate < best[together]):
                best[together] = candidate
    reached = best[max(best)]
    return [costs[index] for index in reached[1]]
