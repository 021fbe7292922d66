"""What the model calls and backward passes of a loop depend on, and what depends on them.

Walking back from the arguments of a model call gives the statements that build the batch, and walking back
from what `backward` is called on gives those that compute the loss. What is made of a model's results and
is neither, scores them: see `scores`. How values flow is told by `parts`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from diagnose.core.phases import Phase
from diagnose.source.calling import called_in, calls_of, given_to, is_call
from diagnose.source.effects import VALUES
from diagnose.source.kinds import ForLoop
from diagnose.source.names import last_name, names, variables
from diagnose.source.parts import SETTINGS, Needs, Part, of_weights
from diagnose.source.reads_writes import grow, reads_in, writes
from diagnose.source.returned import Item, items_of, lines_of, wanted_items
from diagnose.source.statements import expressions, header_lines, nodes_of, yields

DETACHES = {"detach", "item", "tolist", "cpu", "numpy", "data", "float", "int"}
"""Names in a statement that keeps a value without its gradients."""

NUMBERS = {"arange", "count", "range", "trange"}
"""Functions that count, in the head of a loop that gets no batch."""

COUNTERS = {"step", "steps", "global_step", "epoch", "iteration", "iter", "it", "i", "update", "progress"}
"""Names of what only counts, also where a loop gets it along with its batch."""


@dataclass(slots=True)
class Links:
    """What the functions of the loop leave for each other, each by the function's name.

    Attributes:
        batch: What of its object and its parameters a function makes batches of.
        loss: Likewise, a loss.
        losses: What of them is the loss that `backward` is called on.
        results: What its object has of a model's results, when it returns.
        asked: Of what its callers make a loss among the things that it returns, by place or key.
        fed: Likewise, a batch.
        backs: Likewise, on which of them `backward` is called.
        scored: Which of them hold results of models.
    """

    batch: dict[str, set[str]] = field(default_factory=dict)
    loss: dict[str, set[str]] = field(default_factory=dict)
    losses: dict[str, set[str]] = field(default_factory=dict)
    results: dict[str, set[str]] = field(default_factory=dict)
    asked: dict[str, set[str]] = field(default_factory=dict)
    fed: dict[str, set[str]] = field(default_factory=dict)
    backs: dict[str, set[str]] = field(default_factory=dict)
    scored: dict[str, set[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Found:
    """What the statements of a function are for.

    Attributes:
        roles: Phases of lines; the others serve nothing.
        inside: Of lines that serve only through a function that they call: what that has to assign.
        carried: Statements that make, of the results of a model, what it or the loss is given in the next
            turn, as `h = h.detach()`.
        batch: What of its object and its parameters the batch is made of.
        loss: Likewise, the loss.
        for_loss: The statements of the loss, and the names of which they need the values.
        for_batch: Likewise, those of the batch.
        hands_on: Whether it begins a backward pass, or leaves for others what one is made of.
    """

    roles: dict[int, Phase] = field(default_factory=dict)
    inside: dict[int, dict[str, set[str]]] = field(default_factory=dict)
    carried: set[int] = field(default_factory=set)
    batch: set[str] = field(default_factory=set)
    loss: set[str] = field(default_factory=set)
    for_loss: Needs = field(default_factory=list)
    for_batch: Needs = field(default_factory=list)
    hands_on: bool = False


class Dependencies:
    """Walks back from model calls and backward passes of a function to the statements that feed them."""

    def __init__(self, part: Part, links: Links) -> None:
        self._part = part
        self._links = links
        self._acts = {id(s) for s in part.acts}
        self._learns: list[ast.stmt] | None = None

    def found(self) -> Found:
        """Returns what the statements are for.

        A function without a backward hands its loss to who called it, so there the way back begins at what
        it returns, and at what it puts aside of what a model computed, its gradients with it.
        """
        part, links, found = self._part, self._links, Found()
        if part.feeds:
            batches = [s for s in part.statements if yields(s)]
            self._walk_batch([(s, part.reads[id(s)]) for s in batches], found)
            found.roles.update((line, Phase.DATA_WAIT) for s in batches for line in header_lines(s))
            return found
        computed = {id(s): part.writes[id(s)] for s in part.models}
        derived = part.spread(computed, self._acts)
        starts = [(s, part.wanted(s, links.loss)) for s in part.passes] or self._handed_on(derived, found)
        found.hands_on = bool(starts)
        self._walk_loss(starts, found, derived)
        further = [each for s in part.further for each in self._needs(s, derived)]
        self._walk_further(further, found, derived)
        # The batch last, so that a statement that feeds both, such as `x, y = get_batch()`, is data.
        calls = [(s, self._arguments(s, links)) for s in part.calls]
        self._walk_batch([*calls, *((s, part.reads[id(s)]) for s in part.asks)], found)
        return found

    def _handed_on(self, derived: Mapping[int, set[str]], found: Found) -> Needs:
        """Returns what a function hands to others for a loss, and what that is made of."""
        part = self._part
        starts: Needs = []
        for statement in part.statements:
            if isinstance(statement, ast.Return):
                if id(statement) in part.hooked and statement not in part.calls:
                    continue
                starts += self._needs(statement, derived)
                items = items_of(part, statement)
                lines = lines_of(items, self._chosen(items, derived))
            elif id(statement) not in part.hooked and self._puts_aside(statement, derived):
                starts.append((statement, part.wanted(statement, self._links.loss)))
                lines = set(header_lines(statement))
            else:
                continue
            if id(statement) not in part.hooked:
                found.roles.update((line, Phase.FORWARD) for line in lines)
        return starts

    def _needs(self, statement: ast.stmt, derived: Mapping[int, set[str]]) -> Needs:
        """Returns what a statement needs, for itself and what it calls; of one that returns, only for what
        is wanted of that."""
        part, needs = self._part, self._links.loss
        if not isinstance(statement, ast.Return):
            return [(statement, part.wanted(statement, needs))]
        chosen = self._chosen(items_of(part, statement), derived)
        return [(item.at, part.with_needs(item.reads, ast.Expr(item.value), needs)) for item in chosen]

    def _chosen(self, items: list[Item], derived: Mapping[int, set[str]]) -> list[Item]:
        links, name = self._links, self._part.name
        computed = set().union(*derived.values())
        return wanted_items(self._part, items, links.asked.get(name, ()), links.fed.get(name, ()), computed)

    def _walk_loss(self, starts: Needs, found: Found, derived: Mapping[int, set[str]]) -> None:
        part = self._part
        steps, wanted = part.walk(starts)
        found.loss |= part.from_outside(wanted)
        found.for_loss += starts
        weights: set[str] = set()
        for statement in part.statements:
            if isinstance(statement, ast.For) and of_weights(statement):
                weights |= writes(statement)
        grow(weights, part.statements)
        heads = self._heads()
        batch = set().union(*(writes(s) for s in (*part.asks, *heads)))
        computed: set[str] = set()
        last = max((s.lineno for s in part.passes), default=0)
        for statement in (s for s in part.statements if id(s) in steps):
            if last and statement.lineno > last and not steps[id(statement)]:
                found.carried.add(id(statement))  # a value that is read after the pass, for the next one
                continue
            if self._is_before(statement) or id(statement) in self._acts:
                is_data = True
            elif part.calls:
                is_data = not (id(statement) in derived or part.reads[id(statement)] & (computed | weights))
                is_data = is_data and not part.is_computed(statement)
            else:
                is_data = statement in heads or _only_of(statement, batch)
                batch |= writes(statement) if is_data else set()
            if not is_data:
                computed |= writes(statement)
            found.for_loss.append((statement, part.reads[id(statement)]))
            self._serves(statement, Phase.DATA_WAIT if is_data else Phase.FORWARD, wanted, found)

    def _walk_further(self, starts: Needs, found: Found, derived: Mapping[int, set[str]]) -> None:
        part = self._part
        steps, wanted = part.walk(starts)
        found.loss |= part.from_outside(wanted)
        found.for_loss += starts
        for statement in (s for s in part.statements if id(s) in steps):
            found.for_loss.append((statement, part.reads[id(statement)]))
            is_data = part.calls and id(statement) not in derived
            self._serves(statement, Phase.DATA_WAIT if is_data else Phase.FORWARD, wanted, found)

    def _walk_batch(self, starts: Needs, found: Found) -> None:
        """What an earlier model has computed in the same turn is no batch of the next one, but a part of
        the pass, unless it is what an environment is told. And what a call gives to itself, by the next
        turn, was not built for it, such as `h` in `out, h = model(x, h)`. Nor was what a simulation passes
        gradients through. And what is made of a model's results for the turns to come, and is no part of a
        loss, nobody but the loop can make, and not before: it is no batch where there is no environment.
        """
        part = self._part
        derived = part.derived(part.models)
        refused: set[tuple[int, str]] = set()
        for call, wanted in starts:
            for name in wanted & writes(call):
                for writer in part.writers.get(name, ()):
                    if writer.lineno >= call.lineno or id(writer) in derived:
                        refused.add((id(writer), name))
                        found.carried.add(id(writer))
        steps, wanted = part.walk(starts, refused)
        found.batch |= part.from_outside(wanted)
        found.for_batch += starts
        computed = {id(s): part.writes[id(s)] for s in part.models}
        passing = part.spread(computed, self._acts, same_turn=True)
        acting = self._acts.union(part.walk([(s, part.reads[id(s)]) for s in part.acts])[0])
        for statement in (s for s in part.statements if id(s) in steps):
            found.for_batch.append((statement, part.reads[id(statement)]))
            comes_of_it = not steps[id(statement)] and id(statement) in derived
            if comes_of_it and not self._acts and found.roles.keys().isdisjoint(header_lines(statement)):
                continue
            is_pass = steps[id(statement)] and id(statement) in passing and id(statement) not in acting
            is_pass = (is_pass or statement in part.passing_on) and not self._is_before(statement)
            self._serves(statement, Phase.FORWARD if is_pass else Phase.DATA_WAIT, wanted, found)

    def _serves(self, statement: ast.stmt, phase: Phase, wanted: set[str], found: Found) -> None:
        lines = header_lines(statement)
        found.roles.update((line, phase) for line in lines)
        if not writes(statement) & wanted:  # but for a function that it calls
            for name, put in self._part.effects.through(statement).items():
                for line in lines if put & wanted else ():
                    by_name = found.inside.setdefault(line, {})
                    by_name[name] = by_name.get(name, set()) | (put & wanted)

    def _puts_aside(self, statement: ast.stmt, derived: Mapping[int, set[str]]) -> bool:
        """Whether a statement puts aside what a model computed, with its gradients:
        `self.log_probs.append(m.log_prob(action))`."""
        if not any("." in name for name in writes(statement)) or id(statement) not in derived:
            return False
        if names(nodes_of(statement)) & DETACHES:
            return False
        return any(self._part.has_gradients(each) for each in _put(statement))

    def _arguments(self, call: ast.stmt, links: Links) -> set[str]:
        """Returns what the statement of a model call is given, without what it returns of other models
        beside, `return probs.log_prob(action), self.critic(x)`, nor what the function through which it
        calls the model wants for something else."""
        part = self._part
        wanted = part.wanted(call, links.batch) - _callees(call)
        if isinstance(call, ast.Return):
            others = part.derived([model for model in part.models if model is not call])
            wanted -= set().union(*others.values())
        leads = set().union(*(part.anchors.leads.get(line, ()) for line in header_lines(call)))
        for node in calls_of(call):
            name = last_name(node.func)
            if name in leads & links.batch.keys():
                needed = links.batch[name] | links.loss[name]
                kept: set[str] = set()
                aside: set[str] = set()
                for parameter, value in part.effects.bound(node):
                    (kept if parameter in needed else aside).update(reads_in(value))
                wanted -= aside - kept
        return wanted

    def _heads(self) -> list[ast.For]:
        """Returns the heads of the loops around backward passes that go over something: `for x, y in
        batches`. What such a head takes passes in the iterator, which makes a batch."""
        around = {id(loop): loop for each in self._part.passes for loop in self._part.blocks.loops(each)}
        return [
            loop
            for loop in around.values()
            if isinstance(loop, ast.For) and not is_call(loop.iter, {"range"})
        ]

    def _is_before(self, statement: ast.stmt) -> bool:
        """Whether a statement is outside of the innermost loop around each backward pass: what it makes is
        for all the passes there, and in the live graph of none. Loops that call no model go over losses.
        """
        part = self._part
        if self._learns is None:
            self._learns = []
            for each in part.passes:
                loops = part.blocks.loops(each)
                if not loops or not any(loops[-1] in part.blocks.loops(model) for model in part.models):
                    self._learns = []
                    break
                self._learns.append(loops[-1])
        around = part.blocks.loops(statement)
        return bool(self._learns) and not any(loop in around for loop in self._learns)


def _put(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yields what a statement puts somewhere; not what says where."""
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        yield from () if statement.value is None else (statement.value,)
    else:
        yield from expressions(statement)


