"""What the model calls and backward passes of a loop depend on, and what depends on them.

Walking back from the arguments of a model call gives the statements that build the batch, and walking back
from what `backward` is called on gives those that compute the loss. What is made of a model's results and
is neither, scores them: see `scores`. Values are followed in the order in which statements run: see
`blocks`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from diagnose.analysis.blocks import Blocks
from diagnose.analysis.effects import WEIGHTS, Effects, Function, methods_called, rebased
from diagnose.analysis.rollouts import CHOOSES, steps_environment, takes_action, told_to_step
from diagnose.analysis.statements import (
    Scope,
    callee,
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

SETTINGS = {"device", "dtype", "args", "cfg", "config", "opt", "self", "torch", "np", "numpy", "F"}
"""Names of what no batch and no model is."""


COUNTERS = {"step", "steps", "global_step", "epoch", "iteration", "iter", "it", "i", "update", "progress"}
"""Names of what only counts, also where a loop gets it along with its batch."""


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


@dataclass(slots=True)
class Links:
    """What the functions of the loop leave for each other, each by the function's name.

    Attributes:
        batch: What of its object and its parameters a function makes batches of.
        loss: Likewise, a loss.
        losses: What of them is the loss that `backward` is called on.
        results: What its object has of a model's results, when it returns.
    """

    batch: dict[str, set[str]] = field(default_factory=dict)
    loss: dict[str, set[str]] = field(default_factory=dict)
    losses: dict[str, set[str]] = field(default_factory=dict)
    results: dict[str, set[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Found:
    """What the statements of a function are for.

    Attributes:
        roles: Phases of lines; the others serve nothing.
        inside: Of lines that serve only through a function that they call: what that has to assign.
        carried: Statements that make what a model is given in the next turn of its results, as
            `h = h.detach()`.
        batch: What of its object and its parameters the batch is made of.
        loss: Likewise, the loss.
    """

    roles: dict[int, Phase] = field(default_factory=dict)
    inside: dict[int, dict[str, set[str]]] = field(default_factory=dict)
    carried: set[int] = field(default_factory=set)
    batch: set[str] = field(default_factory=set)
    loss: set[str] = field(default_factory=set)


class Part:
    """A function that takes part in the loop.

    Args:
        file: Where it is.
        function: It, or the module.
        anchors: Its lines from which hooks were entered.
        effects: What the functions of the script assign.

    Attributes:
        statements: In the order of their lines.
        reads: The names that each reads, by its identity.
        writes: Likewise, those that it writes, itself or through what it calls.
        calls: Those that call a model with a batch.
        passes: Those that begin a backward pass.
        asks: Those that ask for a batch.
        hooked: Identities of those from which any hook was entered.
        blocks: In which order they run.
    """

    def __init__(self, file: str, function: Scope, anchors: Anchors, effects: Effects) -> None:
        self.file = file
        self.function = function
        self.anchors = anchors
        self.statements = sorted(statements_of(function), key=lambda s: s.lineno)
        self._effects = effects
        self.blocks = Blocks(function)
        self.reads = {id(s): reads(s) for s in self.statements}
        self.writes = {id(s): effects.writes(s) for s in self.statements}
        self._writers: defaultdict[str, list[ast.stmt]] = defaultdict(list)
        for statement in self.statements:
            for name in self.writes[id(statement)]:
                self._writers[name].append(statement)
        self.calls = self._on(anchors.forward)
        self._further = [s for s in self._on(anchors.further) if s not in self.calls]
        self.passes = self._on(anchors.backward)
        self.asks = self._on(anchors.next)
        hooked = (*self.calls, *self._further, *self.passes, *self.asks, *self._on(anchors.optimizer))
        self.hooked = {id(s) for s in hooked}
        self._learns: list[ast.stmt] | None = None

    @property
    def name(self) -> str:
        """Of the function; empty for the module."""
        return "" if isinstance(self.function, ast.Module) else self.function.name

    @cached_property
    def acts(self) -> list[ast.stmt]:
        """The statements that step an environment: with what a policy chose, whatever it is called."""
        made = self._derived(self.models)
        chooses = [s for s in self.statements if id(s) in made and names(nodes_of(s)) & CHOOSES]
        chosen = set().union(*self._derived(chooses).values())
        calls = (node for s in self.models for node in nodes_of(s) if isinstance(node, ast.Call))
        models = {ast.unparse(call.func) for call in calls}
        return [
            s
            for s in self.statements
            if steps_environment(s)
            or takes_action(s, self._definition)
            or any(
                told & chosen and base not in models and not self._effects.is_module(base)
                for base, told in told_to_step(s)
            )
        ]

    @cached_property
    def _taken(self) -> dict[str, set[str]]:
        return _taken(self.function, self.statements)

    @property
    def _definition(self) -> Function | None:
        return None if isinstance(self.function, ast.Module) else self.function

    @property
    def models(self) -> list[ast.stmt]:
        """The statements that call models."""
        return [*self.calls, *self._further]

    @property
    def feeds(self) -> bool:
        """Whether it is a generator around a loader: what it yields is the batch."""
        nodes = (node for s in self.statements for node in nodes_of(s))
        trains = self.models or self.passes
        return bool(
            self.asks and not trains and any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in nodes)
        )

    def found(self, links: Links) -> Found:
        """Walks back from the model calls and the backward passes to the statements that feed them.

        A function without a backward hands its loss to who called it, so there the way back begins at
        `return`, and at what it puts aside of what a model computed, its gradients with it.

        Args:
            links: What the functions of the loop leave for each other.
        """
        found = Found()
        if self.feeds:
            yields = [s for s in self.statements if _yields(s)]
            self._walk_batch([(s, self.reads[id(s)]) for s in yields], found)
            found.roles.update((line, Phase.DATA_WAIT) for s in yields for line in header_lines(s))
            return found
        computed = {id(s): self.writes[id(s)] for s in self.models}
        passes, derived = list(self.passes), self.spread(computed, {id(s) for s in self.acts})
        if not passes:
            passes = [s for s in self.statements if id(s) not in self.hooked and self._hands_on(s, derived)]
            found.roles.update((line, Phase.FORWARD) for s in passes for line in header_lines(s))
            passes += [s for s in self.calls if isinstance(s, ast.Return)]
        self._walk_loss([(s, self.wanted(s, links.loss)) for s in passes], found, derived)
        self._walk_further([(s, self.wanted(s, links.loss)) for s in self._further], found, derived)
        # The batch last, so that a statement that feeds both, such as `x, y = get_batch()`, is data.
        starts = [(s, self._arguments(s, links)) for s in self.calls]
        self._walk_batch([*starts, *((s, self.reads[id(s)]) for s in self.asks)], found)
        return found

    def lines_of(self, wanted: Collection[str]) -> set[int]:
        """Returns the lines that assign certain names, and those that these depend on."""
        ends = [s for s in self.statements if self.writes[id(s)] & set(wanted)]
        return self._lines([(s, self.reads[id(s)]) for s in ends])

    def lines_returned(self) -> set[int]:
        """Returns the lines that what the function returns depends on; of several results, the first."""
        starts: list[tuple[ast.stmt, set[str]]] = []
        for statement in self.statements:
            if isinstance(statement, ast.Return) and statement.value is not None:
                several = isinstance(statement.value, ast.Tuple) and statement.value.elts
                first = several[0] if several else statement.value
                starts.append((statement, reads(ast.Expr(first))))
        return self._lines(starts)

    def _lines(self, starts: list[tuple[ast.stmt, set[str]]]) -> set[int]:
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

    def own_code(self, found: Found) -> dict[int, set[str]]:
        """Returns by line what statements of the loss call besides: functions that get nothing of the batch
        or of a model, `weight_at(step)` in `loss = loss * weight_at(step)`.

        Args:
            found: What the function's statements are for.
        """
        batch = [s for s in self.statements if found.roles.get(s.lineno) is Phase.DATA_WAIT]
        told = set().union(*self._derived([*self.models, *self.asks, *batch]).values())
        told |= self._from_outside(set().union(*self.reads.values()))
        told -= COUNTERS
        own: dict[int, set[str]] = {}
        for statement in self.statements:
            if id(statement) in self.hooked or found.roles.get(statement.lineno) is not Phase.FORWARD:
                continue
            calls = [node for node in nodes_of(statement) if isinstance(node, ast.Call)]
            aside = {
                callee(call)[0]
                for call in calls
                if callee(call)[0] in self._effects.functions
                and not any(self._may_hold(name) for name in reads(ast.Expr(call)) & told)
                and not self._is_computed(ast.Expr(call))
            }
            own.update((line, aside) for line in header_lines(statement) if aside)
        return own

    def _may_hold(self, name: str) -> bool:
        """Whether a name may hold something of a batch or a model: not an attribute that was only set when
        its object was made."""
        if not name.startswith("self."):
            return True
        return self._effects.may_be_computed(".".join(name.partition("[")[0].split(".")[:2]))

    # -- the ways back

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
            for writer in {id(w): w for name in wanted for w in self._writers.get(name, ())}.values():
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

    def _walk_loss(
        self, starts: list[tuple[ast.stmt, set[str]]], found: Found, derived: Mapping[int, set[str]]
    ) -> None:
        steps, wanted = self.walk(starts)
        found.loss |= self._from_outside(wanted)
        weights: set[str] = set()
        for statement in self.statements:
            if isinstance(statement, ast.For) and _of_weights(statement):
                weights |= writes(statement)
        grow(weights, self.statements)
        batch = set().union(*(writes(s) for s in self.asks))
        computed: set[str] = set()
        last = max((s.lineno for s in self.passes), default=0)
        acts = {id(s) for s in self.acts}
        for statement in (s for s in self.statements if id(s) in steps):
            if last and statement.lineno > last and not steps[id(statement)]:
                continue  # a value that is read after the pass, for the next one
            if self._is_before(statement) or id(statement) in acts:
                is_data = True
            elif self.calls:
                is_data = not (id(statement) in derived or self.reads[id(statement)] & (computed | weights))
                is_data = is_data and not self._is_computed(statement)
            else:
                is_data = _only_of(statement, batch)
                batch |= writes(statement) if is_data else set()
            if not is_data:
                computed |= writes(statement)
            self._serves(statement, Phase.DATA_WAIT if is_data else Phase.FORWARD, wanted, found)

    def _walk_further(
        self, starts: list[tuple[ast.stmt, set[str]]], found: Found, derived: Mapping[int, set[str]]
    ) -> None:
        steps, wanted = self.walk(starts)
        found.loss |= self._from_outside(wanted)
        for statement in (s for s in self.statements if id(s) in steps):
            is_data = self.calls and id(statement) not in derived
            self._serves(statement, Phase.DATA_WAIT if is_data else Phase.FORWARD, wanted, found)

    def _walk_batch(self, starts: list[tuple[ast.stmt, set[str]]], found: Found) -> None:
        """What an earlier model has computed in the same turn is no batch of the next one, but a part of
        the pass, unless it is what an environment is told. And what a call gives to itself, by the next
        turn, was not built for it, such as `h` in `out, h = model(x, h)`.
        """
        derived = self._derived(self.models)
        refused: set[tuple[int, str]] = set()
        for call, wanted in starts:
            for name in wanted & writes(call):
                for writer in self._writers.get(name, ()):
                    if writer.lineno >= call.lineno or id(writer) in derived:
                        refused.add((id(writer), name))
                        found.carried.add(id(writer))
        steps, wanted = self.walk(starts, refused)
        found.batch |= self._from_outside(wanted)
        acts = self.acts
        computed = {id(s): self.writes[id(s)] for s in self.models}
        passing = self.spread(computed, {id(s) for s in acts}, same_turn=True)
        acting = {id(s) for s in acts}.union(self.walk([(s, self.reads[id(s)]) for s in acts])[0])
        for statement in (s for s in self.statements if id(s) in steps):
            is_pass = steps[id(statement)] and id(statement) in passing and id(statement) not in acting
            is_pass = is_pass and not self._is_before(statement)
            self._serves(statement, Phase.FORWARD if is_pass else Phase.DATA_WAIT, wanted, found)

    def _serves(self, statement: ast.stmt, phase: Phase, wanted: set[str], found: Found) -> None:
        lines = header_lines(statement)
        found.roles.update((line, phase) for line in lines)
        if not writes(statement) & wanted:  # but for a function that it calls
            for name, put in self._effects.through(statement).items():
                for line in lines if put & wanted else ():
                    by_name = found.inside.setdefault(line, {})
                    by_name[name] = by_name.get(name, set()) | (put & wanted)

    # -- what depends on what

    def _derived(self, sources: Iterable[ast.stmt], *, same_turn: bool = False) -> dict[int, set[str]]:
        """Returns what is made of what some statements assign, by what it assigns in turn.

        Args:
            sources: They.
            same_turn: Whether it is made in the same turn of the loop.
        """
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

    def _is_computed(self, statement: ast.stmt) -> bool:
        """Whether a statement works on a model's weights, or on what a model may have computed elsewhere
        and put into an attribute."""
        if _of_weights(statement):
            return True
        nodes = nodes_of(statement)
        called = {id(node.func): callee(node)[0] for node in nodes if isinstance(node, ast.Call)}
        models = {
            ast.unparse(node.func)
            for s in self.models
            for node in nodes_of(s)
            if isinstance(node, ast.Call)
        }
        for node in nodes:
            if isinstance(node, ast.Name) and id(node) in called and node.id in models:
                return True
            if not isinstance(node, ast.Attribute) or node.attr in SETTINGS:
                continue
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if id(node) in called:
                name, method = ast.unparse(node), called[id(node)]
                if name in models or self._effects.is_module(name) or self._effects.computes(method):
                    return True
            elif of_self and f"self.{node.attr}" not in models:
                if self._effects.may_be_computed(f"self.{node.attr}"):
                    return True
            elif ast.unparse(node.value) in models:
                return True
        return False

    def _hands_on(self, statement: ast.stmt, derived: Mapping[int, set[str]]) -> bool:
        """Whether a statement returns a loss, or puts aside what a model computed, with its gradients:
        `self.log_probs.append(m.log_prob(action))`."""
        if isinstance(statement, ast.Return):
            return not names(nodes_of(statement)) & {"item", "tolist", "numpy"}
        if not any("." in name for name in writes(statement)) or id(statement) not in derived:
            return False
        return not names(nodes_of(statement)) & DETACHES

    def wanted(self, statement: ast.stmt, needs: Mapping[str, set[str]]) -> set[str]:
        """Returns the names of which a statement needs the values, also for the functions that it calls."""
        wanted = set(self.reads[id(statement)])
        wanted = wanted.union(*(self._taken.get(name, ()) for name in wanted))
        for name, base in methods_called(statement):
            wanted |= rebased(needs.get(name, ()), base)
        return wanted

    def _arguments(self, call: ast.stmt, links: Links) -> set[str]:
        """Returns what the statement of a model call is given, without what it returns of other models
        beside, `return probs.log_prob(action), self.critic(x)`, nor what the function through which it
        calls the model wants for something else."""
        wanted = self.wanted(call, links.batch) - _callees(call)
        if isinstance(call, ast.Return):
            others = self._derived([model for model in self.models if model is not call])
            wanted -= set().union(*others.values())
        leads = set().union(*(self.anchors.leads.get(line, ()) for line in header_lines(call)))
        for node in nodes_of(call):
            if isinstance(node, ast.Call) and callee(node)[0] in leads & links.batch.keys():
                needed = links.batch[callee(node)[0]] | links.loss[callee(node)[0]]
                kept: set[str] = set()
                aside: set[str] = set()
                for parameter, value in self._effects.bound(node):
                    (kept if parameter in needed else aside).update(reads(ast.Expr(value)))
                wanted -= aside - kept
        return wanted

    def _from_outside(self, wanted: set[str]) -> set[str]:
        """Returns what of these names is an attribute of the function's object, or a parameter."""
        spec = None if isinstance(self.function, ast.Module) else self.function.args
        parameters = {arg.arg for arg in (*spec.posonlyargs, *spec.args)} if spec else set()
        return {name for name in wanted if name.startswith("self.") or name in parameters}

    # -- loops

    def _is_before(self, statement: ast.stmt) -> bool:
        """Whether a statement is outside of the innermost loop around each backward pass: what it makes is
        for all the passes there, and in the live graph of none. Loops that call no model go over losses.
        """
        if self._learns is None:
            self._learns = []
            for each in self.passes:
                loops = self.blocks.loops(each)
                if not loops or not any(loops[-1] in self.blocks.loops(model) for model in self.models):
                    self._learns = []
                    break
                self._learns.append(loops[-1])
        around = self.blocks.loops(statement)
        return bool(self._learns) and not any(loop in around for loop in self._learns)

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
        file: It.
        tree: It, parsed.
        sites: Lines, and the kinds of what is called there.
        leads: The functions through which a model is called, by file and line.
        effects: What the functions of the script assign.
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


def _of_weights(statement: ast.stmt) -> bool:
    return bool(names(nodes_of(statement)) & WEIGHTS)


def _yields(statement: ast.stmt) -> bool:
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes_of(statement))


def _callees(call: ast.stmt) -> set[str]:
    """Returns the names of what a statement calls, which it is not given: of the outermost call also those
    of the object that the method is of."""
    given: set[str] = set()
    called: set[str] = set()
    nodes = nodes_of(call)
    inner = {
        id(node)
        for outer in nodes
        if isinstance(outer, ast.Call)
        for value in (*outer.args, *(keyword.value for keyword in outer.keywords))
        for node in ast.walk(value)
    }
    for node in (each for each in nodes if isinstance(each, ast.Call)):
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            given |= reads(ast.Expr(value))
        if id(node) in inner:
            called.add(ast.unparse(node.func))
        else:
            called |= reads(ast.Expr(node.func))
    return called - (given - {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)})


def _only_of(statement: ast.stmt, batch: set[str]) -> bool:
    """Whether a statement is made of the batch, and of nothing else but settings."""
    nodes = nodes_of(statement)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    used = {
        node.id
        for node in nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in called
    }
    return bool(used & batch) and not used - batch - SETTINGS
