"""A loop of tiny operators: calling them takes longer than computing"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.program import Model, Program
from diagnose.core.units import format_duration, format_ms, format_share
from diagnose.rules._compute import model_ns, of_work, to_compile
from diagnose.rules._examples import profile
from diagnose.rules._lines import at, bounds, lost_of, named, seen_in, share_of
from diagnose.rules.base import Rule
from diagnose.rules.slow_rollout import is_rollout

MIN_OPS = 150
"""A small model has fewer, and is small because its task is."""

MIN_OPS_PER_TENSOR = 6
"""Layers have one to three operations per parameter tensor, with normalization, activation and residual. A
model of many small layers is slow to call as well, but that is its task; more operations than this go round
in a loop over steps, samples or columns."""

MIN_LINE_SHARE = 0.05
"""Part of the step from which on a loop is worth rewriting."""

MIN_LOOPED = 40
"""Operations of loops in an otherwise sound model from which on their loop is one: fewer are a formula that
somebody wrote out, such as the product of two rotations."""

MIN_SMALL_SHARE = 0.7
"""Part of the operations that must be too small to be worth a call."""

MAX_NS_PER_OP = 150_000
"""An eager operation takes 5 to 20 us on a CPU, forward, and two to three times that backward; more than
this, contention included, and it is not the call that takes the time."""

SAVED = (0.4, 0.9, 0.98)
"""What compiling, or one large operation in place of many small ones, saves of their time: compiled code
still has some calls, a batched operation hardly any."""


SEQUENTIAL = 0.4
"""Where a chain of operations that each need the one before holds this part of them all, it is a
recurrence: half of what a cell of an LSTM does, all of what a solver of differential equations does. In a
loop over samples or columns it is one in several at most, of a sum."""

SAVED_SEQUENTIAL = (0.1, 0.45, 0.9)
"""What compiling saves of a recurrence: Python and torch's calls, but no operation becomes larger.
Cells win least, a module for the whole sequence most."""

LOOPS = {"slices", "chain"}
"""Idioms of loops whose turns one operation on the whole tensor can do, or one kernel that is compiled."""

ROWS = "rows"
"""Idiom of those of `slices` of which there may be few, and large ones: views, heads, codebooks."""

MANY_SMALL = 0.25
"""Part of the operations that are small where rows are taken to be: two views of a batch of pictures are
large, and the layers that make them."""

SAVED_OF_LINES = (0.4, 0.9)
"""Likewise, of a loop of the script's over slices, whose size was not seen; at most all of it."""

RECURS = (
    "Compile {what}: each operation needs the one before, so that they cannot become one. A loop over"
    " nn.LSTMCell or nn.GRUCell can be one nn.LSTM or nn.GRU."
)
ACTS = (
    "Choose the actions without gradients, keep the observations, and after the episode let each model"
    " compute all of them in one call, for the probabilities of what was chosen and for the values."
)
LOOPS_OVER = "Replace loops over small tensors by one operation on a large one, or compile {what}."


def graph_of(num_ops: int, elements: int = 1000, tensors: int = 8, depth: int | None = None) -> Graph:
    work = Work(num_ops=num_ops, flops=0.0, num_bytes=4.0 * elements * num_ops)
    return Graph(
        num_nodes=2 * num_ops,
        names={"AccumulateGrad": tensors},
        total=work,
        small_ops=work if elements < 16_000 else Work(),
        small_depth=depth,
    )


def beside_a_loop(num_ops: int, took_ms: float, depth: int = 0, **facts: Any) -> Program:
    """Returns a program whose model has many layers, and a loop of so many tiny operations."""
    whole = Work(num_ops=600, flops=1e9, num_bytes=1e8, backward_ns=20e6, forward_ns=10e6)
    loop = Work(num_ops=num_ops, num_bytes=4e3, backward_ns=took_ms * 0.7e6, forward_ns=took_ms * 0.3e6)
    names = {"AccumulateGrad": 90}
    graph = Graph(num_nodes=900, names=names, total=whole, small_ops=loop, looped=loop, looped_depth=depth)
    return Program(graph=replace(graph, **facts), models=(Model(kind="Net", num_tensors=90),))


LAGS = at("x = x + x.roll(lag, 1).clamp(-1, 1)", 0.2, "python-loop", "chain", phase=Phase.FORWARD)
COLUMNS = at("means[:, i] = (x[:, i] - 0.5) / 0.2", 0.2, "python-loop", "slices", phase=Phase.FORWARD)
OF_ROWS = at(
    "x = stack([r - r.mean() for r in x])", 0.2, "python-loop", "slices", "rows", phase=Phase.FORWARD
)
LAYERS = at("h = torch.relu(layer(h))", 0.6, "python-loop", phase=Phase.FORWARD)


