"""What a statement of the training loop is for: building the batch, computing the loss, or something else.

Hooks see a model call and a backward, not the code between them. The source does: walking back from the
arguments of the model call gives the statements that build the batch, and walking back from what `backward`
is called on gives those that compute the loss. Everything else is other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diagnose.analysis.statements import callee, names, nodes_of, reads, writes
from diagnose.core.ledger import SLOT_OF
from diagnose.core.phases import Phase
from diagnose.core.places import decoded

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
Frame = tuple[str, int, str]
"""File, line, function."""
Site = tuple[str, str, int, str, int]
"""Kind, file, line, function, calls. The kind: `next`, `forward`, `further`, `backward` or `optimizer`."""
Sample = tuple[int, int, Sequence[Frame], int]
"""First step, slot and place, a package's frame and then the user's, nanoseconds, as the store has them."""

KIND_OF_SLOT = {SLOT_OF["forward"]: "forward", SLOT_OF["backward"]: "backward"}
AFTER_FORWARD = SLOT_OF["gap_after_forward"]

DETACHES = {"detach", "item", "tolist", "cpu", "numpy", "data", "float", "int"}
"""Names in a statement that keeps a value without its gradients."""

WEIGHTS = {"parameters", "named_parameters", "weight"}
"""Names in a statement that goes over a model's weights, or reads them."""

PHASE_OF_KIND = {
    "next": Phase.DATA_WAIT,
    "forward": Phase.FORWARD,
    "further": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
}


@dataclass(slots=True)
class _Anchors:
    """The lines of one function from which hooks were entered, straight or through functions it calls.

    A `further` model call is of what another one, or a parameter, has a part in: of a loss module, or
    inside of a model that is not called as a module itself.
    """

    next: set[int] = field(default_factory=set)
    forward: set[int] = field(default_factory=set)
    further: set[int] = field(default_factory=set)
    backward: set[int] = field(default_factory=set)
    optimizer: set[int] = field(default_factory=set)


class Roles:
    """Answers which phase a sampled stack belongs to when no hook was open.

    Args:
        sites: Lines from which batches were asked, models called, backward passes and steps begun.
        sources: Text of each file, where it can be read; a file without text has no roles.
        samples: What the sampler saw. A stack inside a model call or a backward also shows which lines
            called the function that it is in: a loop may build its batch and leave the rest to a function.
    """

    def __init__(self, sites: Iterable[Site], sources: Sources, samples: Iterable[Sample] = ()) -> None:
        self._roles: dict[tuple[str, int], Phase] = {}
        self._anchored: set[tuple[str, int]] = set()
        self._kinds: dict[tuple[str, int], set[str]] = {}
        self._aside: dict[tuple[str, int], dict[str, Phase]] = {}
        self._given: dict[tuple[str, int], set[str]] = {}
        straight = _by_place(sites)
        by_file: dict[str, list[tuple[int, str]]] = {}
        for (file, line), kinds in straight.items():
            by_file.setdefault(file, []).extend((line, kind) for kind in kinds)
        through: dict[tuple[str, int], set[str]] = {}
        for file, line, kind, called in _callers(straight, samples):
            by_file.setdefault(file, []).append((line, kind))
            if kind == "forward":
                through.setdefault((file, line), set()).add(called)
        for file, in_file in by_file.items():
            tree = sources.tree(file)
            if tree is not None:
                self._read(file, tree, in_file, straight, through)

    def phase(self, stack: Sequence[Frame], slot: int) -> Phase:
        """Returns the phase of a stack sampled between hooks.

        The innermost frame of a function that holds a model call or a backward decides: what it calls
        serves the statement that calls it.

        Args:
            stack: File, line and function of each user frame, innermost first.
            slot: The gap in which it was sampled.
        """
        for depth, (file, line, _) in enumerate(stack):
            kinds = self._kinds.get((file, line))
            if kinds is not None:
                if depth and slot == AFTER_FORWARD:
                    called = stack[depth - 1][2].rpartition(".")[2]
                    aside = self._aside.get((file, line), {}).get(called)
                    if aside is not None:
                        return aside
                return _beside(kinds, slot, within=depth > 0)
            if (file, line) in self._anchored:
                called = stack[depth - 1][2].rpartition(".")[2] if depth else ""
                given = called in self._given.get((file, line), ())
                return Phase.DATA_WAIT if given else self._roles.get((file, line), Phase.OTHER)
        return Phase.OTHER

    def calls_model(self, frame: Frame) -> bool:
        """Whether a model was called straight from the statement on a frame's line."""
        return not self._kinds.get(frame[:2], set()).isdisjoint(("forward", "further"))

    def helper(self, stack: Sequence[Frame]) -> tuple[str, str] | None:
        """Returns file and name of the function in which a stack left the loop; `None` if it did not.

        Args:
            stack: File, line and function of each user frame, innermost first.
        """
        inside = None
        for file, line, function in stack:
            if (file, line) in self._anchored:
                return inside
            inside = (file, function)
        return None

    def _read(
        self,
        file: str,
        tree: ast.Module,
        sites: list[tuple[int, str]],
        straight: Mapping[tuple[str, int], set[str]],
        through: Mapping[tuple[str, int], set[str]],
    ) -> None:
        functions = list(_functions(tree))
        anchors: dict[int, _Anchors] = {}
        for line, kind in sites:
            index = _innermost(functions, line)
            getattr(anchors.setdefault(index, _Anchors()), kind).add(line)
        for index, found in anchors.items():
            statements = list(_statements(functions[index]))
            for statement in statements:
                lines = _header_lines(statement)
                kinds = _one_call(set().union(*(straight.get((file, line), ()) for line in lines)))
                if kinds:
                    self._kinds.update(((file, line), kinds) for line in lines)
                leads = set().union(*(through.get((file, line), ()) for line in lines))
                if leads:
                    given = _given(statement, leads)
                    self._given.update(((file, line), given) for line in lines)
            if found.forward or found.further or found.backward:
                for statement in statements:
                    self._anchored.update((file, line) for line in _header_lines(statement))
                roles = _slice(statements, found, _taken(functions[index], statements))
                for line, phase in roles.items():
                    self._roles[file, line] = phase
                for statement in statements:
                    lines = _header_lines(statement)
                    if found.forward.intersection(lines):
                        batch = _batch(_same_loop(statements, statement), found, roles)
                        aside = _called_aside(statement, batch)
                        self._aside.update(((file, line), aside) for line in lines)


