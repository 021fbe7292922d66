"""What calling a function of the script does besides returning: `self.load()` may make the batch as
`x = load()` does, and `fill(x, rows)` too."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from diagnose.source.calling import bound, callee, calls_in, calls_of, is_call, parameters_of
from diagnose.source.kinds import Definition
from diagnose.source.names import last_name, names
from diagnose.source.reads_writes import REORDERS, closure, reads, writes
from diagnose.source.simulators import simulators_of
from diagnose.source.statements import nodes_of, nodes_within, statements_of

Attributes = dict[str, set[str]]
"""Attributes, `self.rows`, and the classes whose objects have them."""

VALUES = {"tolist", "item", "numpy"}
"""Methods that give values of a tensor."""

WEIGHTS = {"parameters", "named_parameters", "weight"}
"""Names in a statement that goes over a model's weights, or reads them."""


class Effects:
    """Answers what a statement assigns, by itself and through the functions that it calls.

    Functions are known by their names alone: two of one name do what either does.

    Attributes:
        simulators: Functions that may say what an environment answers.
    """

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.functions: defaultdict[str, list[tuple[str, Definition]]] = defaultdict(list)
        self.simulators = frozenset[str]().union(*map(simulators_of, trees.values()))
        self._assigned: defaultdict[str, set[str]] = defaultdict(set)
        self._changed: defaultdict[str, set[str]] = defaultdict(set)
        self._computes: set[str] = set()
        self._modules: set[str] = set()
        self._made: set[str] = set()
        self._later: set[str] = set()
        self._classes = _classes_of(trees.values())
        self._callable: set[str] = set()
        self._read_by: dict[frozenset[str], Attributes] = {}
        self._set_by: dict[str, Attributes] = {}
        calls: defaultdict[str, set[str]] = defaultdict(set)
        modules_of: defaultdict[str, set[str]] = defaultdict(set)
        for file, tree in trees.items():
            for node in nodes_within(tree):
                if isinstance(node, Definition):
                    self.functions[node.name].append((file, node))
        called_as = self.functions.get("__call__", ())
        callable_classes = {each for _, f in called_as for each in self._classes.get(id(f), ())}
        for tree in trees.values() if callable_classes else ():
            self._callable.update(_objects_of(callable_classes, tree))
        for name, found in self.functions.items():
            for _, function in found:
                statements = list(statements_of(function))
                own = {each for s in statements for each in writes(s) if each.startswith("self.")}
                if name == "__init__":
                    self._made |= own
                    made = {each for s in statements if _makes_module(s) for each in writes(s)}
                    self._modules |= made
                    for each in self._classes.get(id(function), ()):
                        modules_of[each] |= made
                    continue
                self._later |= set().union(*(writes(s) for s in statements if not _reorders(s)))
                self._assigned[name] |= own
                self._changed[name] |= _changed_in_place(function, statements)
                for each, base in (called for s in statements for called in methods_called(s)):
                    calls[name] |= {each} if base == "self" else set()
        for name, found in self.functions.items():
            if all(_uses(function, self._modules_in(function, modules_of)) for _, function in found):
                self._computes.add(name)
        grew = True
        while grew:
            before = len(self._computes) + sum(map(len, self._assigned.values()))
            for name, called in calls.items():
                self._assigned[name].update(*(self._assigned.get(each, ()) for each in called))
                if called & self._computes and len(self.functions[name]) == 1:
                    self._computes.add(name)
            grew = len(self._computes) + sum(map(len, self._assigned.values())) > before

    def _modules_in(self, function: Definition, of_class: Mapping[str, set[str]]) -> set[str]:
        """Returns the attributes that hold modules in a method; any may in a function that is none."""
        classes = self._classes.get(id(function))
        return self._modules if classes is None else set().union(*(of_class[each] for each in classes))

    def writes(self, statement: ast.stmt) -> set[str]:
        """Returns the names, dotted names and containers that a statement assigns, or changes."""
        return writes(statement).union(*self.through(statement).values())

    def through(self, statement: ast.stmt) -> dict[str, set[str]]:
        """Returns what the functions that a statement calls assign or change, by their names."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for call in calls_of(statement):
            name, base = callee(call)
            if isinstance(call.func, ast.Attribute):
                found[name] |= rebased(self._assigned.get(name, ()), base)
            changed = self._changed.get(name)
            if changed:
                for parameter, value in self.bound(call):
                    if parameter in changed and isinstance(value, (ast.Name, ast.Attribute)):
                        found[name].add(ast.unparse(value))
        return found

    def bound(self, call: ast.Call) -> list[tuple[str, ast.expr]]:
        """Returns the parameters of a function of the script and what a call gives them; of any other
        function those that are named."""
        found = self.functions.get(last_name(call.func))
        return bound(call, found[0][1] if found else None)

    def computes(self, method: str) -> bool:
        """Whether a method of this name uses weights of a model, or modules that its object was made
        with."""
        return method in self._computes

    def runs(self, call: ast.Call) -> str | None:
        """Returns the name of the script's function that a call runs, `__call__` of an object that is no
        module; `None` where it is none of the script's."""
        name = last_name(call.func)
        if name in self.functions:
            return name
        return "__call__" if isinstance(call.func, ast.Name) and name in self._callable else None

    def leaves_tensors(self, function: str) -> bool:
        """Whether functions of this name take values out of tensors: `rows = x.tolist()`."""
        found = self.functions.get(function, ())
        return bool(found) and all(any(is_call(c, VALUES) for c in calls_in(each)) for _, each in found)

    def is_module(self, attribute: str) -> bool:
        """Whether objects are made with a module in this attribute, `self.net`."""
        return attribute in self._modules

    def read_by(self, methods: frozenset[str]) -> Attributes:
        """Returns what methods of such names read of their object, `self.rows`, by themselves and by the
        other methods of it that they call, and the classes that the object may be of."""
        if methods not in self._read_by:
            self._read_by[methods] = self._attributes(methods, reads)
        return self._read_by[methods]

    def set_by(self, method: str) -> Attributes:
        """Returns what a method assigns or changes of its object; otherwise as `read_by`."""
        if method not in self._set_by:
            self._set_by[method] = self._attributes([method], writes)
        return self._set_by[method]

    def _attributes(self, methods: Iterable[str], told: Callable[[ast.stmt], set[str]]) -> Attributes:
        found: Attributes = {}
        known: set[int] = set()
        pending: list[tuple[str, frozenset[str] | None]] = [(name, None) for name in methods]
        while pending:
            name, of = pending.pop()
            for _, function in self.functions.get(name, ()):
                classes = self._classes.get(id(function), frozenset())
                if id(function) in known or (of is not None and not of & classes):
                    continue
                known.add(id(function))
                for statement in statements_of(function):
                    for each in told(statement):
                        if each.startswith("self."):
                            found.setdefault(each.partition("[")[0], set()).update(classes)
                    pending += [(each, classes) for each, on in methods_called(statement) if on == "self"]
        return found

    def may_be_computed(self, attribute: str) -> bool:
        """Whether an attribute, `self.scale`, may hold what was computed in training: not if objects get it
        when they are made, and never again."""
        return attribute in self._later or attribute not in self._made


