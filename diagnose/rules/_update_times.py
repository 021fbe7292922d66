"""What updating an optimizer's tensors takes on a CPU, and what one call for all of them saves: measured by
`benchmarks/optimizer_step.py`."""

from __future__ import annotations

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


def one_by_one_ns(optimizer: Optimizer) -> float:
    """Returns about what an optimizer's step takes one by one, for shares of several only."""
    per_tensor, per_element = LOOP_NS.get(_measured_as(optimizer), LOOP_NS["AdamW"])
    return optimizer.num_tensors * per_tensor + optimizer.num_elements * per_element


def saved_by_size(optimizer: Optimizer) -> float:
    """Returns the part of a step that one call for all tensors saves, by their mean size."""
    most, half_elements = SAVED.get(_measured_as(optimizer), SAVED["SGD"])
    return most / (1 + optimizer.num_elements / max(1, optimizer.num_tensors) / half_elements)


def _measured_as(optimizer: Optimizer) -> str:
    """Returns under which name a kind was measured: an SGD with a momentum has one of its own."""
    momentum = " with momentum" if optimizer.kind == "SGD" and optimizer.state_bytes else ""
    return optimizer.kind + momentum
