"""What the model calls and backward passes of a loop depend on, and what depends on them.

Walking back from the arguments of a model call gives the statements that build the batch, and walking back
from what `backward` is called on gives those that compute the loss. What is made of a model's results and
is neither, scores them.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diagnose.analysis.effects import Effects, methods_called, rebased
from diagnose.analysis.statements import (
    Scope,
    functions_of,
    grow,
    header_lines,
    innermost_of,
    names,
    nodes_of,
    reads,
    statements_of,
    writes,
)
from diagnose.core.phases import Phase

DETACHES = {"detach", "item", "tolist", "cpu", "numpy", "data", "float", "int"}
"""Names in a statement that keeps a value without its gradients."""

WEIGHTS = {"parameters", "named_parameters", "weight"}
"""Names in a statement that goes over a model's weights, or reads them."""


Needs = Mapping[str, set[str]]
"""By a function's name, what its object has to hold before it is called: `{"step": {"self.batch"}}`."""

CHAIN = 4
"""Functions that call each other, at most, through which needs are followed."""


@dataclass(slots=True)
class Anchors:
    """The lines of one function from which hooks were entered, straight or through functions it calls.

    A `further` model call is of what another one, or a parameter, has a part in: of a loss module, or
    inside of a model that is not called as a module itself.
    """

    next: set[int] = field(default_factory=set)
    forward: set[int] = field(default_factory=set)
    further: set[int] = field(default_factory=set)
    backward: set[int] = field(default_factory=set)
    optimizer: set[int] = field(default_factory=set)


class Part:
    """A function that takes part in the loop.

    Args:
        file: Where it is.
        function: It, or the module.
        anchors: Its lines from which hooks were entered.
        effects: What the methods of the script assign.
    """

    def __init__(self, file: str, function: Scope, anchors: Anchors, effects: Effects) -> None:
        self.file = file
        self.function = function
        self.anchors = anchors
        self.statements = list(statements_of(function))
        self._effects = effects
        self._calls = self._on(anchors.forward)
        self._further = [s for s in self._on(anchors.further) if s not in self._calls]
        self._passes = self._on(anchors.backward)
        self._asks = self._on(anchors.next)
        hooked = (*self._calls, *self._further, *self._passes, *self._asks, *self._on(anchors.optimizer))
        self._hooked = {id(s) for s in hooked}

    @property
    def name(self) -> str:
        """Of the function; empty for the module."""
        return "" if isinstance(self.function, ast.Module) else self.function.name

    def roles(self, needs: Mapping[Phase, Needs]) -> tuple[dict[int, Phase], dict[Phase, set[str]]]:
        """Walks back from the model calls and the backward passes to the statements that feed them.

        A function without a backward hands its loss to who called it, so there the way back begins at
        `return`, and at what it puts aside of what a model computed, its gradients with it.

        Args:
            needs: What the functions of the loop find in their objects, by what it serves.

        Returns:
            Phases of lines, and what this function finds in its object.
        """
        calls, further, passes = self._calls, self._further, list(self._passes)
        roles: dict[int, Phase] = {}
        computed = self._computed((*calls, *further))
        weights = self._computed([s for s in self.statements if isinstance(s, ast.For) and _of_weights(s)])
        if not passes:
            passes = [s for s in self.statements if id(s) not in self._hooked and _hands_on(s, computed)]
            roles.update((line, Phase.FORWARD) for s in passes for line in header_lines(s))
            passes += [s for s in calls if isinstance(s, ast.Return)]
        taken = _taken(self.function, self.statements)
        losses = set().union(*(reads(s) for s in self._passes))
        for name, base in (called for s in self._passes for called in methods_called(s)):
            losses |= rebased(needs[Phase.BACKWARD].get(name, ()), base)
        found_in_object = {Phase.BACKWARD: {name for name in losses if name.startswith("self.")}}
        # The batch last, so that a statement that feeds both, such as `x, y = get_batch()`, is data.
        for sources, phase in ((passes, Phase.FORWARD), (further, Phase.FORWARD), (calls, Phase.DATA_WAIT)):
            wanted: set[str] = set().union(*(reads(s) for s in sources))
            within = set().union(*(taken.get(name, ()) for name in wanted))
            if phase is Phase.DATA_WAIT:
                wanted = set().union(*(self._arguments(s) for s in sources))
                # What the call itself assigns was not built for it, such as `h` in `out, h = model(x, h)`.
                wanted -= set().union(*(writes(s) for s in sources))
            wanted |= within
            for name, base in (called for s in sources for called in methods_called(s)):
                wanted |= rebased(needs[phase].get(name, ()), base)
            found: set[int] = set()
            grew = True
            while grew:
                grew = False
                for statement in self.statements:
                    if id(statement) in found or id(statement) in self._hooked:
                        continue
                    if not self._effects.writes(statement) & wanted:
                        continue
                    found.add(id(statement))
                    wanted |= reads(statement)
                    grew = True
                    if sources is passes:
                        targets = calls and _is_of_targets(statement, computed | weights)
                    else:
                        targets = sources is further and calls and not reads(statement) & computed
                    for line in header_lines(statement):
                        roles[line] = Phase.DATA_WAIT if targets else phase
            of_object = {name for name in wanted if name.startswith("self.")}
            found_in_object[phase] = found_in_object.get(phase, set()) | of_object
        return roles, found_in_object

    def results(self, roles: Mapping[int, Phase], needs: Mapping[Phase, Needs]) -> set[str]:
        """Returns the names of what models have computed here, and of what is made of it, but for the loss.

        Args:
            roles: Of the function's lines.
            needs: What the functions of the loop find in their objects, by what it serves.
        """
        ends = self._passes or [s for s in self.statements if isinstance(s, ast.Return)]
        held = set().union(*(self._effects.writes(s) for s in (*self._calls, *self._further)))
        held -= set().union(
            *(reads(s) for s in ends if not isinstance(getattr(s, "value", None), ast.Tuple))
        )
        for name, base in (called for s in ends for called in methods_called(s)):
            held -= rebased(needs[Phase.BACKWARD].get(name, ()), base)
        grow(held, [s for s in self.statements if id(s) not in self._hooked and s.lineno not in roles])
        return held

    def made_of(self, roles: Mapping[int, Phase]) -> set[str]:
        """Returns the names of that which batches are made of, such as a replay memory.

        Args:
            roles: Of the function's lines.
        """
        makes = [s for s in self.statements if s in self._asks or roles.get(s.lineno) is Phase.DATA_WAIT]
        given = (
            ast.Expr(value)
            for s in self._calls
            for node in nodes_of(s)
            if isinstance(node, ast.Call)
            for value in (*node.args, *(keyword.value for keyword in node.keywords))
        )
        used = set().union(*(reads(s) for s in (*makes, *given)))
        return used - set().union(*(writes(s) for s in (*makes, *self._calls)))

    def _on(self, lines: set[int]) -> list[ast.stmt]:
        return [s for s in self.statements if lines.intersection(header_lines(s))]

    def _computed(self, calls: Iterable[ast.stmt]) -> set[str]:
        """Returns the names of what models have computed, and of what was made of that. What a loss gets
        besides are targets, a part of the batch."""
        computed = set().union(*(writes(call) for call in calls))
        grow(computed, self.statements)
        return computed

    def _arguments(self, call: ast.stmt) -> set[str]:
        """Returns what the statement of a model call reads, without what it returns of other models beside:
        `return probs.log_prob(action), self.critic(x)`."""
        if not isinstance(call, ast.Return):
            return reads(call)
        models = (*self._calls, *self._further)
        return reads(call) - self._computed([model for model in models if model is not call])


