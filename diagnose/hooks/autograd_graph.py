"""What one forward pass computed, read off its autograd graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._graph import LEAF_SEQUENCE, summarize, walk
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

FIRST_PASS, LAST_PASS = 9, 14
"""Backward passes that are looked at: the first ones may differ from those that follow."""


class AutogradGraphHook(Hook):
    """Walks the graph of about the tenth backward pass, before it runs, and then takes no more part.

    A few passes more only tell which nodes were created and never used: of a forward for nothing.
    """

    requires = "torch.autograd"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        import torch

        passes = 0
        last_step = -1
        used: set[int] = set()
        first_root = 0
        had_grads: list[bool] = []
        largest: dict[str, Any] = {}

        def on_backward(args: tuple[Any, ...]) -> None:
            nonlocal passes, last_step, first_root, largest
            if chained is not None:
                chained(args)
            passes += 1
            if passes > LAST_PASS or not args:
                return
            if recorder.steps != last_step:
                last_step = recorder.steps
                had_grads.append(_has_grads(recorder))
            if passes < FIRST_PASS:
                return
            losses = args[0] if isinstance(args[0], (tuple, list)) else (args[0],)
            roots = [loss.grad_fn for loss in losses if isinstance(loss, torch.Tensor) and loss.grad_fn]
            if not roots:
                return
            nodes, truncated = walk(roots[0], "torch.utils.checkpoint" in sys.modules)
            if not first_root:
                first_root = roots[0]._sequence_nr()
            used.update(node.sequence for node in nodes if node.sequence < LEAF_SEQUENCE)
            # A GAN's passes differ; the largest says most.
            if len(nodes) > largest.get("num_nodes", 0):
                largest = summarize(nodes, truncated, {id(p) for p in _parameters(recorder)})
            created = roots[0]._sequence_nr() - first_root
            new = sum(first_root < sequence <= first_root + created for sequence in used)
            if created > 0 and not truncated:
                largest["wasted_share"] = max(0.0, 1 - new / created)
            recorder.facts["graph"] = dict(largest)
            # Not the first step: nothing has a gradient there.
            recorder.facts["zeroes_grads"] = len(had_grads) > 3 and all(had_grads[1:])

        chained = recorder.on_backward
        recorder.on_backward = on_backward
        try:
            yield
        finally:
            if recorder.on_backward is on_backward:
                recorder.on_backward = chained


def _parameters(recorder: Recorder) -> Iterator[Any]:
    """Every parameter that some optimizer updates."""
    for reference in recorder.optimizers:
        for group in getattr(reference(), "param_groups", ()):
            yield from group["params"]


def _has_grads(recorder: Recorder) -> bool:
    """Whether the optimizer's gradients are there before the first backward pass of a step."""
    if len(recorder.optimizers) != 1:
        return False  # one may be stepped by another's passes
    first = next(_parameters(recorder), None)
    return first is not None and first.grad is not None
