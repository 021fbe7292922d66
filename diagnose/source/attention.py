"""Which lines of a function write attention out: a product, a softmax of it, and a product with that."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from diagnose.source.calling import is_call
from diagnose.source.kinds import Definition, Separate
from diagnose.source.names import variables
from diagnose.source.statements import all_lines, is_operation, nodes_within, targets_of

PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
OF_THE_SCORES = ("drop", "mask", "bias", "scale")
"""What a module between the two products is called by; any other makes queries, keys or values."""


def attention_lines(tree: ast.Module) -> set[int]:
    """Returns the lines of all statements from the first product to the second, that of the mask too."""
    lines: set[int] = set()
    for node in nodes_within(tree):
        if isinstance(node, Definition):
            for statement in _written_out(list(_simple(node))):
                lines.update(all_lines(statement))
    return lines


def _written_out(statements: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for softmax in statements:
        if not any(is_call(node, {"softmax"}) for node in ast.walk(softmax)):
            continue
        before = [s for s in statements if s.lineno < softmax.lineno]
        after = [s for s in statements if s.lineno > softmax.lineno]
        below, first = _back(_names(softmax, ast.Load), before)
        above, last = _on(_names(softmax, ast.Store), after)
        num_products = sum(map(_products, (softmax, *first, *last)))
        if num_products >= 2:
            found += [softmax, *below, *above]
    return found


def _back(wanted: set[str], before: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Walks back to the products that names come from; returns what was passed, and the products."""
    passed: list[ast.stmt] = []
    products: list[ast.stmt] = []
    for statement in reversed(before):
        if not _names(statement, ast.Store) & wanted or _is_layer(statement):
            continue
        passed.append(statement)
        if _products(statement):
            products.append(statement)
        else:
            wanted = wanted | _names(statement, ast.Load)
    return passed, products


def _on(made: set[str], after: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Walks on to the first product that uses what was made, likewise."""
    passed: list[ast.stmt] = []
    for statement in after:
        if not _names(statement, ast.Load) & made:
            continue
        passed.append(statement)
        if _products(statement):
            return passed, [statement]
        if _is_layer(statement):
            break
        made = made | _names(statement, ast.Store)
    return [], []


def _is_layer(statement: ast.stmt) -> bool:
    """Whether it calls a module of the model, `self.qkv(x)`, that does not belong to the scores."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
        and not any(word in node.func.attr.lower() for word in OF_THE_SCORES)
        and not _products(statement)
        for node in ast.walk(statement)
    )


def _products(statement: ast.stmt) -> int:
    nodes = ast.walk(statement)
    return sum(is_operation(node, ast.MatMult) or is_call(node, PRODUCTS) for node in nodes)


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    names = variables(ast.walk(statement), context)
    if context is ast.Store:
        # `scores[mask] = -inf` changes what `scores` names.
        names |= {
            target.value.id
            for target in targets_of(statement)
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)
        }
    return names


def _simple(function: Definition) -> Iterator[ast.stmt]:
    """Yields the statements that hold no others, of this function and none inside it."""
    pending: list[ast.stmt] = list(function.body)
    while pending:
        statement = pending.pop(0)
        if isinstance(statement, Separate):
            continue
        inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
        if inner:
            pending = [*inner, *pending]
        else:
            yield statement