def anchors_of(sites: Iterable[Site], samples: Iterable[Sample]) -> tuple[frozenset[Any], frozenset[Any]]:
    """Returns all that the roles of lines depend on besides the sources; on most ranks it is the same."""
    straight = _by_place(sites)
    kinds = frozenset((line, kind) for line, kinds in straight.items() for kind in kinds)
    return kinds, frozenset(_callers(straight, samples))


def _by_place(sites: Iterable[Site]) -> dict[tuple[str, int], set[str]]:
    kinds: dict[tuple[str, int], set[str]] = {}
    for kind, file, line, _, _ in sites:
        kinds.setdefault((file, line), set()).add(kind)
    return {place: _one_call(found) for place, found in kinds.items()}


def _one_call(kinds: set[str]) -> set[str]:
    """Where one of several model calls is of a batch, or one sometimes is, the others do not count."""
    return kinds - {"further"} if "forward" in kinds else kinds


def _callers(
    straight: Mapping[tuple[str, int], set[str]], samples: Iterable[Sample]
) -> set[tuple[str, int, str, str]]:
    """Returns the lines that call, at some remove, a function that calls a model or begins a backward, and
    what it is that they call."""
    callers: set[tuple[str, int, str, str]] = set()
    for _, slot, (_, *stack), _ in samples:
        kind = KIND_OF_SLOT.get(decoded(slot)[0])
        if kind is not None:
            wanted = {kind, "further"} if kind == "forward" else {kind}
            depths = (
                i for i, (file, line, _) in enumerate(stack) if wanted & straight.get((file, line), set())
            )
            for depth in range(next(depths, len(stack)) + 1, len(stack)):
                file, line, _ = stack[depth]
                callers.add((file, line, kind, stack[depth - 1][2].rpartition(".")[2]))
    return callers


def _beside(kinds: set[str], slot: int, *, within: bool) -> Phase:
    """Returns whose the time is that passes in a statement before or after what a hook sees of it.

    Args:
        kinds: What the statement does. One that does it all calls a trainer, whose time this does not tell.
        slot: The gap in which the time passed.
        within: Whether it passed in another function of the user's that the statement calls.
    """
    if slot == AFTER_FORWARD and "next" not in kinds and kinds & {"forward", "further", "backward"}:
        return Phase.FORWARD  # loss = cross_entropy(model(x), y)
    if len(kinds) > 1:
        return Phase.OTHER
    if "forward" in kinds and within:
        return Phase.DATA_WAIT  # out = model(get_batch())
    return PHASE_OF_KIND[next(iter(kinds))]


