"""What one forward pass computed, read off its autograd graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._contents import Key, look
from diagnose.hooks._graph import LEAF_SEQUENCE, MAX_TIME_NS, REGION, Node, walk
from diagnose.hooks._graph_facts import summarize
from diagnose.hooks._graph_loops import recurrent_weights, summarize_loops
from diagnose.hooks._looks import added
from diagnose.hooks._node_clock import NodeClock
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

FIRST_PASS, LAST_PASS = 9, 14
"""Backward passes that are looked at: the first ones may differ from those that follow."""

OF_WANTED = "unwanted", "num_unwanted_tensors", "num_unreached_tensors"
"""Facts of a graph that depend on what the optimizers update."""
STACK = "traceback_"
"""What torch's anomaly detection keeps of a node under."""


class AutogradGraphHook(Hook):
    """Walks the graph of about the tenth backward pass, before it runs, and then takes no more part.
    What it tells are the facts of `core.graph.Graph`.

    A few passes more tell which nodes were created and never used, of a forward for nothing, and how long
    each node takes. Of these times the quickest counts: on a busy machine now this node waits and now that.
    """

    requires = "torch.autograd"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        passes, looks = _Passes(recorder), recorder.looks
        try:
            with (
                added(looks.on_backward, passes.on_backward),
                added(looks.cared, passes.watch_resting),
            ):
                yield
        finally:
            passes.end()


class _Passes:
    """The backward passes that are looked at, and what they tell."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._count = 0
        self._last_step = -1
        self._used: set[int] = set()
        self._first_root = self._last_root = 0
        self._had_grads: list[bool] = []
        self._largest: dict[str, Any] = {}  # the facts of the largest graph
        self._kept: list[Node] = []  # and its nodes
        self._node_clock = NodeClock(recorder.clock)
        self._regions = 0
        self._inside_bytes = self._inside_ns = 0.0
        self._resting: dict[int, Key] = {}  # parameters that are in an optimizer and do not change
        self._unless_resting: dict[str, Any] = {}

    def on_backward(self, args: tuple[Any, ...]) -> None:
        recorder = self._recorder
        recorder.looks.on_inner_backward.clear()
        self._count += 1
        if self._count <= LAST_PASS + 1:
            self._note_times()
        if self._count > LAST_PASS or not args:
            return
        if recorder.steps != self._last_step:
            self._last_step = recorder.steps
            self._had_grads.append(_has_grads(recorder))
        if self._count < FIRST_PASS:
            return
        if self._count == FIRST_PASS:
            self._resting.update({id(each): look(each) for each in _resting(recorder)})
        losses = tensors_of(args)
        roots = [loss.grad_fn for loss in losses if loss.grad_fn]
        if roots:
            self._look(losses, roots[0])

    def _look(self, losses: Sequence[Any], root: Any) -> None:
        from torch import is_anomaly_enabled

        recorder, largest = self._recorder, self._largest
        passed: list[Any] = []
        nodes, truncated = walk(root, "torch.utils.checkpoint" in sys.modules, passed)
        if not self._first_root:
            self._first_root = root._sequence_nr()
        self._used.update(node.sequence for node in nodes if node.sequence < LEAF_SEQUENCE)
        # A GAN's passes differ; the largest says most.
        if len(nodes) > largest.get("num_nodes", 0):
            self._largest = largest = self._facts_of(nodes, truncated)
            self._kept[:] = nodes
            largest["keeps_stacks"] = STACK in getattr(root, "metadata", ())
            largest["searches_nan"] = is_anomaly_enabled()
            self._last_root = root._sequence_nr()
            self._regions, self._inside_bytes, self._inside_ns = largest["num_checkpoints"], 0.0, 0.0
            recorder.looks.on_inner_backward.append(self._on_inner)
        if not truncated and can_be_timed(losses) and is_alike(nodes, self._kept):
            self._node_clock.watch(passed)
        first = self._first_root
        created = root._sequence_nr() - first
        new = sum(first < sequence <= first + created for sequence in self._used)
        if created > 0 and not truncated:
            largest["wasted_share"] = max(0.0, 1 - new / created)
        recorder.facts["graph"] = dict(largest)
        # Not the first step: nothing has a gradient there.
        recorder.facts["zeroes_grads"] = len(self._had_grads) > 3 and all(self._had_grads[1:])

    def _on_inner(self, args: tuple[Any, ...]) -> None:
        """A part of the forward was computed again, inside of a node: now it is a graph.

        That node is a checkpointed region of the reentrant kind, or a function of the script's own.
        """
        recorder, kept = self._recorder, self._kept
        begun_ns = recorder.clock()
        roots = [tensor.grad_fn for tensor in tensors_of(args) if tensor.grad_fn]
        index = self._node_clock.running
        own = kept[index] if index is not None and kept[index].name != REGION else None
        if own is not None:
            # Else it goes through what the forward pass has left, as an implicit layer does.
            if not own.name.endswith("Backward") or not roots or roots[0]._sequence_nr() < self._last_root:
                return
            own.num_inner += 1
        elif not self._regions:
            return
        nodes, truncated = walk(roots[0]) if roots else ([], False)
        self._inside_bytes += sum(node.num_bytes for node in nodes if node.is_op)
        self._regions += sum(node.name == REGION for node in nodes) - (own is None)
        self._inside_ns += recorder.clock() - begun_ns
        if truncated or self._inside_ns > MAX_TIME_NS:
            self._largest.pop("inside_bytes", None)
            recorder.looks.on_inner_backward.clear()
        elif not self._regions:
            self._largest["inside_bytes"] = self._inside_bytes
            recorder.facts["graph"] = dict(self._largest)

    def _facts_of(self, nodes: list[Node], truncated: bool) -> dict[str, Any]:
        models = self._recorder.met.live_modules()
        wanted = {id(parameter) for parameter in _parameters(self._recorder)} - self._resting.keys()
        # Of a part of a graph nobody knows which parameters belong to what.
        loops = {} if truncated else summarize_loops(nodes, recurrent_weights(models))
        return {**summarize(nodes, truncated, wanted), **loops}

    def _note_times(self) -> None:
        kept = self._kept
        for index, took_ns in self._node_clock.times_ns().items():
            before = kept[index].backward_ns
            kept[index].backward_ns = took_ns if before is None else min(before, took_ns)
        self._node_clock.forget()
        if self._count > LAST_PASS and kept:
            self._note_resting()
            largest, resting = self._largest, self._resting
            largest.update(self._facts_of(kept, bool(largest["truncated"])))
            largest["num_resting_tensors"] = sum(node.leaf in resting for node in kept if node.leaf)
            self._recorder.facts["graph"] = dict(largest)
            kept.clear()

    def _note_resting(self) -> None:
        """Keeps those that still are, and what the graph is if they are trained later after all."""
        still = {id(parameter): look(parameter) for parameter in _resting(self._recorder)}
        self._resting = {key: before for key, before in self._resting.items() if still.get(key) == before}
        if self._resting:
            every = {id(parameter) for parameter in _parameters(self._recorder)}
            told = summarize(self._kept, bool(self._largest["truncated"]), every)
            self._unless_resting = {**{name: told[name] for name in OF_WANTED}, "num_resting_tensors": 0}

    def watch_resting(self) -> None:
        """Heeds a learning rate that was 0 for a warm-up, or until its layers are to be trained."""
        now = {id(each) for each in _resting(self._recorder)} if self._unless_resting else set()
        if self._unless_resting and not self._resting.keys() <= now:
            facts = self._recorder.facts
            facts["graph"] = {**facts["graph"], **self._unless_resting}
            self._unless_resting = {}

    def end(self) -> None:
        self._node_clock.forget()
        self._recorder.looks.on_inner_backward.clear()


def tensors_of(args: tuple[Any, ...]) -> list[Any]:
    """Returns the tensors that a backward pass with these arguments begins with."""
    import torch

    given = args[0] if args and isinstance(args[0], (tuple, list)) else args[:1]
    return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]


def is_alike(nodes: Sequence[Node], others: Sequence[Node]) -> bool:
    """Whether two passes have the same nodes in the same places."""
    return [node.name for node in nodes] == [node.name for node in others]


def can_be_timed(losses: Sequence[Any]) -> bool:
    """Whether the nodes run in the calling thread, one by one, and no compiler takes them all together."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return (
        all(loss.device.type == "cpu" for loss in losses)
        and not getattr(compiled, "compiled_autograd_enabled", False)
        and not getattr(compiled, "in_compiled_autograd_region", False)
    )


