"""Gradients that backward passes compute and the loop throws away before an optimizer uses them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diagnose.hooks._contents import Key, look
from diagnose.hooks._frames import resolve, user_frame
from diagnose.hooks._graph import Node, walk
from diagnose.hooks._graph_facts import unwanted_of, work_for_nothing, work_of
from diagnose.hooks._looks import added
from diagnose.hooks._node_clock import NodeClock
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.autograd_graph import LAST_PASS, can_be_timed, tensors_of
from diagnose.hooks.base import Hook

FIRST_PASS = LAST_PASS + 2
"""The clocks of the graph's hook are off its nodes then."""

NUM_PASSES = 12
"""As many are watched: whole rounds of two, three, four or six passes."""

LAST_LOOK = FIRST_PASS + 3 * NUM_PASSES
"""What became of a gradient must be known by this pass."""

LAST_BEGIN = LAST_LOOK - 2 * NUM_PASSES
"""With one optimizer, it must have stepped by this pass for some to be watched."""


class Owned(NamedTuple):
    """A parameter, and how often its optimizer has stepped: fused steps do not change its version."""

    parameter: Any
    steps: int


@dataclass(slots=True)
class Pass:
    """What became of the gradients of one backward pass, by the identities of their parameters.

    Attributes:
        steps: The parameters that it reached, and how often their optimizer had stepped before it.
        dropped: Those whose gradient was gone before another step.
        used: Those of which there was one.
        missing: Those of the dropped whose optimizer stepped then, without a gradient of theirs.
        before: What tells whether they have changed since.
        in_step: Whether the pass was in the closure of an optimizer's step.
    """

    steps: dict[int, int]
    dropped: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    before: Mapping[int, Key] = field(default_factory=dict)
    in_step: bool = False

    @property
    def unknown(self) -> set[int]:
        """The parameters of whose gradient it is not known what became."""
        return self.steps.keys() - self.dropped - self.used

    def look(self, parameters: Mapping[int, Owned], alone: bool = False) -> None:
        """Looks, before another pass, what became of those of which that is not known.

        Args:
            parameters: What optimizers update.
            alone: Whether all belong to one optimizer: what is gone before it steps may have been put aside
                and come back.
        """
        for key in self.unknown:
            owned = parameters.get(key)
            if owned is None or owned.steps != self.steps[key]:
                self.used.add(key)
            elif owned.parameter.grad is None and not alone:
                self.dropped.add(key)

    def look_at_step(self, parameters: Sequence[Any]) -> None:
        """Looks at what an optimizer is about to step with.

        Args:
            parameters: Those of this optimizer.
        """
        unknown = set() if self.in_step else self.unknown
        for parameter in parameters:
            key = id(parameter)
            if key in unknown and parameter.grad is None and look(parameter) == self.before.get(key):
                self.dropped.add(key)
                self.missing.add(key)
            elif key in unknown:
                self.used.add(key)


@dataclass(slots=True)
class Kind:
    """Passes with the same graph, to the same parameters: what is dropped after each of them."""

    nodes: list[Node]
    place: tuple[int, int] | None
    passes: list[Pass] = field(default_factory=list)

    def dropped(self, used: set[int]) -> set[int]:
        """Returns what is dropped after each pass. What no pass at all is of use to, something else than a
        step may read, unless its optimizer steps without it; and one pass says nothing: a loss that is not
        finite costs a step, too."""
        if len(self.passes) < 2:
            return set()
        return set.intersection(*(each.dropped for each in self.passes)) & (used | self.missing())

    def missing(self) -> set[int]:
        """Returns of what an optimizer has no gradient at its step after each pass."""
        return set.intersection(*(each.missing for each in self.passes))