class SmallOperators(Rule):
    """
    ## What it means
    The model, or a part of it, loops over samples, steps or columns, and so is hundreds of operations on a
    few thousand numbers each. Python and torch need some microseconds to call each of them, forward and
    backward, and the arithmetic takes less. Loops are told from layers by their parameters: layers have
    some of their own, and turns of a loop share them, or have none.

    ## What to do
    Compute the same in few operations: batch loops over samples, steps or heads into one tensor. Or let
    `torch.compile` fuse them. Where each step needs the one before, only the latter remains, or one module
    for the whole sequence: `nn.LSTM` for a loop over `nn.LSTMCell`, `nn.GRU` for one over `nn.GRUCell`.

    ## When it is wrong
    A compiler that does not support the model. A model of many small layers is slow to call, too, and not
    named: nothing in it is done twice. Of a loop without gradients only its line is seen, not how large its
    tensors are; one over rows that may be few, and large, is named only where many of the model's
    operations are small. On a device the same shows as idleness between kernels: `launch-bound`.
    """

    needs = ("program.graph",)
    actions = ("regional-compile",)
    explains = ("noisy-neighbour", "step-jitter")
    residual = True
    fires_on = (
        profile(step_ms=20, program=Program(graph=graph_of(400))),
        profile(step_ms=10, program=Program(graph=graph_of(200, elements=10_000))),
        profile(step_ms=20, program=Program(graph=graph_of(400, depth=240))),
        profile(step_ms=20, program=Program(graph=graph_of(22)), where=(COLUMNS,)),
        profile(step_ms=20, program=Program(graph=graph_of(22)), where=(LAGS,)),
        profile(step_ms=20, program=Program(graph=graph_of(22)), where=(OF_ROWS,)),
        profile(step_ms=35, program=beside_a_loop(110, 6)),
        profile(step_ms=35, program=beside_a_loop(110, 6, depth=100, names={"PackPaddedSequence": 1})),
    )
    silent_on = (
        profile(step_ms=20, program=Program(graph=graph_of(60))),
        profile(step_ms=400, program=Program(graph=graph_of(400, elements=1_000_000))),
        profile(step_ms=400, program=Program(graph=graph_of(400))),
        profile(step_ms=20, device="cuda", program=Program(graph=graph_of(400))),
        profile(step_ms=20, program=Program(graph=graph_of(400, tensors=130))),
        profile(
            step_ms=20,
            program=Program(graph=graph_of(400, tensors=1), models=(Model(kind="Net", num_tensors=200),)),
        ),
        profile(step_ms=20, program=Program(graph=graph_of(22)), where=(LAYERS,)),
        profile(step_ms=20, program=Program(graph=graph_of(22, elements=1_000_000)), where=(OF_ROWS,)),
        profile(step_ms=20, program=Program(graph=replace(graph_of(400), names={"PackPaddedSequence": 1}))),
        profile(
            step_ms=20,
            program=Program(graph=graph_of(400), models=(Model(kind="Tagger", loops_in_torch=True),)),
        ),
        profile(step_ms=35, program=beside_a_loop(28, 6)),
        profile(step_ms=35, program=beside_a_loop(110, 0.5)),
        profile(step_ms=35, program=beside_a_loop(110, 6, second_order=True)),
    )

    def applies(self, profile: Profile) -> bool:
        return profile.run.device == "cpu"

    def check(self, profile: Profile) -> Finding | None:
        # A loop without gradients is in no graph, and one with them may have no telling line.
        found = [self._in_loops(profile), self._in_lines(profile)]
        return self._in_model(profile) or max(
            (finding for finding in found if finding), key=lambda each: each.lost_ns_per_step, default=None
        )

    def _in_model(self, profile: Profile) -> Finding | None:
        """Finds a model that is tiny operations for the most part."""
        graph = profile.program.graph
        assert graph is not None
        models = profile.program.models
        if "PackPaddedSequence" in graph.names or (models and all(m.loops_in_torch for m in models)):
            return None  # torch itself loops over the steps, which no compiler takes apart
        small, total = graph.small_ops, graph.total
        if small.num_ops < MIN_OPS or small.num_ops < MIN_SMALL_SHARE * total.num_ops:
            return None
        num_tensors = max(graph.names.get("AccumulateGrad", 0), sum(model.num_tensors for model in models))
        if small.num_ops < MIN_OPS_PER_TENSOR * num_tensors:
            return None
        took = of_work(profile, small, graph)
        if sum(took.values()) > MAX_NS_PER_OP * small.num_ops * profile.steps.passes:
            return None
        return self._found(
            profile,
            small,
            graph.small_depth,
            took,
            f"{small.num_ops} tiny operators use {num_tensors} parameter tensors over and over.",
        )

    def _in_loops(self, profile: Profile) -> Finding | None:
        """Finds loops in a model that is sound for the rest."""
        graph = profile.program.graph
        assert graph is not None
        looped, step_ns = graph.looped, profile.step_time_ns
        if looped is None or looped.num_ops < MIN_LOOPED or graph.second_order or profile.program.fsdp:
            return None  # of a gradient's gradient, or of parts of one parameter, layers look like loops
        took = of_work(profile, looped, graph)
        took_ns = sum(took.values())
        most_ns = MAX_NS_PER_OP * looped.num_ops * profile.steps.passes
        if not MIN_LINE_SHARE * step_ns <= took_ns <= most_ns:
            return None
        part = format_share(took_ns / step_ns)
        return self._found(
            profile,
            looped,
            graph.looped_depth,
            took,
            f"{looped.num_ops} tiny operators are turns of loops, {part} of each step.",
        )

    def _found(
        self, profile: Profile, work: Work, depth: int | None, took: Mapping[Phase, float], summary: str
    ) -> Finding:
        """Returns the finding about such operations of the graph.

        Args:
            profile: The run.
            work: They.
            depth: The most of them of which each needs the one before.
            took: Nanoseconds of each step that they take, by phase.
            summary: The finding's.
        """
        graph = profile.program.graph
        assert graph is not None
        took_ns = sum(took.values())
        per_op_ns = took_ns / (work.num_ops * profile.steps.passes)
        recurs = depth is not None and depth >= SEQUENTIAL * work.num_ops
        acts = any(map(is_rollout, profile.where))
        low, expected, high = SAVED_SEQUENTIAL if recurs else SAVED
        loop = None
        if acts and not recurs:
            fix, code = ACTS, ""
        else:
            advice = RECURS if recurs else LOOPS_OVER
            loop = _looping_function(profile)
            name, what = (loop.function,) * 2 if loop else ("model", "the model")
            fix, code = to_compile(profile, advice.format(what=what), f"{name} = torch.compile({name})")
        return Finding(
            rule=self.name,
            summary=summary,
            lost_ns={phase: expected * ns for phase, ns in took.items()},
            low_ns=low * took_ns,
            high_ns=high * took_ns,
            assumption="it is compiled"
            if recurs
            else "the same is computed in few large operators, or compiled",
            evidence=(
                f"{work.num_ops} of {graph.total.num_ops} operations are of a few thousand numbers each.",
                f"They take {format_duration(per_op_ns)} each, forward and backward: about what calling"
                " them costs.",
                f"Forward and backward are {format_share(model_ns(profile) / profile.step_time_ns)} of the"
                " step.",
                *([f"{depth} of them each need the one before."] if recurs else []),
                *(
                    [f"{loop.function} has the loop, at {Path(loop.file).name}:{loop.line}."]
                    if loop
                    else []
                ),
            ),
            fix=fix,
            code=code,
            actions=self.actions,
        )

    def _in_lines(self, profile: Profile) -> Finding | None:
        graph = profile.program.graph
        assert graph is not None
        small = graph.small_ops.num_ops >= max(1.0, MANY_SMALL * graph.total.num_ops)
        lines = [
            line
            for line in profile.where
            if line.phase is Phase.FORWARD and LOOPS & set(line.idiom) and not line.in_worker
            if "hook" not in line.idiom
            if small or ROWS not in line.idiom
        ]
        share = share_of(lines)
        if share < MIN_LINE_SHARE:
            return None
        sliced = "slices" in lines[0].idiom
        what = "slices of a tensor" if sliced else "one tensor"
        shape = (
            "it takes one slice per turn and none needs the one before" if sliced else "elementwise each"
        )
        lost = lost_of(profile, lines, SAVED_OF_LINES[1])
        low, high = bounds(lost_of(profile, lines), lines)
        return Finding(
            rule=self.name,
            summary=f"A loop of operations on {what} takes {format_share(share)} of each step,"
            f" {format_ms(share * profile.step_time_ns)}, in {named(lines[0])}",
            lost_ns=lost,
            low_ns=SAVED_OF_LINES[0] * low,
            high_ns=max(high, sum(lost.values())),
            assumption="one operation, or one kernel, takes a tenth of the loop",
            evidence=tuple(f"{seen_in(line)}; {shape}." for line in lines[:3]),
            fix="Do it for all slices in one operation on the whole tensor."
            if sliced
            else "Compile the function: a chain of elementwise operations becomes one kernel.",
            file=lines[0].file,
            line=lines[0].line,
            actions=self.actions,
        )


def _looping_function(profile: Profile) -> SourceLine | None:
    """Returns a line of the loop that calls models over and over, in a function of the script's that is
    neither a method nor the one that trains, such as a solver; `None` where there is none."""
    trains = {line.function for line in profile.where if line.phase in (Phase.BACKWARD, Phase.OPTIMIZER)}
    return next(
        (
            line
            for line in profile.where
            if line.phase is Phase.FORWARD and "python-loop" in line.idiom and not line.in_worker
            if line.function.isidentifier() and line.function not in trains
        ),
        None,
    )