def _parameters(recorder: Recorder) -> Iterator[Any]:
    """Every parameter that some optimizer updates."""
    for optimizer in recorder.met.live_optimizers():
        for group in getattr(optimizer, "param_groups", ()):
            yield from group["params"]


def _resting(recorder: Recorder) -> Iterator[Any]:
    """Every parameter that an optimizer has in a group with a learning rate of 0 and that wants a gradient;
    none where no group has another one, as in a warm-up that has not begun."""
    optimizers = recorder.met.live_optimizers()
    groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
    at_rest = [_is_zero(group.get("lr")) for group in groups]
    trained = {
        id(parameter)
        for group, rests in zip(groups, at_rest, strict=True)
        for parameter in (() if rests else group["params"])
    }
    for group, rests in zip(groups, at_rest, strict=True) if trained else ():
        for parameter in group["params"] if rests else ():
            if parameter.requires_grad and id(parameter) not in trained:
                yield parameter


def _is_zero(rate: Any) -> bool:
    """Whether a learning rate is 0; one on a device, for which it would have to wait, counts as another."""
    device = getattr(rate, "device", None)
    return rate is not None and (device is None or device.type == "cpu") and not float(rate)


def _has_grads(recorder: Recorder) -> bool:
    """Whether the optimizer's gradients are there before the first backward pass of a step."""
    if len(recorder.met.optimizers) != 1:
        return False  # one may be stepped by another's passes
    first = next(_parameters(recorder), None)
    return first is not None and first.grad is not None
