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
        watch = _Watch(recorder)
        try:
            with added(recorder.looks.on_backward, watch.on_backward):
                yield
        finally:
            watch.end()


class _Watch:
    """The passes that are watched, and what becomes of their gradients."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._passes = 0
        self._kinds: dict[tuple[tuple[str, ...], frozenset[int]], Kind] = {}
        self._timed: Kind | None = None
        self._node_clock = NodeClock(recorder.clock)
        self._begun_at = FIRST_PASS
        self._is_short: bool | None = None  # whether the only optimizer has stepped without some gradient

    def on_backward(self, args: tuple[Any, ...]) -> None:
        recorder = self._recorder
        if not recorder.accumulates:
            return
        self._passes += 1
        if self._passes < FIRST_PASS or not recorder.met.optimizers:
            return
        self._note_times()
        alone = len(recorder.met.optimizers) < 2
        if alone and self._is_short is None and self._passes < LAST_BEGIN:
            self._begun_at = self._passes + 1
            self._look_at_steps()
            return
        watched = [each for kind in self._kinds.values() for each in kind.passes]
        is_over = self._passes > LAST_LOOK or (self._passes > self._begun_at and not watched)
        if is_over or (alone and not self._is_short):
            self._stop_looking_at_steps()
            return
        self._look_at_steps()
        parameters = parameters_of(recorder)
        for each in watched:
            each.look(parameters, alone)
        if len(watched) < NUM_PASSES:
            self._begin(tensors_of(args), parameters)
        elif self._passes == LAST_LOOK or not any(each.unknown for each in watched):
            recorder.facts["dropped"] = summarize([*self._kinds.values()])
            self._kinds.clear()
            self._stop_looking_at_steps()

    def _on_step(self, optimizer: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._is_short is None:
            self._is_short = any(each.requires_grad and each.grad is None for each in parameters)
        for kind in self._kinds.values():
            for each in kind.passes:
                each.look_at_step(parameters)

    def _look_at_steps(self) -> None:
        if self._on_step not in self._recorder.looks.on_step:
            self._recorder.looks.on_step.append(self._on_step)

    def _stop_looking_at_steps(self) -> None:
        if self._on_step in self._recorder.looks.on_step:
            self._recorder.looks.on_step.remove(self._on_step)

    def _begin(self, losses: Sequence[Any], parameters: Mapping[int, Owned]) -> None:
        """Watches another pass."""
        passed: list[Any] = []
        roots = [loss.grad_fn for loss in losses if loss.grad_fn]
        nodes, truncated = walk(roots[0], passed=passed) if len(roots) == 1 else ([], True)
        if truncated:
            self._kinds.clear()
            return
        reached = frozenset(parameters.keys() & {node.leaf for node in nodes})
        key = tuple(node.name for node in nodes), reached
        self._timed = self._kinds.setdefault(key, Kind(nodes, user_frame(sys._getframe())))
        self._timed.passes.append(
            Pass(
                {key: parameters[key].steps for key in reached},
                before={key: look(parameters[key].parameter) for key in reached},
                in_step=self._recorder.in_step > 0,
            )
        )
        if can_be_timed(losses):
            self._node_clock.watch(passed)

    def _note_times(self) -> None:
        nodes = self._timed.nodes if self._timed is not None else []
        for index, took_ns in self._node_clock.times_ns().items() if nodes else ():
            node = nodes[index]
            node.backward_ns = min(took_ns, node.backward_ns or took_ns)
        self._node_clock.forget()
        self._timed = None

    def end(self) -> None:
        self._node_clock.forget()
        self._stop_looking_at_steps()


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
