"""What updating an optimizer's tensors takes on a CPU, and what one call for all of them saves: measured by
`benchmarks/optimizer_step.py`."""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.program import Optimizer

SAVED_AT_ANY_SIZE = {"Adam": 0.7, "AdamW": 0.7}
"""Part of a step on a CPU that one call saves also of few, large tensors: it goes through the memory once,
where one by one is ten passes. It was 0.69 to 0.74 from 2,000 to 2 million elements per tensor, with one
thread and with two. Of SGD with momentum it was 0.31 to 0.56, by the size and the threads, which promises
nothing."""

SAVED = {
    "Adam": (0.78, 600_000),
    "AdamW": (0.78, 600_000),
    "NAdam": (0.7, 600_000),
    "RAdam": (0.7, 600_000),
    "Adagrad": (0.6, 200_000),
    "SGD with momentum": (0.65, 150_000),
    "SGD": (0.5, 15_000),
}
"""Part of a step that one call for all tensors saves where they are small, and the mean size, in elements,
at which it is half of that: the memory is then busier than the calls. Measured on two CPU cores, per tensor
one by one and fused: AdamW 25 and 5.4 us at 64 elements, 128 and 39 us at 65,536; SGD with momentum 6.4 and
2.3, 50 and 26 us; without 3.4 and 1.5, 16 and 14 us. On a CPU no less than `SAVED_AT_ANY_SIZE`."""

LOOP_NS = {"AdamW": (25_000, 1.57), "SGD with momentum": (6_400, 0.67), "SGD": (3_400, 0.19)}
"""Nanoseconds that a step one by one takes on a CPU for each tensor, and for each of its elements: from the
measurements that `SAVED` names. Other kinds have about as many operations as AdamW. Used only to divide a
step among several optimizers."""

MIN_ELEMENTS = 100_000
"""With few tensors and fewer elements the step takes less than what surrounds it in Python."""

SAVED_BY_FOREACH = 0.5
"""On a GPU `foreach` makes a few launches of hundreds; what it saves is at least this."""

GROUP_TENSORS = {"fused": 0.8, "foreach": 2.5, "for-loop": 0.3}
"""What each further group of parameters adds to a step on a CPU, in tensors that are updated one by one:
AdamW 0.8 to 1.0, 2.5 to 2.7 and 0.3, Adagrad 0.7, 2.7 to 3.0 and 0.25 to 1.2, SGD with momentum 0.7 to
1.3, 1.7 to 2.0 and 0.4, in two runs on a shared machine."""


def saved_by_one_group(optimizer: Optimizer) -> float:
    """Returns the part of a step that one group saves, fused where it can be."""
    one = replace(optimizer, num_groups=1)
    if optimizer.can_fuse or optimizer.implementation == "fused":
        one = replace(one, implementation="fused")
    return max(0.0, 1 - takes_ns(one) / takes_ns(optimizer))


def takes_ns(optimizer: Optimizer) -> float:
    """Returns about what an optimizer's step takes on a CPU, for shares of it and of several only."""
    tensors_ns = _one_by_one_ns(optimizer)
    if optimizer.implementation == "fused":
        tensors_ns *= 1 - _saved_of_tensors(optimizer, on_gpu=False)
    return tensors_ns + (_groups_ns(optimizer) if optimizer.implementation else 0.0)


def saved_at_least(optimizer: Optimizer, on_gpu: bool) -> float:
    if on_gpu or optimizer.num_elements < MIN_ELEMENTS:
        return 0.0
    return SAVED_AT_ANY_SIZE.get(optimizer.kind, 0.0)


def saved_part(optimizer: Optimizer, on_gpu: bool) -> float:
    """Returns the part of the time of an optimizer which goes over its tensors that one call for all of
    them saves, or one for each of its groups."""
    part = _saved_of_tensors(optimizer, on_gpu)
    if on_gpu or not optimizer.can_fuse:
        return part
    tensors_ns = _one_by_one_ns(optimizer)
    fused_ns = (1 - part) * tensors_ns + _groups_ns(optimizer, "fused")
    return max(0.0, 1 - fused_ns / (tensors_ns + _groups_ns(optimizer)))


def _saved_of_tensors(optimizer: Optimizer, on_gpu: bool) -> float:
    if not optimizer.can_fuse and optimizer.implementation != "fused":
        return SAVED_BY_FOREACH
    return max(_saved_by_size(optimizer), saved_at_least(optimizer, on_gpu))


def _one_by_one_ns(optimizer: Optimizer) -> float:
    """Returns about what an optimizer's step takes one by one, for shares of several only."""
    per_tensor, per_element = LOOP_NS.get(_measured_as(optimizer), LOOP_NS["AdamW"])
    return optimizer.num_tensors * per_tensor + optimizer.num_elements * per_element


def _groups_ns(optimizer: Optimizer, implementation: str = "") -> float:
    """Returns about what a step takes for its groups besides the first; as it runs, if nothing is given."""
    per_tensor, _ = LOOP_NS.get(_measured_as(optimizer), LOOP_NS["AdamW"])
    a_group = per_tensor * GROUP_TENSORS[implementation or optimizer.implementation]
    return max(0, optimizer.num_groups - 1) * a_group


def _saved_by_size(optimizer: Optimizer) -> float:
    """Returns the part of a step that one call for all tensors saves, by their mean size."""
    most, half_elements = SAVED.get(_measured_as(optimizer), SAVED["SGD"])
    return most / (1 + optimizer.num_elements / max(1, optimizer.num_tensors) / half_elements)


def _measured_as(optimizer: Optimizer) -> str:
    """Returns under which name a kind was measured: an SGD with a momentum has one of its own."""
    momentum = " with momentum" if optimizer.kind == "SGD" and optimizer.state_bytes else ""
    return optimizer.kind + momentum