def parts_of(
    file: str, tree: ast.Module, sites: Iterable[tuple[int, str]], effects: Effects
) -> Iterator[Part]:
    """Yields the functions of a file from which hooks were entered.

    Args:
        file: It.
        tree: It, parsed.
        sites: Lines, and the kinds of what is called there.
        effects: What the methods of the script assign.
    """
    functions = list(functions_of(tree))
    anchors: defaultdict[int, Anchors] = defaultdict(Anchors)
    for line, kind in sites:
        getattr(anchors[innermost_of(functions, line)], kind).add(line)
    for index, found in anchors.items():
        yield Part(file, functions[index], found, effects)


def needs_of(parts: Sequence[Part]) -> dict[Phase, dict[str, set[str]]]:
    """Returns what the functions of the loop find in their objects, by what it serves: a batch or a loss
    that another method has put there."""
    needs: dict[Phase, dict[str, set[str]]] = {
        phase: {} for phase in (Phase.DATA_WAIT, Phase.FORWARD, Phase.BACKWARD)
    }
    for _ in range(CHAIN):
        before = sum(len(names) for by_name in needs.values() for names in by_name.values())
        for part in parts:
            for phase, found in part.roles(needs)[1].items():
                needs[phase].setdefault(part.name, set()).update(found)
        if before == sum(len(names) for by_name in needs.values() for names in by_name.values()):
            break
    return needs


def _taken(function: Scope, statements: list[ast.stmt]) -> dict[str, set[str]]:
    """Returns, by their names, what the functions that are defined inside a function take from it."""
    blocks = statements if isinstance(function, ast.Module) else [function, *statements]
    taken: dict[str, set[str]] = {}
    for inner in (node for block in blocks for node in ast.iter_child_nodes(block)):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            within = [node for node in ast.walk(inner) if isinstance(node, ast.stmt)]
            own = {arg.arg for arg in ast.walk(inner.args) if isinstance(arg, ast.arg)}
            taken[inner.name] = set().union(*map(reads, within)) - own.union(*map(writes, within))
    return taken


def _hands_on(statement: ast.stmt, computed: set[str]) -> bool:
    """Whether a statement returns a loss, or puts aside what a model computed, still with its gradients:
    `self.log_probs.append(m.log_prob(action))`."""
    if isinstance(statement, ast.Return):
        return True
    if not any("." in name for name in writes(statement)) or not reads(statement) & computed:
        return False
    return not names(nodes_of(statement)) & DETACHES


def _is_of_targets(statement: ast.stmt, computed: set[str]) -> bool:
    """Whether a statement that a loss needs is made of the batch alone: not of what a model computed, nor
    of its weights, as a penalty is. What an attribute holds, a model may have computed elsewhere."""
    nodes = nodes_of(statement)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    held = any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and id(node) not in called
        for node in nodes
    )
    return not (held or _of_weights(statement) or reads(statement) & computed)


def _of_weights(statement: ast.stmt) -> bool:
    return bool(names(nodes_of(statement)) & WEIGHTS)
