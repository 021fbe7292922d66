"""What of a model's results is neither the loss nor a batch: who works on that scores them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

from diagnose.core.phases import Phase
from diagnose.source.calling import called_in, callee, calls_of, given_to, is_call
from diagnose.source.dependencies import Dependencies, Found, Links
from diagnose.source.effects import methods_called, rebased
from diagnose.source.parts import Anchors, Part
from diagnose.source.reads_writes import closure, grow, key_of, reads_in, writes
from diagnose.source.returned import WHOLE, Item, asked_of, given, items_of, lost_items, merged
from diagnose.source.statements import expressions, header_lines, nodes_of

ARITHMETIC = {"mean", "sum", "item", "detach", "float", "stack", "div", "mul", "add"}
"""Calls beside which a statement still only adds up terms of a loss."""

CHAIN = 4
"""Functions that call each other, at most, through which needs are followed."""


class Scores:
    """Answers for one function of the loop what holds results of its models.

    Attributes:
        losses: The names of the loss, and of the terms that it is the sum of.
        lost: By the names of objects with a loss in them, what of these it is: `out.loss`, of `out`.
    """

    def __init__(self, part: Part, found: Found, links: Links) -> None:
        self._part = part
        self._found = found
        self._links = links
        self.losses = self._losses()
        self.lost = self._lost_parts()

    def results(self) -> dict[int, set[str]]:
        """Returns by line the names that hold there what models have computed, or what is made of it, but
        for the loss."""
        part = self._part
        held, aside = self._held()
        return {
            line: {
                name
                for source in part.statements
                for name in held.get(id(source), ())
                if part.blocks.reaches(source, name, statement)
            }
            for statement in part.statements
            if id(statement) not in aside and not isinstance(statement, (ast.Raise, ast.Assert))
            for line in header_lines(statement)
        }

    def _held(self) -> tuple[dict[int, set[str]], set[int]]:
        """Returns the names to which statements give results of models, and the statements that work on
        results, but score nothing."""
        part = self._part
        held: dict[int, set[str]] = {}
        for statement in part.models:
            own = writes(statement) if statement not in part.passes else self._given_back(statement)
            held[id(statement)] = (own | self._left_by(statement)) - (self.losses - self.lost.keys())
        aside = {id(s) for s in part.statements if s.lineno in self._found.roles}
        aside |= self._found.carried | part.hooked
        aside |= {id(s) for s in part.statements if self._reads_loss_of(nodes_of(s), self.lost)}
        aside |= part.walk([(s, part.reads[id(s)]) for s in part.models])[0].keys()  # another model's
        asked = self._asked_by_loss()
        aside |= {id(s) for s in part.statements if part.writes[id(s)] & asked}
        return part.spread(held, aside), aside

    def _asked_by_loss(self) -> set[str]:
        """Returns the attributes of other objects of which methods make what the loss asks them for:
        `balance.lean`, where it is weighted by `balance.weights(cells)`, or `criterion.centers`, where the
        module itself is called. What changes these serves the next loss."""
        part, functions = self._part, self._part.effects.functions
        written = set().union(*part.writes.values())
        changed = {name.partition("[")[0].rpartition(".")[0] for name in written} - {"", "self"}
        asked: set[tuple[str, str]] = set()
        for call in (call for s, _ in self._found.for_loss for call in calls_of(s)):
            name, base = callee(call)
            asked.add((name, base) if name in functions else ("forward", ast.unparse(call.func)))
        return {
            attribute
            for name, base in asked
            if base in changed
            for file, function in functions.get(name, ())
            for attribute in rebased(_made_of(Part(file, function, Anchors(), part.effects)), base)
        }

    def returned(self) -> set[str]:
        """Returns by place or key which of the things that the function returns hold results of models, but
        for the loss."""
        part = self._part
        held, _ = self._held()
        return {
            item.key
            for statement in part.statements
            if isinstance(statement, ast.Return)
            for item in items_of(part, statement)
            if any(
                part.blocks.reaches(source, name, item.at)
                for source in part.statements
                for name in held.get(id(source), set()) & item.reads
                if not self._reads_loss_of(list(ast.walk(item.value)), {name}, or_all=True)
            )
        }

    def asked_back(self, models: Collection[str]) -> dict[str, set[str]]:
        """Returns by the names of functions which of the things that they return to this one are losses, of
        those that call models as in `asked_of`."""
        part = self._part
        if not self.losses:
            return {}
        returns = [s for s in part.statements if isinstance(s, ast.Return)]
        ends = [*(part.passes or returns), *(s for s in self._sums() if writes(s) & self.losses)]
        return asked_of(part, [(s, self.losses) for s in ends], models)

    def asked_for_batches(self, models: Collection[str]) -> dict[str, set[str]]:
        """Likewise, which of them are for batches, or for what those are made of."""
        part, kept = self._part, self.made_of()
        given_on = [
            (s, part.reads[id(s)])
            for s in part.statements
            if any(callee(call)[1] in kept for call in calls_of(s))
        ]
        return asked_of(part, [*self._found.for_batch, *given_on], models)

    def results_in_object(self) -> set[str]:
        """Returns the attributes that hold results of models when the function returns."""
        own = set().union(*(writes(s) | self._left_by(s) for s in self._part.models))
        grow(own, [s for s in self._part.statements if s.lineno not in self._found.roles])
        return {name for name in own - self.losses if name.startswith("self.")}

    def made_of(self) -> set[str]:
        """Returns the names of that which batches are made of, such as a replay memory."""
        part, roles = self._part, self._found.roles
        makes = [s for s in part.statements if s in part.asks or roles.get(s.lineno) is Phase.DATA_WAIT]
        given = (value for s in part.calls for call in calls_of(s) for value in given_to(call))
        used = reads_in(*given).union(*(part.reads[id(s)] for s in makes))
        return used - set().union(*(writes(s) for s in (*makes, *part.calls) if self._in_each_step(s)))

    def _losses(self) -> set[str]:
        part, links = self._part, self._links
        if part.passes:
            losses = set().union(*(part.wanted(s, links.losses) for s in part.passes))
        else:
            items = [
                item
                for s in part.statements
                if isinstance(s, ast.Return)
                for item in lost_items(items_of(part, s), links.backs.get(part.name))
            ]
            losses = set().union(
                *(part.with_needs(_summed(item), ast.Expr(item.value), links.losses) for item in items)
            )
        sums = [(writes(s), _terms(s)) for s in self._sums()]
        return closure(losses, lambda held: (each for made, more in sums if made & held for each in more))

    def _lost_parts(self) -> dict[str, set[str]]:
        """Returns by the names of objects with a loss in them what backward passes begin with of these:
        `out.loss`, of `out`."""
        part = self._part
        lost: dict[str, set[str]] = {}
        for name in set().union(*map(writes, part.models)) & self.losses:
            uses = [uses_of(nodes_of(s), name) for s in part.passes if name in part.reads[id(s)]]
            if uses and all(parts and not whole for parts, whole in uses):
                lost[name] = set().union(*(parts for parts, _ in uses))
        return lost

    def _reads_loss_of(
        self, nodes: Sequence[ast.AST], objects: Collection[str], *, or_all: bool = False
    ) -> bool:
        """Whether of some object with a loss in it only that is read among nodes; with `or_all` it also
        counts where the object is read as a whole."""
        uses = [(*uses_of(nodes, name), lost) for name, lost in self.lost.items() if name in objects]
        return any(or_all if whole else bool(parts) and parts <= lost for parts, whole, lost in uses)

    def _sums(self) -> list[ast.stmt]:
        """Returns the statements that add up terms of a loss."""
        part, roles = self._part, self._found.roles
        return [s for s in part.statements if (id(s) in part.hooked or s.lineno in roles) and _adds_up(s)]

    def _given_back(self, statement: ast.stmt) -> set[str]:
        """Returns the results that functions return which train by themselves."""
        back: set[str] = set()
        for name, key, targets in given(self._part, statement):
            scored = self._links.scored.get(name, set())
            if key in scored:
                back |= targets
            elif key == WHOLE:
                back.update(f"{target}[{each}]" for target in targets for each in scored)
        return back

    def _left_by(self, statement: ast.stmt) -> set[str]:
        """Returns the results that a method leaves in its object."""
        left: set[str] = set()
        for name, base in methods_called(statement):
            left |= rebased(self._links.results.get(name, ()), base)
        return left

    def _in_each_step(self, statement: ast.stmt) -> bool:
        """Whether a statement is in the loop that trains; all are where the function has none."""
        blocks = self._part.blocks
        around = [loops for s in (*self._part.calls, *self._part.asks) if (loops := blocks.loops(s))]
        return not around or any(loops[0] in blocks.loops(statement) for loops in around)


def links_of(parts: Sequence[Part]) -> Links:
    """Returns what the functions of the loop leave for each other."""
    links = Links()
    models = {part.name for part in parts if part.models}
    for _ in range(CHAIN):
        after = Links()
        for part in parts:
            found = Dependencies(part, links).found()
            scores = Scores(part, found, links)
            passed = {
                "batch": found.batch,
                "loss": found.loss,
                "losses": {name for name in scores.losses if name.startswith("self.")},
                "results": scores.results_in_object(),
                "scored": scores.returned(),
            }
            for kind, told in passed.items():
                by_name: dict[str, set[str]] = getattr(after, kind)
                by_name[part.name] = by_name.get(part.name, set()) | told
            merged(after.asked, asked_of(part, found.for_loss, models))
            merged(after.fed, scores.asked_for_batches(models))
            merged(after.backs, scores.asked_back(models))
        if after == links:
            break
        links = after
    return links


def _made_of(part: Part) -> set[str]:
    """Returns the names of which a function makes what it returns."""
    returns = [s for s in part.statements if isinstance(s, ast.Return)]
    return part.walk([(s, part.reads[id(s)]) for s in returns])[1]


def uses_of(nodes: Sequence[ast.AST], name: str) -> tuple[set[str], bool]:
    """Returns which parts of an object are read among nodes, `out.loss` or `out[0]`, and whether all of it
    is: also by a method of its own."""
    parts_of = {
        id(node.value): node
        for node in nodes
        if isinstance(node, ast.Attribute)
        or (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant))
    }
    methods = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    found = [
        parts_of.get(id(node))
        for node in nodes
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == name
    ]
    parts = [part for part in found if part is not None and id(part) not in methods]
    return {ast.unparse(part) for part in parts}, len(parts) < len(found)


def _terms(statement: ast.stmt) -> set[str]:
    """Returns what a statement reads, each as closely as it says: `out.loss` is not all of `out`."""
    terms = {ast.unparse(statement.target)} if isinstance(statement, ast.AugAssign) else set()
    pending: list[ast.AST] = list(expressions(statement))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Subscript) and (key := key_of(node)) is not None:
            terms.add(f"{ast.unparse(node.value)}[{key}]")
        elif isinstance(node, (ast.Name, ast.Attribute)):
            terms.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            pending += [node.func.value, *node.args]
        else:
            pending += ast.iter_child_nodes(node)
    return terms


def _summed(item: Item) -> set[str]:
    """Returns what an item reads by itself, or only adds up, not what it gives to other functions."""
    if isinstance(item.value, ast.Name):
        entries = {name for name in item.reads if "[" in name}
        return set(item.reads) if f"{item.value.id}[*]" in entries else entries
    found: set[str] = set()
    pending: list[ast.AST] = [item.value]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            found |= reads_in(node)
        elif not isinstance(node, ast.Call):
            pending += ast.iter_child_nodes(node)
        elif is_call(node, ARITHMETIC):
            pending += node.args
            pending += [node.func.value] if isinstance(node.func, ast.Attribute) else []
    return found


def _adds_up(statement: ast.stmt) -> bool:
    """Whether a statement only adds up what it reads, or brings it to Python."""
    return called_in(statement) <= ARITHMETIC