class Sources:
    """Source text by file, read once.

    Args:
        texts: Texts that are known already: those kept with the run. The file may be another by now.
    """

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts: dict[str, str | None] = dict(texts or {})

    def know(self, texts: Mapping[str, str]) -> None:
        """Takes in what is kept with one more rank."""
        self._texts.update((file, text) for file, text in texts.items() if file not in self._texts)

    def text(self, file: str) -> str | None:
        """Returns the text of a file, or `None` when it cannot be read."""
        if file not in self._texts:
            try:
                self._texts[file] = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                self._texts[file] = None
        return self._texts[file]

    def line(self, file: str, line: int) -> str:
        """Returns one line without its indentation, or an empty text."""
        lines = (self.text(file) or "").split("\n")  # not `splitlines`, which ends one at a form feed
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""

    def tree(self, file: str) -> ast.Module | None:
        """Returns the parsed file, or `None` when it is not Python."""
        text = self.text(file)
        if text is None:
            return None
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            return None


def _functions(tree: ast.Module) -> Iterator[Function]:
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _innermost(functions: list[Function], line: int) -> int:
    """Returns the index of the innermost function that holds a line; 0 is the module."""
    best, span = 0, float("inf")
    for index, function in enumerate(functions):
        if isinstance(function, ast.Module):
            continue
        end = function.end_lineno or function.lineno
        if function.lineno <= line <= end and end - function.lineno < span:
            best, span = index, end - function.lineno
    return best


def _statements(function: Function) -> Iterator[ast.stmt]:
    """Yields the statements of a function, of every depth, but not those of functions inside it."""
    pending: list[ast.stmt] = list(function.body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield statement
        for _, value in ast.iter_fields(statement):
            if isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.stmt):
                        pending.append(item)
                    elif isinstance(item, (ast.ExceptHandler, ast.match_case)):
                        pending.extend(item.body)


