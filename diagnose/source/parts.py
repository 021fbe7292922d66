"""A function that takes part in the training loop: its statements, and how values flow between them.

Values are followed in the order in which statements run: see `blocks`. What the statements are for is told
by `dependencies`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from diagnose.source.blocks import Blocks
from diagnose.source.calling import called_in, callee, calls_in, calls_of, given_to, is_call, parameters_of
from diagnose.source.effects import WEIGHTS, Effects, methods_called, rebased
from diagnose.source.gradients import Gradients
from diagnose.source.kinds import Definition, Scope
from diagnose.source.names import last_name, names, words_of
from diagnose.source.reads_writes import closure, reads, writes
from diagnose.source.rollouts import CHOOSES, CHOSEN, DRAWS, steps_environment, takes_action, told_to_step
from diagnose.source.statements import (
    functions_of,
    header_lines,
    innermost_of,
    nodes_of,
    statements_in,
    statements_of,
    yields,
)

Needs = list[tuple[ast.stmt, set[str]]]
"""Statements, and the names of which they need the values."""

SETTINGS = {"device", "dtype", "args", "cfg", "config", "opt", "self", "torch", "np", "numpy", "F"}
"""Names of what no batch and no model is."""


@dataclass(slots=True)
class Anchors:
    """The lines of one function from which hooks were entered, straight or through functions it calls.

    A `further` model call is of what another one, or a parameter, has a part in: of a loss module, or
    inside of a model that is not called as a module itself.

    Attributes:
        leads: The functions through which a model is called, by line.
    """

    next: set[int] = field(default_factory=set)
    forward: set[int] = field(default_factory=set)
    further: set[int] = field(default_factory=set)
    backward: set[int] = field(default_factory=set)
    optimizer: set[int] = field(default_factory=set)
    leads: dict[int, set[str]] = field(default_factory=dict)


class Part:
    """A function, or the module, that takes part in the loop.

    Attributes:
        anchors: Its lines from which hooks were entered.
        statements: In the order of their lines.
        reads: The names that each reads, by its identity.
        writes: Likewise, those that it writes, itself or through what it calls.
        calls: Those that call a model with a batch.
        passes: Those that begin a backward pass.
        asks: Those that ask for a batch.
        further: Likewise, with what another call, or a parameter, has a part in.
        hooked: Identities of those from which any hook was entered.
        writers: The statements that write each name.
        blocks: In which order they run.
        effects: What the functions of the script assign.
    """

    def __init__(self, file: str, function: Scope, anchors: Anchors, effects: Effects) -> None:
        self.file = file
        self.function = function
        self.anchors = anchors
        self.statements = sorted(statements_of(function), key=lambda s: s.lineno)
        self.effects = effects
        self.blocks = Blocks(function)
        self.reads = {id(s): reads(s) for s in self.statements}
        self.writes = {id(s): effects.writes(s) for s in self.statements}
        self.writers: defaultdict[str, list[ast.stmt]] = defaultdict(list)
        for statement in self.statements:
            for name in self.writes[id(statement)]:
                self.writers[name].append(statement)
        self.calls = self._on(anchors.forward)
        self.further = [s for s in self._on(anchors.further) if s not in self.calls]
        self.passes = self._on(anchors.backward)
        self.asks = self._on(anchors.next)
        hooked = (*self.calls, *self.further, *self.passes, *self.asks, *self._on(anchors.optimizer))
        self.hooked = {id(s) for s in hooked}

    @property
    def name(self) -> str:
        """Of the function; empty for the module."""
        return "" if isinstance(self.function, ast.Module) else self.function.name

    @cached_property
    def acts(self) -> list[ast.stmt]:
        """The statements that step an environment: with what a policy chose, whatever it is called."""
        made = self.derived(self.models)
        chooses = [s for s in self.statements if id(s) in made and names(nodes_of(s)) & CHOOSES]
        chosen = set().union(*self.derived(chooses).values())
        passing_on = {id(s) for s in self.passing_on}
        return [
            s
            for s in self.statements
            if (id(s) not in passing_on and steps_environment(s, simulators=self.effects.simulators))
            or takes_action(s, self._definition)
            or any(
                told & chosen and base not in self._called_models and not self.effects.is_module(base)
                for base, told in told_to_step(s)
            )
        ]

    @cached_property
    def passing_on(self) -> list[ast.stmt]:
        """The statements that simulate what follows on an action which was not drawn: they may pass on its
        gradients, and are a part of the model then."""
        simulators = self.effects.simulators
        found = [
            s
            for s in self.statements
            if steps_environment(s, simulators=simulators) and not steps_environment(s)
            if any(self.has_gradients(each) for call in calls_of(s) for each in given_to(call))
        ]
        if not found:
            return []
        made = self.derived(self.models)
        draws = [s for s in self.statements if id(s) in made and self._draws(s)]
        drawn = set().union(*self.derived(draws).values())
        return [s for s in found if not self.reads[id(s)] & drawn]

    def decides(
        self, asked: Collection[ast.stmt], ends: Collection[ast.stmt], called: Mapping[int, set[str]]
    ) -> bool:
        """Whether between statements that ask a model and others one thing of several is drawn or taken: an
        action, not a value that the model gives, such as a sampler's next picture, a mean, or a target.
        `called` has the functions that were seen to be called from lines."""
        before, _ = self.walk([(s, self.reads[id(s)]) for s in ends])
        made = self.spread({id(s): self.writes[id(s)] for s in asked}, {id(s) for s in ends})
        between = [s for s in self.statements if s in asked or (id(s) in made and id(s) in before)]
        if any(called_in(s) & DRAWS for s in (*between, *ends)):
            return True
        seen = (called.get(line, ()) for s in between for line in header_lines(s))
        return self._may_draw(set().union(*map(called_in, between), *seen))

    def _draws(self, statement: ast.stmt) -> bool:
        """Whether a statement makes an action without its gradients, or asks a model for one that may."""
        used = names(nodes_of(statement))
        if used & DRAWS or ("detach" in used and words_of(self.writes[id(statement)]) & CHOSEN):
            return True
        return statement in self.models and self._may_draw(called_in(statement))

    def _may_draw(self, called: Iterable[str]) -> bool:
        """Whether one of these functions of the script draws an action, or one that it calls. What is no
        function of the script may be a module."""
        functions = self.effects.functions

        def of(reached: Iterable[str]) -> set[str]:
            return {name if name in functions else "forward" for name in reached}

        def within(reached: Iterable[str]) -> list[Definition]:
            return [function for name in reached for _, function in functions.get(name, ())]

        def more(reached: set[str]) -> set[str]:
            return of(callee(call)[0] for call in calls_in(*within(reached)))

        return any(is_call(call, DRAWS) for call in calls_in(*within(closure(of(called), more))))

    @cached_property
    def _taken(self) -> dict[str, set[str]]:
        """What the functions that are defined inside the function take from it, by their names."""
        # What the module defines, all of it can use.
        blocks = self.statements if self._definition is None else [self._definition, *self.statements]
        taken: dict[str, set[str]] = {}
        for inner in (node for block in blocks for node in ast.iter_child_nodes(block)):
            if isinstance(inner, Definition):
                within = statements_in(inner)
                own = {arg.arg for arg in ast.walk(inner.args) if isinstance(arg, ast.arg)}
                taken[inner.name] = set().union(*map(reads, within)) - own.union(*map(writes, within))
        return taken

    @cached_property
    def _gradients(self) -> Gradients:
        return Gradients(self.effects.functions)

    @cached_property
    def _with_gradients(self) -> set[str]:
        computed = set().union(*(self.writes[id(s)] for s in self.models))
        return self._gradients.names(self.statements, computed)

    @property
    def _definition(self) -> Definition | None:
        return None if isinstance(self.function, ast.Module) else self.function

    @property
    def models(self) -> list[ast.stmt]:
        """The statements that call models."""
        return [*self.calls, *self.further]

    @cached_property
    def _called_models(self) -> set[str]:
        """What models are called by there, and all else that is called beside."""
        return {ast.unparse(call.func) for s in self.models for call in calls_of(s)}

    @property
    def feeds(self) -> bool:
        """Whether it is a generator around a loader: what it yields is the batch."""
        trains = self.models or self.passes
        return bool(self.asks and not trains and any(map(yields, self.statements)))

    def lines_of(self, wanted: Collection[str]) -> set[int]:
        """Returns the lines that assign certain names, and those that these depend on."""
        ends = [s for s in self.statements if self.writes[id(s)] & set(wanted)]
        return self.lines_for([(s, self.reads[id(s)]) for s in ends])

    def lines_for(self, starts: Needs) -> set[int]:
        """Returns the lines of statements and of all that they depend on, conditions too."""
        while True:
            found, _ = self.walk(starts)
            serving = {id(s) for s, _ in starts} | found.keys()
            heads = {
                id(head): head
                for s in self.statements
                if id(s) in serving
                for head in self.blocks.heads(s)
                if id(head) not in serving
            }
            if not heads:
                return {line for s in self.statements if id(s) in serving for line in header_lines(s)}
            starts += [(head, self.reads[id(head)]) for head in heads.values()]

    def wanted(self, statement: ast.stmt, needs: Mapping[str, set[str]]) -> set[str]:
        """Returns the names of which a statement needs the values, also for the functions that it calls."""
        return self.with_needs(self.reads[id(statement)], statement, needs)

    def with_needs(
        self, wanted: Collection[str], statement: ast.stmt, needs: Mapping[str, set[str]]
    ) -> set[str]:
        """Returns names, and those that the functions of which a statement makes use need in turn."""
        wanted = set(wanted).union(*(self._taken.get(name, ()) for name in wanted))
        for name, base in methods_called(statement):
            wanted |= rebased(needs.get(name, ()), base)
        return wanted

    def has_gradients(self, expression: ast.expr) -> bool:
        """Whether an expression may have gradients of what models have computed."""
        return self._gradients.pass_through(expression, self._with_gradients)

    def from_outside(self, wanted: set[str]) -> set[str]:
        """Returns what of these names is an attribute of the function's object, or a parameter."""
        parameters = parameters_of(self._definition) if self._definition is not None else []
        return {name for name in wanted if name.startswith("self.") or name in parameters}

    def is_computed(self, statement: ast.stmt) -> bool:
        """Whether a statement works on a model's weights, or on what a model may have computed elsewhere
        and put into an attribute."""
        if of_weights(statement):
            return True
        nodes = nodes_of(statement)
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        models = self._called_models
        for node in nodes:
            if isinstance(node, ast.Name) and id(node) in called and node.id in models:
                return True
            if not isinstance(node, ast.Attribute) or node.attr in SETTINGS:
                continue
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if id(node) in called:
                name = ast.unparse(node)
                if name in models or self.effects.is_module(name) or self.effects.computes(node.attr):
                    return True
            elif of_self and f"self.{node.attr}" not in models:
                if self.effects.may_be_computed(f"self.{node.attr}"):
                    return True
            elif ast.unparse(node.value) in models:
                return True
        return False

    # -- what depends on what

    def walk(
        self, starts: Iterable[tuple[ast.stmt, set[str]]], refused: Collection[tuple[int, str]] = ()
    ) -> tuple[dict[int, bool], set[str]]:
        """Follows values back to the statements that they come from.

        Args:
            starts: Statements, and the names of which they need the values.
            refused: Statements that are not followed, each by the name that it gives a start.

        Returns:
            What was found: whether its value gets there in the same turn of the loop. And all names.
        """
        pending = [(reader, wanted, True) for reader, wanted in starts]
        found: dict[int, bool] = {}
        all_names: set[str] = set()
        while pending:
            reader, wanted, same_turn = pending.pop()
            all_names |= wanted
            for writer in {id(w): w for name in wanted for w in self.writers.get(name, ())}.values():
                if id(writer) in self.hooked:
                    continue
                hits = [
                    name
                    for name in self.writes[id(writer)] & wanted
                    if (id(writer), name) not in refused and self.blocks.reaches(writer, name, reader)
                ]
                if not hits:
                    continue
                stays = all(self.blocks.outlives_turn(writer, name, reader) for name in hits)
                same = same_turn and writer.lineno < reader.lineno and not stays
                if id(writer) not in found or (same and not found[id(writer)]):
                    found[id(writer)] = same
                    pending.append((writer, self.reads[id(writer)], same))
        return found, all_names

    def derived(self, sources: Iterable[ast.stmt], *, same_turn: bool = False) -> dict[int, set[str]]:
        """Returns by identity the statements that make something of what some others assign, and what they
        assign in turn; with `same_turn` only those that do so in the same turn of the loop."""
        known = {id(s): self.writes[id(s)] for s in sources}
        return self.spread(known, set(), same_turn=same_turn)

    def spread(
        self, known: dict[int, set[str]], barred: Collection[int], *, same_turn: bool = False
    ) -> dict[int, set[str]]:
        sources = [s for s in self.statements if id(s) in known]
        known = dict(known)
        grew = True
        while grew:
            grew = False
            for statement in self.statements:
                if id(statement) in known or id(statement) in barred:
                    continue
                wanted = self.reads[id(statement)]
                for source in sources:
                    if same_turn and source.lineno >= statement.lineno:
                        continue
                    shared = known[id(source)] & wanted
                    if same_turn:
                        shared = {n for n in shared if not self.blocks.outlives_turn(source, n, statement)}
                    if any(self.blocks.reaches(source, name, statement) for name in shared):
                        known[id(statement)] = writes(statement)
                        sources.append(statement)
                        grew = True
                        break
        return known

    def lines(self, *statements: ast.stmt) -> list[tuple[str, int]]:
        """Returns file and line of each line that statements of the function occupy themselves."""
        return [(self.file, line) for statement in statements for line in header_lines(statement)]

    def _on(self, lines: set[int]) -> list[ast.stmt]:
        return [s for s in self.statements if lines.intersection(header_lines(s))]


def parts_of(
    file: str,
    tree: ast.Module,
    sites: Iterable[tuple[int, str]],
    leads: Mapping[tuple[str, int], set[str]],
    effects: Effects,
) -> Iterator[Part]:
    """Yields the functions of a file from which hooks were entered.

    Args:
        sites: Lines, and the kinds of what is called there.
        leads: The functions through which a model is called, by file and line.
    """
    functions = list(functions_of(tree))
    anchors: defaultdict[int, Anchors] = defaultdict(Anchors)
    for line, kind in sites:
        found = anchors[innermost_of(functions, line)]
        getattr(found, kind).add(line)
        if (file, line) in leads:
            found.leads[line] = leads[file, line]
    for index, found in anchors.items():
        yield Part(file, functions[index], found, effects)


def of_weights(statement: ast.stmt) -> bool:
    nodes = nodes_of(statement)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    # No module's weight is called: `schedule.weight(step)` gives a number.
    numbers = {id(node) for node in nodes if id(node) in called and last_name(node) == "weight"}
    return bool(names(node for node in nodes if id(node) not in numbers) & WEIGHTS)
