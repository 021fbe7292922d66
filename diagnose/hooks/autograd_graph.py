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
        from torch import is_anomaly_enabled

        passes = 0
        last_step = -1
        used: set[int] = set()
        first_root = last_root = 0
        had_grads: list[bool] = []
        largest: dict[str, Any] = {}
        kept: list[Node] = []
        node_clock = NodeClock(recorder.clock)
        looks, on_inner_backward = recorder.looks, recorder.looks.on_inner_backward
        regions = 0
        inside_bytes = inside_ns = 0.0
        resting: dict[int, Key] = {}  # parameters that are in an optimizer and do not change
        unless_resting: dict[str, Any] = {}

        def on_backward(args: tuple[Any, ...]) -> None:
            nonlocal passes, last_step, first_root, last_root, largest, regions, inside_bytes, inside_ns
            on_inner_backward.clear()
            passes += 1
            if passes <= LAST_PASS + 1:
                note_times()
            if passes > LAST_PASS or not args:
                return
            if recorder.steps != last_step:
                last_step = recorder.steps
                had_grads.append(_has_grads(recorder))
            if passes < FIRST_PASS:
                return
            if passes == FIRST_PASS:
                resting.update({id(parameter): look(parameter) for parameter in _resting(recorder)})
            losses = tensors_of(args)
            roots = [loss.grad_fn for loss in losses if loss.grad_fn]
            if not roots:
                return
            passed: list[Any] = []
            nodes, truncated = walk(roots[0], "torch.utils.checkpoint" in sys.modules, passed)
            if not first_root:
                first_root = roots[0]._sequence_nr()
            used.update(node.sequence for node in nodes if node.sequence < LEAF_SEQUENCE)
            # A GAN's passes differ; the largest says most.
            if len(nodes) > largest.get("num_nodes", 0):
                largest = facts_of(nodes, truncated)
                kept[:] = nodes
                largest["keeps_stacks"] = STACK in getattr(roots[0], "metadata", ())
                largest["searches_nan"] = is_anomaly_enabled()
                last_root = roots[0]._sequence_nr()
                regions, inside_bytes, inside_ns = largest["num_checkpoints"], 0.0, 0.0
                on_inner_backward.append(on_inner)
            if not truncated and can_be_timed(losses) and is_alike(nodes, kept):
                node_clock.watch(passed)
            created = roots[0]._sequence_nr() - first_root
            new = sum(first_root < sequence <= first_root + created for sequence in used)
            if created > 0 and not truncated:
                largest["wasted_share"] = max(0.0, 1 - new / created)
            recorder.facts["graph"] = dict(largest)
            # Not the first step: nothing has a gradient there.
            recorder.facts["zeroes_grads"] = len(had_grads) > 3 and all(had_grads[1:])

        def on_inner(args: tuple[Any, ...]) -> None:
            """A part of the forward was computed again, inside of a node: now it is a graph.

            That node is a checkpointed region of the reentrant kind, or a function of the script's own.
            """
            nonlocal regions, inside_bytes, inside_ns
            begun_ns = recorder.clock()
            roots = [tensor.grad_fn for tensor in tensors_of(args) if tensor.grad_fn]
            index = node_clock.running
            own = kept[index] if index is not None and kept[index].name != REGION else None
            if own is not None:
                # Else it goes through what the forward pass has left, as an implicit layer does.
                if not own.name.endswith("Backward") or not roots or roots[0]._sequence_nr() < last_root:
                    return
                own.num_inner += 1
            elif not regions:
                return
            nodes, truncated = walk(roots[0]) if roots else ([], False)
            inside_bytes += sum(node.num_bytes for node in nodes if node.is_op)
            regions += sum(node.name == REGION for node in nodes) - (own is None)
            inside_ns += recorder.clock() - begun_ns
            if truncated or inside_ns > MAX_TIME_NS:
                largest.pop("inside_bytes", None)
                on_inner_backward.clear()
            elif not regions:
                largest["inside_bytes"] = inside_bytes
                recorder.facts["graph"] = dict(largest)

        def facts_of(nodes: list[Node], truncated: bool) -> dict[str, Any]:
            models = recorder.met.live_modules()
            # Of a part of a graph nobody knows which parameters belong to what.
            loops = {} if truncated else summarize_loops(nodes, recurrent_weights(models))
            return {**summarize(nodes, truncated, wanted()), **loops}

        def wanted() -> set[int]:
            return {id(parameter) for parameter in _parameters(recorder)} - resting.keys()

        def note_times() -> None:
            for index, took_ns in node_clock.times_ns().items():
                before = kept[index].backward_ns
                kept[index].backward_ns = took_ns if before is None else min(before, took_ns)
            node_clock.forget()
            if passes > LAST_PASS and kept:
                note_resting()
                largest.update(facts_of(kept, bool(largest["truncated"])))
                largest["num_resting_tensors"] = sum(node.leaf in resting for node in kept if node.leaf)
                recorder.facts["graph"] = dict(largest)
                kept.clear()

        def note_resting() -> None:
            """Keeps those that still are, and what the graph is if they are trained later after all."""
            still = {id(parameter): look(parameter) for parameter in _resting(recorder)}
            for key in [key for key, before in resting.items() if still.get(key) != before]:
                del resting[key]
            if resting:
                every = {id(parameter) for parameter in _parameters(recorder)}
                told = summarize(kept, bool(largest["truncated"]), every)
                unless_resting.update({name: told[name] for name in OF_WANTED}, num_resting_tensors=0)

        def watch_resting() -> None:
            """Heeds a learning rate that was 0 for a warm-up, or until its layers are to be trained."""
            if unless_resting and not resting.keys() <= {id(each) for each in _resting(recorder)}:
                recorder.facts["graph"] = {**recorder.facts["graph"], **unless_resting}
                unless_resting.clear()

        try:
            with added(looks.on_backward, on_backward), added(looks.cared, watch_resting):
                yield
        finally:
            node_clock.forget()
            on_inner_backward.clear()


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