class DroppedGradientsHook(Hook):
    """Watches some backward passes of a loop with several optimizers: a GAN's, an actor's and its critic's.

    A pass through a model reaches the parameters of what made its input, too. Where their gradients are
    gone by a later pass and no step came between, or by that of their own optimizer, computing them was for
    nothing. A loop with one optimizer is watched where that steps without some of its gradients.
    """

    requires = "torch.autograd"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        passes = 0
        kinds: dict[tuple[tuple[str, ...], frozenset[int]], Kind] = {}
        timed: Kind | None = None
        node_clock = NodeClock(recorder.clock)
        looks = recorder.looks
        begun_at = FIRST_PASS
        is_short: bool | None = None  # whether the only optimizer has stepped without some gradient

        def on_backward(args: tuple[Any, ...]) -> None:
            nonlocal passes, begun_at
            if not recorder.accumulates:
                return
            passes += 1
            if passes < FIRST_PASS or not recorder.met.optimizers:
                return
            note_times()
            alone = len(recorder.met.optimizers) < 2
            if alone and is_short is None and passes < LAST_BEGIN:
                begun_at = passes + 1
                look_at_steps()
                return
            watched = [each for kind in kinds.values() for each in kind.passes]
            if passes > LAST_LOOK or (passes > begun_at and not watched) or (alone and not is_short):
                stop_looking_at_steps()
                return
            look_at_steps()
            parameters = parameters_of(recorder)
            for each in watched:
                each.look(parameters, alone)
            if len(watched) < NUM_PASSES:
                watch(tensors_of(args), parameters)
            elif passes == LAST_LOOK or all(
                each.steps.keys() == each.dropped | each.used for each in watched
            ):
                recorder.facts["dropped"] = summarize([*kinds.values()])
                kinds.clear()
                stop_looking_at_steps()

        def on_step(optimizer: Any) -> None:
            nonlocal is_short
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if is_short is None:
                is_short = any(each.requires_grad and each.grad is None for each in parameters)
            for kind in kinds.values():
                for each in kind.passes:
                    each.look_at_step(parameters)

        def look_at_steps() -> None:
            if on_step not in looks.on_step:
                looks.on_step.append(on_step)

        def stop_looking_at_steps() -> None:
            if on_step in looks.on_step:
                looks.on_step.remove(on_step)

        def watch(losses: Sequence[Any], parameters: Mapping[int, Owned]) -> None:
            nonlocal timed
            passed: list[Any] = []
            roots = [loss.grad_fn for loss in losses if loss.grad_fn]
            nodes, truncated = walk(roots[0], passed=passed) if len(roots) == 1 else ([], True)
            if truncated:
                kinds.clear()
                return
            reached = frozenset(parameters.keys() & {node.leaf for node in nodes})
            key = tuple(node.name for node in nodes), reached
            timed = kinds.setdefault(key, Kind(nodes, user_frame(sys._getframe())))
            timed.passes.append(
                Pass(
                    {key: parameters[key].steps for key in reached},
                    before={key: look(parameters[key].parameter) for key in reached},
                    in_step=recorder.in_step > 0,
                )
            )
            if can_be_timed(losses):
                node_clock.watch(passed)

        def note_times() -> None:
            nonlocal timed
            nodes = timed.nodes if timed is not None else []
            for index, took_ns in node_clock.times_ns().items() if nodes else ():
                node = nodes[index]
                node.backward_ns = min(took_ns, node.backward_ns or took_ns)
            node_clock.forget()
            timed = None

        try:
            with added(looks.on_backward, on_backward):
                yield
        finally:
            node_clock.forget()
            stop_looking_at_steps()


def parameters_of(recorder: Recorder) -> dict[int, Owned]:
    """Returns every parameter that some optimizer updates, by its identity."""
    return {
        id(parameter): Owned(parameter, recorder.met.stepped_times.get(id(optimizer), 0))
        for optimizer in recorder.met.live_optimizers()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def summarize(kinds: Sequence[Kind]) -> dict[str, Any]:
    """Returns the facts of `core.graph.Dropped`."""
    used = {key for kind in kinds for each in kind.passes for key in each.used}
    totals: list[dict[str, Any]] = []
    unwanted: list[dict[str, Any]] = []
    tensors: set[int] = set()
    worst, most, apart, never_used = kinds[0], 0.0, False, False
    for kind in kinds:
        dropped = kind.dropped(used)
        leaves = {node.leaf for node in kind.nodes if node.leaf}
        ops, edge = unwanted_of(kind.nodes, leaves - dropped)
        totals += [work_of(kind.nodes)] * len(kind.passes)
        unwanted += [work_for_nothing(ops, edge)] * len(kind.passes)
        tensors |= dropped
        of_ops, of_edge = (sum(op.flops for op in some) for some in (ops, edge))
        if dropped and (of_ops + of_edge) * len(kind.passes) > most:
            worst, most, apart = kind, (of_ops + of_edge) * len(kind.passes), of_ops > of_edge
            never_used = dropped <= kind.missing() - used
    file, line, _ = resolve(*(worst.place or (0, 0)))
    return {
        "num_tensors": len(tensors),
        "total": _sum(totals),
        "unwanted": _sum(unwanted),
        "never_used": never_used,
        "is_apart": apart,
        "file": file,
        "line": line,
    }


def _sum(works: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds works up; a time is known where that of all is."""
    return {
        name: None if any(work[name] is None for work in works) else sum(work[name] for work in works)
        for name in works[0]
    }
