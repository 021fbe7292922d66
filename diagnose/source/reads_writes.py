"""What statements read and write: names, dotted names and entries of containers."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

from diagnose.source.calling import callee
from diagnose.source.kinds import Assignment, ForLoop, With
from diagnose.source.names import words
from diagnose.source.statements import nodes_of, targets_of, text_of

APPENDS, REORDERS = {"append", "extend", "appendleft"}, {"shuffle", "sort", "reverse"}
"""Methods that put something into a list, and those that bring what it holds into another order."""

MIXERS = {"random", "rng", "generator", "gen", "rand", "rnd", "prng", "rs"}
"""Words of what brings a list that it is given into another order: `np.random.shuffle(rows)`."""

FILLS = {"take", "compress", "choose", "clip", "round", "dot", "sum", "mean", "cumsum", "max", "min"}
"""Methods of arrays that write their result where they are told to: `rows.take(i, out=buffer)`."""

GATHERS = {"all_gather", "all_gather_into_tensor", "all_gather_single"}
"""Collectives that fill what they are given first."""

MODULES = {"torch", "nn", "init", "F", "np", "numpy", "dist"}
"""What torch's and numpy's modules are called: `nn.init.zeros_(weight)`."""


def reads(statement: ast.stmt) -> set[str]:
    """Returns the names and dotted names that a statement's own expressions read.

    Of `notes["loss"]` it is the container and the one entry, `notes[loss]`; of `notes` itself every entry,
    `notes[*]`.
    """
    found: set[str] = set()
    told: set[int] = set()
    for node in nodes_of(statement):
        if isinstance(node, ast.Subscript):
            name, key = _dotted(node.value), key_of(node)
            if isinstance(node.ctx, ast.Store):
                told.add(id(node.value))
            elif name is not None and key is not None:
                told.add(id(node.value))
                found.update((name, f"{name}[{key}]"))
        if not isinstance(node, (ast.Name, ast.Attribute)) or id(node) in told:
            continue
        name = _dotted(node)
        if isinstance(node.ctx, ast.Load) and name is not None and name != "self":
            found.update((name, f"{name}[*]"))
    if isinstance(statement, ast.AugAssign):
        found.update(writes(statement))
    return found


def reads_in(*expressions: ast.expr) -> set[str]:
    """Returns the names and dotted names that expressions read, as of statements."""
    return set().union(*(reads(ast.Expr(expression)) for expression in expressions))


def writes(statement: ast.stmt) -> set[str]:
    """Returns the names, dotted names and containers that a statement assigns, appends to, or changes in
    place. One entry of a container is that alone: `notes["loss"] = 1` writes `notes[loss]`."""
    return {name for name, _ in rebinds(statement)}


def rebinds(statement: ast.stmt) -> set[tuple[str, bool]]:
    """Returns what a statement writes, and whether that is all that the name then has: not where it writes
    into what was there."""
    targets: list[ast.expr] = []
    sure = not isinstance(statement, ast.AugAssign)
    if isinstance(statement, Assignment):
        targets = [*targets_of(statement)]
    elif isinstance(statement, ForLoop):
        targets = [statement.target]
    elif isinstance(statement, With):
        targets = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        targets, sure = _changed_by(statement.value), False
    found: set[tuple[str, bool]] = set()
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets.extend(target.elts)
        elif isinstance(target, ast.Starred):
            targets.append(target.value)
        elif isinstance(target, ast.Subscript):
            name, key = _dotted(target.value), key_of(target)
            if name is None:
                targets.append(target.value)
            elif key is None:
                found.add((name, False))
            else:
                found.update(((f"{name}[{key}]", sure), (f"{name}[*]", False)))
        elif not isinstance(target, ast.Call):
            name = _dotted(target)
            if name is not None:
                found.add((name, sure))
    return found


def _changed_by(call: ast.Call) -> list[ast.expr]:
    """Returns what a call changes: `rows`, of `rows.sort()`, `shuffle(rows)` or `np.take(x, i, out=rows)`;
    not what data are shuffled with, `corpus.shuffle(epoch)`, nor a folder, `save(images, out=folder)`."""
    name, base = callee(call)
    fills = base.partition(".")[0] in MODULES or (base and name in FILLS)
    changed = [each.value for each in call.keywords if each.arg == "out" and fills]
    if name == "shuffle" and call.args and (not base or words(base) & MIXERS):
        changed.append(call.args[0])
    elif isinstance(call.func, ast.Attribute) and (name in APPENDS | REORDERS or in_place(name)):
        changed.append(_held_by(call.func.value))
    elif name in GATHERS and call.args:
        changed.append(call.args[0])
    return changed


SETTERS = {"requires_grad_", "unscale_", "share_memory_", "clip_grad_norm_", "clip_grad_value_", "apply_"}
"""Methods that change no values."""


def in_place(method: str) -> bool:
    """Whether torch's methods of such a name change what they are called on."""
    plain = method.endswith("_") and not method.startswith("_") and not method.endswith("__")
    return plain and method not in SETTERS


def _held_by(node: ast.expr) -> ast.expr:
    """Returns the tensor that is changed by a method of its data, or of what its method returned:
    `v` in `v.data.resize_(n).copy_(x)`. A function of a module changes its arguments."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        if isinstance(node, ast.Call):
            node = node.func
            node = node.value if isinstance(node, ast.Attribute) else node
        elif node.attr == "data":
            node = node.value
        else:
            break
    root = node
    while isinstance(root, ast.Attribute):
        root = root.value
    is_module = isinstance(root, ast.Name) and root.id in MODULES
    return ast.Call(func=node, args=[], keywords=[]) if is_module else node


def key_of(node: ast.Subscript) -> str | None:
    """Returns the text that a container is asked for."""
    return text_of(node.slice)


def closure(held: set[str], more: Callable[[set[str]], Iterable[str]]) -> set[str]:
    """Adds to names those that `more` finds by them, until these are all; returns them."""
    while new := set(more(held)) - held:
        held |= new
    return held


def grow(held: set[str], statements: Iterable[ast.stmt]) -> None:
    """Adds the names of all that is made of what is held."""
    flows = [(reads(statement), writes(statement)) for statement in statements]
    closure(held, lambda known: (name for read, made in flows if read & known for name in made))


def _dotted(node: ast.expr) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join((node.id, *reversed(parts))) if isinstance(node, ast.Name) else None