def own_code(part: Part, found: Found) -> dict[int, set[str]]:
    """Returns by line what statements of the loss call besides: functions that get nothing of the batch
    or of a model, `weight_at(step)` in `loss = loss * weight_at(step)`, or nothing of a model and work on
    the batch in Python: `weights_of(x)`, which begins with `rows = x.tolist()`. So do those that get such
    values of whatever else: `weigh(kinds, losses.tolist())`."""
    batch = [s for s in part.statements if found.roles.get(s.lineno) is Phase.DATA_WAIT]
    if not (batch or part.models or part.asks):
        return {}  # of what the loss is made nothing is known, `loss = flow(weights, x[rows])`
    outside = part.from_outside(set().union(*part.reads.values()))
    given = list(_of_each_turn(batch, part))
    told = set().union(*part.derived([*part.models, *part.asks, *given]).values(), outside)
    told = {name for name in told if name.partition("[")[0] not in COUNTERS}
    data = found.batch.union(*(part.writes[id(s)] for s in (*part.asks, *batch)))
    results = set().union(*part.derived(part.models).values(), outside - data)
    own: dict[int, set[str]] = {}
    for statement in part.statements:
        makes_loss = found.roles.get(statement.lineno) is Phase.FORWARD and id(statement) not in part.hooked
        if not makes_loss and statement not in part.passes:
            continue
        aside: dict[str, bool] = {}
        for call in calls_of(statement):
            name = part.effects.runs(call)
            if name is not None:
                kept = results if part.effects.leaves_tensors(name) else told
                held = any(_may_hold(each, part) for each in _reads_of_tensors(call, part) & kept)
                aside[name] = not held and not part.is_computed(ast.Expr(call)) and aside.get(name, True)
        names_aside = {name for name, is_aside in aside.items() if is_aside}
        own.update((line, names_aside) for line in header_lines(statement) if names_aside)
    return own


