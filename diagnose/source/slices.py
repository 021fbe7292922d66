"""Whether a statement in a loop does to a tensor, turn by turn, what one operation or kernel could do."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from diagnose.source.calling import TRAINS, callee, calls_in, is_call, parameters_of
from diagnose.source.kinds import ForLoop, Function, Separate
from diagnose.source.names import last_name, variables
from diagnose.source.statements import is_operation, nodes_of, nodes_within, targets_of

FEW_PARTS = 8
"""Of fewer parts than that, named in the script, each may be large: queries, keys and values. Likewise of
larger ones."""

TRAINS_BY = {*TRAINS, "train_step"}
"""Calls in the body of a loop that trains: its turns are the steps."""

TENSOR = {"shape", "dim", "ndim", "new_zeros", "new_empty", "new_full", "new_tensor"}
"""What a tensor is asked, and no list: each turn of a loop over it gets a row. Boxes and lists of images
have a `device` and a `size`, too; what is called for its size, `x.size(0)`, is a tensor."""

ASKS_TYPE = {"isinstance", "type", "is_tensor", "hasattr"}
"""Functions that are asked what something is."""


def takes_slices(
    statement: ast.stmt,
    loops: Sequence[ast.stmt],
    nodes: Sequence[ast.AST],
    function: Function | None = None,
    *,
    runs_function: bool = False,
) -> bool:
    """Whether a statement works on one slice of a tensor per turn, and one operation could do all turns.

    A slice is what the loop's variable selects as one of several indices, or as the rows that are taken, or
    what a tensor was split into; and all that a turn makes of it. A row of what is surely a tensor is one
    where a turn only does to it what can be done to all rows at once. One operation could not where a turn
    reads what the one before has written, but for a sum, or where the statement calls a part of a model.

    Args:
        statement: In the loop.
        loops: Those around it.
        nodes: Of the statement's own expressions.
        function: Around the loops; what it asks of a name tells whether that is a tensor.
        runs_function: Whether the time is known to be that of a function which the statement calls, and
            which is no module's.
    """
    if (not runs_function and _may_call_module(nodes)) or _fills_few_names(statement):
        return False
    fors = [loop for loop in loops if isinstance(loop, ForLoop)]
    comprehensions = [node for node in nodes if isinstance(node, ast.comprehension)]
    turns = variables(node for each in (*fors, *comprehensions) for node in ast.walk(each.target))
    tensors = _tensors_in(function) if fors or comprehensions else {}
    parts = {name for each in comprehensions for name in _parts_in(each, nodes, tensors)}
    reads, writes = variables(nodes, ast.Load), variables(nodes, ast.Store)
    summed = writes if _is_sum(statement) else set()
    # A comprehension reads no name that its own statement assigns: `x = torch.stack([... for row in x])`.
    carries = bool(fors and reads & writes - turns) or isinstance(statement, ast.AugAssign)
    if carries and not summed:
        return False
    flows = [_flow(loop, turns, tensors) for loop in fors if is_side_loop(loop)]
    if any(reads & carried - summed for _, carried in flows):
        return False
    parts |= {name for sliced, _ in flows for name in sliced}
    return _selects(nodes, turns) or bool(reads & parts)


def _fills_few_names(statement: ast.stmt) -> bool:
    """Whether a statement has few turns, as many as the names that it gives their results:
    `a, b = [v / v.norm() for v in z]`."""
    if not isinstance(statement, ast.Assign) or not _goes_over(statement.value):
        return False
    return any(
        isinstance(target, (ast.Tuple, ast.List))
        and len(target.elts) < FEW_PARTS
        and not any(isinstance(each, ast.Starred) for each in target.elts)
        for target in statement.targets
    )


def _goes_over(value: ast.expr) -> bool:
    """Whether a value has one part for each turn of a comprehension."""
    if is_call(value, ("list", "tuple")) and len(value.args) == 1:
        value = value.args[0]
    return isinstance(value, (ast.ListComp, ast.GeneratorExp))


def is_side_loop(loop: ast.AST) -> bool:
    """Whether a loop trains nothing."""
    return not any(is_call(node, TRAINS_BY) for node in nodes_within(loop))


def _flow(loop: ForLoop, turns: set[str], tensors: Mapping[str, int]) -> tuple[set[str], set[str]]:
    """Returns the names that hold a slice in the body of a loop, or what is made of it, and those that
    bring something from one turn to the next, but for sums."""
    statements = list(_in_order(loop.body))
    ever = {name for statement in statements for name in variables(nodes_of(statement), ast.Store)}
    inside = [node for each in loop.body for node in nodes_within(each)]
    sliced, carried, written = _parts_in(loop, inside, tensors), set[str](), set[str]()
    for statement in statements:
        nodes = nodes_of(statement)
        reads, writes = variables(nodes, ast.Load), variables(nodes, ast.Store)
        summed = writes if _is_sum(statement) else set[str]()
        if isinstance(statement, ast.AugAssign) and not summed:
            reads |= writes
        carried |= reads & ever - written - summed
        if not summed and not _may_call_module(nodes) and (_selects(nodes, turns) or reads & sliced):
            sliced |= writes
        written |= writes - summed
    for statement in statements:  # what is made of it needs the turn before as well
        nodes = nodes_of(statement)
        if not _is_sum(statement) and variables(nodes, ast.Load) & carried:
            carried |= variables(nodes, ast.Store)
    return sliced, carried


def _parts_in(
    loop: ForLoop | ast.comprehension, inside: Sequence[ast.AST], tensors: Mapping[str, int]
) -> set[str]:
    """Returns the variables of a loop that hold one part of a tensor after the other:
    `for i, part in enumerate(x.unbind(1))`.

    Args:
        inside: What its turns do.
        tensors: See `_tensors_in`.
    """
    pairs: list[tuple[ast.expr, ast.expr]] = [(loop.target, loop.iter)]
    found: set[str] = set()
    while pairs:
        target, source = pairs.pop()
        if isinstance(source, ast.Name) and source.lineno <= tensors.get(source.id, 0):
            found |= variables(ast.walk(target)) if _for_all_rows(inside) else set()
        if not isinstance(source, ast.Call):
            continue
        name = last_name(source.func)
        inner = target.elts if isinstance(target, ast.Tuple) else []
        if name == "zip":
            pairs += zip(inner, source.args, strict=False)
        elif name == "enumerate":
            pairs += zip(inner[1:], source.args[:1], strict=False)
        elif name in ("reversed", "list", "tuple"):
            pairs += [(target, each) for each in source.args[:1]]
        elif _splits(source):
            found |= variables(ast.walk(target))
    return found


@lru_cache(maxsize=32)
def _tensors_in(function: Function | None) -> Mapping[str, int]:
    """Returns the parameters of a function that it asks what only tensors, and arrays, are asked, with the
    last line on which they still are what was given. What else is a tensor may have few rows, and large
    ones: queries, keys and values; and what is asked whether it is a tensor may be a list."""
    if function is None or isinstance(function, ast.Lambda):
        return {}
    given = set(parameters_of(function))
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id in given]
    called = {id(call.func) for call in calls_in(function)}
    asked = {
        node.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.attr in TENSOR or (node.attr == "size" and id(node) in called)
    }
    end = function.end_lineno or function.lineno
    stored = [node for node in names if isinstance(node.ctx, ast.Store)]
    return {
        name: min((node.lineno for node in stored if node.id == name), default=end)
        for name in (asked & given) - _asked_for_type(function)
    }


def _asked_for_type(function: ast.AST) -> set[str]:
    """Returns the names of which a function asks what they are: `isinstance(x, torch.Tensor)`."""
    return {
        call.args[0].id
        for call in ast.walk(function)
        if is_call(call, ASKS_TYPE) and call.args and isinstance(call.args[0], ast.Name)
    }


def _for_all_rows(inside: Sequence[ast.AST]) -> bool:
    """Whether what is done to a row can be done to all at once: not to a part of it that is another in each
    row, `row[:n]`, `row[row > 0]`."""
    for node in inside:
        if isinstance(node, ast.Call) and not is_call(node, BATCHED):
            return False
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and variables(ast.walk(node.slice))
        ):
            return False
    return True


def _splits(call: ast.Call) -> bool:
    """Whether a call takes a tensor apart into many small parts: `x.unbind(1)`, `x.chunk(groups, 1)`."""
    name, base = callee(call)
    given = call.args[1:] if base == "torch" else call.args
    number = given[0].value if given and isinstance(given[0], ast.Constant) else None
    if name == "split":
        return isinstance(number, int) and number < FEW_PARTS  # of the size of a part
    if name in ("chunk", "tensor_split"):
        return bool(given) and not (isinstance(number, int) and number < FEW_PARTS)
    return name == "unbind"


def _selects(nodes: Sequence[ast.AST], turns: set[str]) -> bool:
    """Whether a loop's variable is one of several indices, or says which rows are taken."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, (ast.Tuple, ast.Compare))  # `x[:, i]`, or a group: `x[group == i]`
        and bool(variables(ast.walk(node.slice)) & turns)
        for node in nodes
    )