def _objects_of(classes: set[str], tree: ast.Module) -> Iterator[str]:
    """Yields the names that a file gives objects of such classes, or nothing in their place."""
    for node in nodes_within(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            value = node.value
            arms = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
            if any(isinstance(arm, ast.Call) and is_call(arm, classes) for arm in arms):
                yield last_name(node.targets[0])


def _classes_of(trees: Iterable[ast.Module]) -> dict[int, frozenset[str]]:
    """Returns, by the identity of each method, the names of the classes whose objects have it: its own, and
    those that are made of this."""
    nodes = [node for tree in trees for node in nodes_within(tree) if isinstance(node, ast.ClassDef)]
    made_of: defaultdict[str, set[str]] = defaultdict(set)
    for node in nodes:
        for base in node.bases:
            made_of[ast.unparse(base).rpartition(".")[2]].add(node.name)

    def more(held: set[str]) -> set[str]:
        return set().union(*(made_of.get(name, ()) for name in held))

    return {
        id(each): frozenset(closure({node.name}, more))
        for node in nodes
        for each in node.body
        if isinstance(each, Definition)
    }


def rebased(attributes: Iterable[str], base: str) -> set[str]:
    """Returns what a method calls `self.batch` by the name that its caller has for the object; nothing
    where that has none."""
    if not base.replace(".", "").isidentifier():
        return set()
    return {base + name.removeprefix("self") for name in attributes if name.startswith("self.")}


def methods_called(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yields the methods that a statement calls, and on what: `("load", "self")`."""
    for call in calls_of(statement):
        if isinstance(call.func, ast.Attribute):
            yield callee(call)


def _changed_in_place(function: Definition, statements: Iterable[ast.stmt]) -> set[str]:
    """Returns the parameters that a function changes: not those that it gives another value."""
    parameters = set(parameters_of(function))
    changed: set[str] = set()
    for statement in statements:
        stores = isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Subscript) for target in statement.targets
        )
        entries = {name.partition("[")[0] for name in writes(statement) if "[" in name}
        if isinstance(statement, ast.Expr) or entries or stores:
            changed |= (writes(statement) | entries) & parameters
    return changed


def _reorders(statement: ast.stmt) -> bool:
    """Whether a statement only brings what is there into another order: `random.shuffle(self.rows)`."""
    return isinstance(statement, ast.Expr) and is_call(statement.value, REORDERS)


def _uses(function: Definition, modules: set[str]) -> bool:
    """Whether a function uses weights of a model, or modules."""
    return any(reads(s) & modules or names(nodes_of(s)) & WEIGHTS for s in statements_of(function))


def _makes_module(statement: ast.stmt) -> bool:
    """Whether a statement makes a module or a weight of torch's: `nn.Linear(...)`, `Parameter(...)`."""
    called = map(callee, calls_of(statement))
    return any(base in ("nn", "torch.nn") or name == "Parameter" for name, base in called)