def _header_lines(statement: ast.stmt) -> range:
    """Returns the lines that a statement itself occupies, without those of the statements in it."""
    end = statement.end_lineno or statement.lineno
    inner = [node.lineno for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
    if inner:
        end = max(statement.lineno, min(inner) - 1)
    return range(statement.lineno, end + 1)


def _taken(function: Function, statements: list[ast.stmt]) -> dict[str, set[str]]:
    """Returns, by their names, what the functions that are defined inside a function take from it."""
    blocks = statements if isinstance(function, ast.Module) else [function, *statements]
    taken: dict[str, set[str]] = {}
    for inner in (node for block in blocks for node in ast.iter_child_nodes(block)):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            within = [node for node in ast.walk(inner) if isinstance(node, ast.stmt)]
            own = {arg.arg for arg in ast.walk(inner.args) if isinstance(arg, ast.arg)}
            taken[inner.name] = set().union(*map(reads, within)) - own.union(*map(writes, within))
    return taken


def _slice(
    statements: list[ast.stmt], anchors: _Anchors, taken: Mapping[str, set[str]]
) -> dict[int, Phase]:
    """Walks back from the model calls and the backward passes to the statements that feed them.

    A function without a backward hands its loss to who called it, so there the way back begins at `return`,
    and at what it puts aside of what a model computed, its gradients with it.
    """
    calls = [s for s in statements if anchors.forward.intersection(_header_lines(s))]
    further = [s for s in statements if anchors.further.intersection(_header_lines(s)) and s not in calls]
    passes = [s for s in statements if anchors.backward.intersection(_header_lines(s))]
    asks = [s for s in statements if anchors.next.intersection(_header_lines(s))]
    steps = [s for s in statements if anchors.optimizer.intersection(_header_lines(s))]
    fixed = {id(s) for s in (*calls, *further, *passes, *asks, *steps)}
    roles: dict[int, Phase] = {}
    computed = _computed(statements, (*calls, *further))
    weights = _computed(statements, [s for s in statements if isinstance(s, ast.For) and _of_weights(s)])
    if not passes:
        passes = [
            s
            for s in statements
            if id(s) not in fixed and (isinstance(s, ast.Return) or _keeps(s, computed))
        ]
        roles.update((line, Phase.FORWARD) for s in passes for line in _header_lines(s))
        passes += [s for s in calls if isinstance(s, ast.Return)]
    # The batch last, so that a statement that feeds both, such as `x, y = get_batch()`, is data.
    for sources, phase in ((passes, Phase.FORWARD), (further, Phase.FORWARD), (calls, Phase.DATA_WAIT)):
        wanted: set[str] = set().union(*(reads(s) for s in sources))
        within = set().union(*(taken.get(name, ()) for name in wanted))
        if phase is Phase.DATA_WAIT:
            wanted = set().union(*(_arguments(s, statements, (*calls, *further)) for s in sources))
            # What the call itself assigns was not built for it, such as `h` in `out, h = model(x, h)`.
            wanted -= set().union(*(writes(s) for s in sources))
        wanted |= within
        found: set[int] = set()
        grew = True
        while grew:
            grew = False
            for statement in statements:
                if id(statement) in found or id(statement) in fixed or not writes(statement) & wanted:
                    continue
                found.add(id(statement))
                wanted |= reads(statement)
                grew = True
                if sources is passes:
                    targets = calls and _is_of_targets(statement, computed | weights)
                else:
                    targets = sources is further and calls and not reads(statement) & computed
                for line in _header_lines(statement):
                    roles[line] = Phase.DATA_WAIT if targets else phase
    return roles


def _same_loop(statements: list[ast.stmt], inner: ast.stmt) -> list[ast.stmt]:
    """Returns the statements of the innermost loop around one, with its head; without a loop all."""
    around = [
        loop
        for loop in statements
        if isinstance(loop, (ast.For, ast.AsyncFor, ast.While))
        and loop.lineno <= inner.lineno <= (loop.end_lineno or loop.lineno)
    ]
    if not around:
        return statements
    loop = max(around, key=lambda each: each.lineno)
    return [s for s in statements if loop.lineno <= s.lineno <= (loop.end_lineno or loop.lineno)]


def _batch(statements: list[ast.stmt], anchors: _Anchors, roles: Mapping[int, Phase]) -> set[str]:
    """Returns the names that each step's batch is given, or what is made of it."""
    made = [
        s
        for s in statements
        if anchors.next.intersection(_header_lines(s)) or roles.get(s.lineno) is Phase.DATA_WAIT
    ]
    return set().union(*(writes(s) for s in made))


def _called_aside(statement: ast.stmt, batch: set[str]) -> dict[str, Phase]:
    """Returns what else the statement of a model call calls, or asks for as a property, by name: it gets
    nothing of the model's, as `loss_of(model(x), weights_of(y), self.scale)` shows of the last two. What is
    made of the batch is a part of it, and the rest is the loop's own. A term that is added, such as a
    penalty, is a part of the loss.
    """
    aside: dict[str, Phase] = {}
    around: set[str] = set()
    nodes = nodes_of(statement)
    terms = {id(side) for node in nodes if isinstance(node, ast.BinOp) for side in (node.left, node.right)}
    for node in nodes:
        if not isinstance(node, (ast.Call, ast.Attribute)):
            continue
        named = node.func if isinstance(node, ast.Call) else node
        name = named.attr if isinstance(named, ast.Attribute) else getattr(named, "id", "")
        inside = [each for each in ast.walk(node) if each is not node]
        if any(isinstance(each, ast.Call) for each in inside) or id(node) in terms:
            around.add(name)
        else:
            of_batch = names(inside) & {each.rpartition(".")[2] for each in batch}
            aside.setdefault(name, Phase.DATA_WAIT if of_batch else Phase.OTHER)
    return {name: phase for name, phase in aside.items() if name not in around}


def _given(statement: ast.stmt, leads: set[str]) -> set[str]:
    """Returns what is called for the arguments of a function that calls the model: `draw`, in
    `self.loss(*self.memory.draw())`.

    Args:
        statement: It calls such a function.
        leads: The names of those.
    """
    calls = [node for node in nodes_of(statement) if isinstance(node, ast.Call)]
    arguments = [
        each for call in calls if callee(call)[0] in leads for each in (*call.args, *call.keywords)
    ]
    inner = (node for each in arguments for node in ast.walk(each) if isinstance(node, ast.Call))
    return {callee(call)[0] for call in inner} - leads


def _keeps(statement: ast.stmt, computed: set[str]) -> bool:
    """Whether a statement puts aside what a model computed, still with its gradients:
    `self.log_probs.append(m.log_prob(action))`."""
    if not any("." in name for name in writes(statement)) or not reads(statement) & computed:
        return False
    return not names(nodes_of(statement)) & DETACHES


def _arguments(call: ast.stmt, statements: list[ast.stmt], models: Iterable[ast.stmt]) -> set[str]:
    """Returns what the statement of a model call reads, without what it returns of other models beside:
    `return probs.log_prob(action), self.critic(x)`."""
    if not isinstance(call, ast.Return):
        return reads(call)
    return reads(call) - _computed(statements, [model for model in models if model is not call])


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


def _computed(statements: list[ast.stmt], calls: Iterable[ast.stmt]) -> set[str]:
    """Returns the names of what models have computed, and of what was made of that. What a loss gets
    besides are targets, a part of the batch."""
    computed = set().union(*(writes(call) for call in calls))
    grew = True
    while grew:
        more = set().union(*(writes(s) for s in statements if reads(s) & computed)) - computed
        grew = bool(more)
        computed |= more
    return computed