def _is_sum(statement: ast.stmt) -> bool:
    """Whether a statement adds to a name, and does nothing else with it: `a += x`, `a = a + x`."""
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Add) and isinstance(statement.target, ast.Name)
    if not isinstance(statement, ast.Assign) or not is_operation(statement.value, ast.Add):
        return False
    target, value = statement.targets[0], statement.value
    if not isinstance(target, ast.Name):
        return False
    own = [isinstance(side, ast.Name) and side.id == target.id for side in (value.left, value.right)]
    read = [node for node in ast.walk(value) if isinstance(node, ast.Name) and node.id == target.id]
    return any(own) and len(read) == 1


def _in_order(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements and those in them, but for functions', in the order of the text."""
    for statement in body:
        if isinstance(statement, Separate):
            continue
        yield statement
        for _, value in ast.iter_fields(statement):
            if isinstance(value, list):
                yield from _in_order([item for item in value if isinstance(item, ast.stmt)])


def _may_call_module(nodes: Sequence[ast.AST]) -> bool:
    return any(isinstance(node, ast.Call) and _may_be_module(node.func) for node in nodes)


ELEMENTWISE_NAMES = """
    abs add ceil clamp clip cos div erf exp flip float floor fmod ge gelu gt le lerp log log1p lt
    masked_fill maximum minimum mul neg pow reciprocal relu remainder roll round rsqrt sigmoid sign silu
    sin softplus sqrt square sub tanh where
"""
ELEMENTWISE = frozenset(ELEMENTWISE_NAMES.split())

ROWWISE_NAMES = """
    all amax amin any append cat cumsum enumerate float len log_softmax max mean min norm prod reshape
    reversed softmax squeeze stack std sum unsqueeze var view zip
"""
BATCHED = ELEMENTWISE | frozenset(ROWWISE_NAMES.split())
"""What is done to a row, or of a row, and can be done to all rows at once."""


def is_chain(statement: ast.stmt, loops: Sequence[ast.stmt], nodes: Sequence[ast.AST]) -> bool:
    """Whether each turn of a loop puts further elementwise operations on the result of the one before.

    A compiler makes one kernel of them all. Of products it could not, nor of layers. Arguments as in
    `takes_slices`.
    """
    if not loops or not isinstance(statement, (ast.Assign, ast.AugAssign)):
        return False
    written = {target.id for target in targets_of(statement) if isinstance(target, ast.Name)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return (
        bool(written & variables(nodes, ast.Load) or isinstance(statement, ast.AugAssign))
        and bool(calls)
        and all(isinstance(call.func, ast.Attribute) and is_call(call, ELEMENTWISE) for call in calls)
        and not any(isinstance(node, ast.MatMult) for node in nodes)
    )


def _may_be_module(function: ast.expr) -> bool:
    """Whether `function` is neither a library's nor a tensor's or list's method: `cell`, `self.cell`."""
    if isinstance(function, ast.Name):
        return not hasattr(builtins, function.id)  # `range`, `zip`
    if isinstance(function, ast.Attribute):
        return isinstance(function.value, ast.Name) and function.value.id == "self"
    return True
