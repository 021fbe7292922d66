"""Which names of a file hold a model's weights, their gradients, or copies of them that were kept.

A loop over `self.kept` goes over weights as one over `model.parameters()` does, where something assigned
them, or a call gave them to the function that the loop is in.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from diagnose.source.calling import TRAINS, bound, called_in, callee, calls_in, is_call, keyword_of
from diagnose.source.files import aliases_of, origin
from diagnose.source.kinds import Definition, ForLoop, Function, Loop
from diagnose.source.names import last_name, names, names_in, words_of
from diagnose.source.reads_writes import grow, writes
from diagnose.source.statements import (
    element_of,
    is_operation,
    nodes_of,
    nodes_within,
    statements_of,
    targets_of,
)
from diagnose.source.weight_functions import defined, hooked, scoped, turned
from diagnose.source.weight_words import ASKED, GRADIENTS, KEEPS, PASS_ON, RESHAPES, Kind, Scope

MEASURES = {"square", "pow", "sum"}
"""What is made of a gradient, besides its norm, by which it is clipped."""

GIVES_GRADIENTS = {
    *(("autograd", "grad"), ("func", "grad"), ("func", "grad_and_value")),
    *(("functorch", "grad"), ("functorch", "grad_and_value")),
}
"""Package and name of what returns gradients, or a function that does."""


class Weights:
    """Answers which names of a file hold weights."""

    def __init__(self, tree: ast.Module) -> None:
        self._held: dict[tuple[Scope, Kind], set[str]] = {}
        self._tree = tree
        self._aliases = aliases_of(tree)
        self._hooked: dict[Definition, str] = {}
        self._norms: dict[Function | None, frozenset[str]] = {}
        found = [
            (scope, node)
            for scope, node in scoped(tree)
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Call))
        ]
        # Of a script that trains by methods, what it asks `torch.autograd.grad` for serves a loss, as the
        # slopes of an inner step do, or is not known.
        self._is_functional = not any(
            is_call(node, TRAINS) and isinstance(node.func, ast.Attribute) for _, node in found
        )
        functions = {
            inside if function.name == "__init__" else function.name: function
            for function, inside in defined(tree)
        }
        for scope, node in scoped(tree):
            if isinstance(node, ForLoop) and _asks_gradients(node):
                self._keep([_gone_over(node.iter)], "weights", scope)
        grew = True
        while grew:
            before = self._count()
            for scope, node in found:
                if isinstance(node, ast.Call):
                    function = functions.get(last_name(node.func))
                    if function is not None:
                        self._give(node, scope, function)
                elif node.value is not None:
                    self._keep(targets_of(node), self._kind(node.value, scope), scope)
            grew = self._count() > before
        self._find_hooks(functions)
        self._turned = turned(tree, self._kind)
        for function, given in self._turned.items():
            measured = {name for name, kind in given.items() if kind == "gradients"}
            self._held.setdefault((function, "gradients"), set()).update(measured)
        self._measuring = {
            function.name
            for function, given in self._turned.items()
            if "gradients" in given.values() or (given and "grad" in names_in(function))
            if _measure({last_name(call.func) for call in calls_in(function)})
        }

    def of(self, function: Function | None, kind: Kind = "weights") -> frozenset[str]:
        """Returns the names and attributes that hold weights, or gradients, in a function; `None` is the
        module."""
        own = self._held.get((function, kind), ()) if isinstance(function, Definition) else ()
        return frozenset(self._held.get((None, kind), set()).union(own))

    def hooked(self, function: Function | None) -> frozenset[str]:
        """Returns the parameter of a function that a hook of each weight calls; nothing for any other."""
        found = self._hooked.get(function) if isinstance(function, Definition) else None
        return frozenset((found,) if found else ())

    def turned(self, function: Function | None) -> frozenset[str]:
        """Returns the parameters of a function that loops over weights call with one, or its gradient,
        after the other, and nothing else in the file calls."""
        return frozenset(self._turned.get(function, ()) if isinstance(function, Definition) else ())

    def norms(self, function: Function | None) -> frozenset[str]:
        """Returns the names that are made of norms of gradients in a function; `None` is the module."""
        if function not in self._norms:
            statements = list(statements_of(self._tree if function is None else function))
            held: set[str] = set()
            gradients = self.of(function, "gradients")
            turns = {
                name
                for loop in statements
                if isinstance(loop, ForLoop)
                for turn, source in turns_of(loop)
                if names_in(source) & (GRADIENTS | gradients)
                for name in names([turn])
            }
            for statement in statements:
                used, called = names(nodes_of(statement)), called_in(statement)
                measures = _measure(called)
                of_gradients = words_of(used) & GRADIENTS or used & (gradients | turns)
                if (measures and of_gradients) or called & self._measuring:
                    held |= writes(statement)
            grow(held, statements)
            self._norms[function] = frozenset(held)
        return self._norms[function]

    def _count(self) -> int:
        return sum(map(len, self._held.values()))

    def _keep(self, targets: Iterable[ast.expr], kind: Kind | None, scope: Scope) -> None:
        for target in targets if kind else ():
            if isinstance(target, (ast.Tuple, ast.List)):
                self._keep(target.elts, kind, scope)
            elif kind and isinstance(target, ast.Attribute):
                self._held.setdefault((None, kind), set()).add(target.attr)
            elif kind and isinstance(target, ast.Name):
                self._held.setdefault((scope, kind), set()).add(target.id)

    def _give(self, call: ast.Call, scope: Scope, function: Definition) -> None:
        """Takes in what a call gives to a function of the file."""
        for name, value in bound(call, function):
            kind = self._kind(value, scope)
            if kind:
                self._held.setdefault((function, kind), set()).add(name)

    def _find_hooks(self, functions: dict[str, Definition]) -> None:
        """Finds the functions that hooks of all weights call: `for p in weights: p.register_hook(clip)`."""
        weights = set().union(*(held for (_, kind), held in self._held.items() if kind == "weights"))
        for function, parameter, method in hooked(self._tree, functions, weights):
            self._hooked[function] = parameter
            if method == "register_hook":
                self._held.setdefault((function, "gradients"), set()).add(parameter)

    def _kind(self, value: ast.expr, scope: Scope) -> Kind | None:
        """Returns what an expression holds; `None` of what was counted or made of weights."""
        if isinstance(value, ast.Attribute) and value.attr in ("grad", "data"):
            return "gradients" if value.attr == "grad" else self._kind(value.value, scope)
        if isinstance(value, (ast.Name, ast.Attribute)):
            name = last_name(value)
            within = scope if isinstance(value, ast.Name) else None
            kinds: tuple[Kind, ...] = ("weights", "gradients")
            return next((kind for kind in kinds if name in self.of(within, kind)), None)
        if isinstance(value, (ast.Subscript, ast.Starred)):
            return self._kind(value.value, scope)
        if isinstance(value, (ast.Tuple, ast.List)):
            return self._first(value.elts, scope)
        if isinstance(value, ast.BinOp):
            return self._kind(value.left, scope) if isinstance(value.op, ast.Add) else None
        if isinstance(value, (ast.ListComp, ast.GeneratorExp, ast.DictComp)):
            made = list(ast.walk(element_of(value)))
            if any(isinstance(node, ast.Call) and not is_call(node, KEEPS) for node in made):
                return None
            kind = self._first((each.iter for each in value.generators), scope)
            if self._is_functional and kind == "gradients" and "grad" not in names(made):
                # `[p - lr * g for p, g in zip(unknown, grads)]`
                return None if any(is_operation(node, ast.Sub) for node in made) else kind
            return "gradients" if kind and "grad" in names(made) else kind
        if not isinstance(value, ast.Call):
            return None
        name = last_name(value.func)
        if name in ASKED:
            return "weights"
        if name in KEEPS | RESHAPES and isinstance(value.func, ast.Attribute):
            kind = self._kind(value.func.value, scope)
            if kind == "gradients":  # a copy of one weight is not what a loop goes over
                return kind
        if self._gives_gradients(value, scope):
            return "gradients"
        if name not in PASS_ON:
            return None
        base = [value.func.value] if isinstance(value.func, ast.Attribute) else []
        return self._first((*value.args, *base), scope)

    def _gives_gradients(self, call: ast.Call, scope: Scope) -> bool:
        """Whether a call returns gradients, or a function that does, in a script that trains by nothing
        else: `torch.autograd.grad(loss, params)`, `torch.func.grad(loss_of)(params, x)`."""
        if not self._is_functional or keyword_of(call, "create_graph"):
            return False
        if origin(call, self._aliases) in GIVES_GRADIENTS:
            return True
        called = call.func
        return isinstance(called, (ast.Name, ast.Call)) and self._kind(called, scope) == "gradients"

    def _first(self, values: Iterable[ast.expr], scope: Scope) -> Kind | None:
        return next(filter(None, (self._kind(each, scope) for each in values)), None)


def _asks_gradients(loop: ForLoop) -> bool:
    """Whether a loop asks what it goes over for its gradient: `for w in tamed: w.grad.clamp_(-1, 1)`."""
    return isinstance(loop.target, ast.Name) and any(
        isinstance(node, ast.Attribute)
        and node.attr == "grad"
        and isinstance(node.value, ast.Name)
        and node.value.id == loop.target.id
        for statement in loop.body
        for node in ast.walk(statement)
    )


def _gone_over(source: ast.expr) -> ast.expr:
    """Returns what a loop goes over, or a part of which: `tamed` of `tamed[1:]`."""
    while isinstance(source, ast.Subscript):
        source = source.value
    return source


def _measure(called: set[str]) -> bool:
    """Whether one of such functions measures what it is given."""
    return bool(called & MEASURES or "norm" in words_of(called))


def turns_of(loop: Loop) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields the variables of a loop and what each goes over; of a `zip` one by one."""
    if isinstance(loop, ast.While):
        return
    zipped = isinstance(loop.iter, ast.Call) and callee(loop.iter) == ("zip", "")
    if zipped and isinstance(loop.iter, ast.Call) and isinstance(loop.target, ast.Tuple):
        yield from zip(loop.target.elts, loop.iter.args, strict=False)
    else:
        yield loop.target, loop.iter


def averaged_at_once(tree: ast.Module) -> frozenset[str]:
    """Returns the names and attributes of a file that hold an average which torch updates in one call for
    all tensors: `AveragedModel(net, multi_avg_fn=...)`."""
    return frozenset(
        name
        for node in nodes_within(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if keyword_of(node.value, "multi_avg_fn")
        for name in names(node.targets)
    )
