"""Tells the operations that loops have made from those of layers, by the shape of an autograd graph."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from diagnose.hooks._graph import MATMULS, Node, behind_views, is_small, views_for
from diagnose.hooks._graph_facts import longest_chain, work_of

MIN_TURNS = 8
"""Fewer turns are as often branches that somebody wrote out. A parameter of a layer is used once, or three
times where the model is called for three inputs."""

MAX_NS = 100_000
"""A node of a few thousand numbers that takes longer has more to do than be called: a decomposition, or the
sum of something large."""

MAX_LARGE_NS = 40_000
"""A node of more numbers than that is called for longer than it computes below this."""

APART = 4.0
"""Places of an operation are one loop's where they lie so many times as far apart as usual, at most."""


def summarize_loops(nodes: list[Node], recurrent: Mapping[int, int]) -> dict[str, Any]:
    """Returns the facts of `core.graph.Graph` about loops.

    Args:
        nodes: From `walk`.
        recurrent: Identities of parameters, from `recurrent_weights`.
    """
    ops = looped_of(nodes, recurrent)
    found = {id(op) for op in ops}
    return {"looped": work_of([*ops, *views_for(nodes, ops)]), "looped_depth": longest_chain(nodes, found)}


def looped_of(nodes: Iterable[Node], recurrent: Mapping[int, int]) -> list[Node]:
    """Returns the operations, all of them short, that are turns of loops.

    A loop makes an operation of one kind, shape and origin again and again, and what it uses of parameters
    meanwhile is the same in each turn, or little. Layers are alike, too, but each has parameters of its
    own, or constants where these are frozen.

    Args:
        nodes: From `walk`.
        recurrent: From `recurrent_weights`: what torch itself loops over is no loop of the script.
    """
    ops = sorted((node for node in nodes if node.is_op), key=lambda node: node.sequence)
    uses: dict[int, list[int]] = {}
    frozen: list[int] = []
    places: dict[object, list[int]] = {}
    for place, op in enumerate(ops):
        behind = behind_views(op)
        leaves = {node.leaf for node in behind if node.leaf}
        for leaf in leaves:
            uses.setdefault(leaf, []).append(place)
        if op.constant and not leaves and (op.name in MATMULS or "Norm" in op.name):
            frozen.append(place)
        if _is_short(op):
            origin = tuple((node.leaf or node.name, node.shape) for node in behind)
            places.setdefault((op.name, op.shape, origin), []).append(place)
    torchs = [uses[hh] for hh, ih in recurrent.items() if len(uses.get(hh, ())) > 2 * len(uses.get(ih, ()))]
    found: list[Node] = []
    for alike in places.values():
        for run in _runs(alike):
            first, last = run[0], run[-1]
            if any(_within(used, first, last) for used in torchs):
                continue
            times = [count for used in uses.values() if (count := _within(used, first, last))]
            constants = _within(frozen, first, last)
            parameters = len(times) + constants
            if parameters * MIN_TURNS <= max(len(run), sum(times) + constants):
                found += [ops[place] for place in run]
    return found


def recurrent_weights(models: Iterable[Any]) -> dict[int, int]:
    """Returns identities of the parameters that an `nn.RNN`, `nn.GRU` or `nn.LSTM` multiplies a state with,
    each with that of the one for the inputs: torch uses the latter once for all steps."""
    from torch.nn import RNNBase

    return {
        id(parameter): id(getattr(module, name.replace("_hh", "_ih"), None))
        for model in models
        for module in model.modules()
        if isinstance(module, RNNBase)
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight_hh")
    }


def _is_short(op: Node) -> bool:
    """Whether calling an operation takes about as long as what it computes."""
    if op.backward_ns is None:
        return is_small(op)
    return op.backward_ns <= (MAX_NS if is_small(op) else MAX_LARGE_NS)


def _runs(places: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yields those places, in ascending order, that lie about as far from each other as they usually do, if
    they are enough for a loop."""
    if len(places) < MIN_TURNS:
        return
    gaps = [after - before for before, after in pairwise(places)]
    usual = sorted(gaps)[len(gaps) * 9 // 10]  # a turn may have it several times, close together
    begin = 0
    for end, gap in enumerate([*gaps, None], 1):
        if gap is None or gap > APART * usual:
            if end - begin >= MIN_TURNS:
                yield places[begin:end]
            begin = end


def _within(places: Sequence[int], first: int, last: int) -> int:
    """Returns how many of the places, in ascending order, are from `first` to `last`."""
    return bisect_right(places, last) - bisect_left(places, first)