def _of_each_turn(batch: list[ast.stmt], part: Part) -> Iterator[ast.stmt]:
    """Yields what makes a step's batch, but for what only counts, and what is there before the loop: the
    settings that a dataset is made with hold none."""
    around = {loop for s in (*part.models, *part.passes) for loop in part.blocks.loops(s)}
    for statement in batch:
        counts = isinstance(statement, ForLoop) and called_in(statement) & NUMBERS
        if not counts and (not around or not around.isdisjoint(part.blocks.loops(statement))):
            yield statement


def _reads_of_tensors(call: ast.Call, part: Part) -> set[str]:
    """Returns the names that a call reads, but for those of which it is given values in Python, and for
    an object that is given something by no other statement."""
    given = given_to(call)
    values = [value for value in given if isinstance(value, ast.Call) and is_call(value, VALUES)]
    if not values:
        return reads_in(call)
    asked = (node for s in part.statements for node in nodes_of(s) if isinstance(node, ast.Attribute))
    is_only_called = isinstance(call.func, ast.Name) and call.func.id not in names(n.value for n in asked)
    return reads_in(*([] if is_only_called else [call.func]), *(v for v in given if v not in values))


def _may_hold(name: str, part: Part) -> bool:
    """Whether a name may hold something of a batch or a model: not an attribute that was only set when
    its object was made."""
    if not name.startswith("self."):
        return True
    return part.effects.may_be_computed(".".join(name.partition("[")[0].split(".")[:2]))


def _callees(call: ast.stmt) -> set[str]:
    """Returns the names of what a statement calls, which it is not given: of the outermost call also those
    of the object that the method is of."""
    given: set[str] = set()
    called: set[str] = set()
    calls = calls_of(call)
    inner = {id(node) for outer in calls for value in given_to(outer) for node in ast.walk(value)}
    for node in calls:
        given |= reads_in(*given_to(node))
        if id(node) in inner:
            called.add(ast.unparse(node.func))
        else:
            called |= reads_in(node.func)
    return called - (given - {ast.unparse(node.func) for node in calls})


def _only_of(statement: ast.stmt, batch: set[str]) -> bool:
    """Whether a statement is made of the batch, and of nothing else but settings."""
    nodes = nodes_of(statement)
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    used = variables((node for node in nodes if id(node) not in called), ast.Load)
    return bool(used & batch) and not used - batch - SETTINGS
