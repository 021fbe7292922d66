"""What a function returns, item by item, and which of the items its callers want.

`return loss, hits` gives a loss and a score. Which is which is known to who called: only one of the two
gets to a backward.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from diagnose.source.calling import callee, is_call
from diagnose.source.names import last_name, names_in, words
from diagnose.source.parts import Needs, Part
from diagnose.source.reads_writes import reads_in, writes
from diagnose.source.statements import all_lines, header_lines, nodes_of

WHOLE = ""
"""The key of what is returned as one thing."""

ANY = "*"
"""Asked for instead of keys: which of the items it is cannot be told."""

READ = {"item", "tolist", "numpy"}
"""Names in an item that is no longer a tensor."""

LOSS = {"loss", "losses"}
"""Words in the keys of losses, where it is a library that asks for them."""


@dataclass(frozen=True, slots=True)
class Item:
    """One of the things that a function returns.

    Attributes:
        key: Its place, or its key.
        value: It.
        reads: The names that it is made of.
        at: The statement in which it stands: the `return`, or what gives what is returned its name.
    """

    key: str
    value: ast.expr
    reads: frozenset[str]
    at: ast.stmt


def items_of(part: Part, statement: ast.Return) -> list[Item]:
    """Returns what a statement of a function returns."""
    value = statement.value
    return list(_items(part, value, statement)) if value is not None else []


def _items(part: Part, value: ast.expr, at: ast.stmt) -> Iterator[Item]:
    if isinstance(value, ast.IfExp):
        yield from _items(part, value.body, at)
        yield from _items(part, value.orelse, at)
        return
    literal = _literal(part, value) if isinstance(value, ast.Name) else None
    if literal is not None and isinstance(value, ast.Name):
        yield from _items(part, literal.value, literal)
        for name in sorted(part.writers):
            container, _, key = name.removesuffix("]").partition("[")
            if container == value.id and key and key != ANY:
                yield Item(key, value, frozenset((value.id, name)), at)
        return
    keyed = _keyed(value)
    for key, item in keyed if keyed is not None else [(WHOLE, value)]:
        yield Item(key, item, frozenset(reads_in(item)), at)


def _keyed(value: ast.expr) -> list[tuple[str, ast.expr]] | None:
    """Returns what a tuple or a dictionary that is written out holds, by place or key; `None` of others."""
    if isinstance(value, (ast.Tuple, ast.List)):
        if any(isinstance(each, ast.Starred) for each in value.elts):
            return None
        return [(str(place), each) for place, each in enumerate(value.elts)]
    if isinstance(value, ast.Dict):
        keys = [key.value for key in value.keys if isinstance(key, ast.Constant)]
        if len(keys) < len(value.values):
            return None
        return [(str(key), each) for key, each in zip(keys, value.values, strict=True)]
    if isinstance(value, ast.Call) and callee(value) == ("dict", "") and not value.args:
        keyed = [(keyword.arg, keyword.value) for keyword in value.keywords if keyword.arg is not None]
        return keyed if len(keyed) == len(value.keywords) else None
    return None


def _literal(part: Part, value: ast.Name) -> ast.Assign | None:
    """Returns the statement that alone gives a name its value, if that is written out: `out = {...}`."""
    found = part.writers.get(value.id, [])
    more = f"{value.id}.update"
    if len(found) != 1 or any(more in part.reads[id(s)] for s in part.statements):
        return None
    (only,) = found
    if not isinstance(only, ast.Assign) or not all(isinstance(each, ast.Name) for each in only.targets):
        return None
    return only if _keyed(only.value) is not None else None


def wanted_items(
    part: Part, items: Sequence[Item], asked: Collection[str], fed: Collection[str], computed: set[str]
) -> list[Item]:
    """Returns those items that a loss or a batch is made of; where callers do not show which, all that may
    be.

    Args:
        asked: What its callers make losses of.
        fed: What its callers make batches of.
        computed: Names that hold what models have computed.
    """
    keys = {*asked, *fed}
    if asked and ANY not in keys:
        chosen = [_narrowed(item, keys) for item in items if item.key in keys or item.key == WHOLE]
        if chosen:
            return chosen
    kept = [item for item in items if not _is_read(item)]
    if len(items) == 1:
        return kept
    trained = [
        item
        for item in kept
        if item.key in fed or id(item.at) in part.hooked or part.has_gradients(item.value)
    ]
    if not trained:
        return kept if kept == list(items) else []
    return [item for item in kept if item in trained or not item.reads & computed]


def lost_items(items: Sequence[Item], backs: Collection[str] | None) -> list[Item]:
    """Returns those items that are the loss, by what callers call `backward` on or return in turn: `backs`,
    `None` where no caller was seen."""
    if backs is not None and ANY not in backs:
        keys = {*backs, WHOLE} if backs else set()
        return [_narrowed(item, backs) for item in items if item.key in keys]
    if any(item.key.isdigit() for item in items):
        return []
    return [item for item in items if words(item.key) & LOSS] or list(items)


def first_items(items: Sequence[Item], asked: Collection[str]) -> list[Item]:
    """Returns those items that a loss is made of; the first, or those that are called so, where callers do
    not show which."""
    chosen = [item for item in items if item.key in asked]
    if chosen and ANY not in asked:
        return chosen
    if any(item.key.isdigit() for item in items):
        return [item for item in items if item.key in ("0", WHOLE)]
    return [item for item in items if words(item.key) & LOSS] or list(items)


def _narrowed(item: Item, asked: Collection[str]) -> Item:
    """Returns of a container that is returned as a whole what is asked for of it."""
    if item.key != WHOLE or not isinstance(item.value, ast.Name) or {ANY, WHOLE} & set(asked):
        return item
    name = item.value.id
    return Item(item.key, item.value, frozenset((name, *(f"{name}[{key}]" for key in asked))), item.at)


def _is_read(item: Item) -> bool:
    return bool(names_in(item.value) & READ)


def lines_of(items: Sequence[Item], chosen: Sequence[Item]) -> set[int]:
    """Returns the lines of those of the items that are chosen, without those of what else is computed
    there."""
    works = {line for item in items if item in chosen for line in _lines(item)}
    aside = {line for item in items if item not in chosen for line in _lines(item)}
    return {line for item in chosen for line in all_lines(item.at)} - (aside - works)


def _lines(item: Item) -> range:
    """Returns the lines on which an item is computed; none if it only names what is."""
    if isinstance(item.value, (ast.Name, ast.Attribute, ast.Constant)):
        return range(0)
    return all_lines(item.value)


# -- what callers want


def given(part: Part, statement: ast.stmt) -> Iterator[tuple[str, str, set[str]]]:
    """Yields which functions of the script a statement calls, and the names that it gives what they return:
    `WHOLE`, or item by item; `ANY` where it uses it in another way."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)) else None
    key = WHOLE
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        key, value = str(value.slice.value), value.value
    value = value.value if isinstance(value, ast.Await) else value
    for node in nodes_of(statement):
        if not is_call(node, part.effects.functions):
            continue
        name = last_name(node.func)
        if node is not value:
            yield name, ANY, writes(statement)
        elif isinstance(statement, ast.Expr):
            continue
        elif len(targets) == 1 and isinstance(targets[0], (ast.Tuple, ast.List)) and key == WHOLE:
            several = targets[0].elts
            if any(isinstance(each, ast.Starred) for each in several):
                yield name, ANY, writes(statement)
                continue
            for place, each in enumerate(several):
                yield name, str(place), writes(ast.Assign(targets=[each], value=node))
        else:
            yield name, key, writes(statement)


def asked_of(part: Part, readers: Needs, models: Collection[str]) -> dict[str, set[str]]:
    """Returns by the names of functions what a function uses of that which they return to it.

    Args:
        readers: Those of the function's statements for which it counts.
        models: Functions that call models. They count where that was seen: the `step` of an environment is
            not that of a trainer.
    """
    asked: dict[str, set[str]] = {}
    if not readers:
        return asked
    reading = {id(reader) for reader, _ in readers}
    for statement in part.statements:
        leads = set().union(*(part.anchors.leads.get(line, ()) for line in header_lines(statement)))
        for name, key, targets in given(part, statement):
            if name in models and name not in leads:
                continue
            keys = asked.setdefault(name, set())
            if key == ANY and id(statement) in reading:
                keys.add(ANY)
            for target in targets:
                ways = set().union(*(_ways(part, statement, target, *reader) for reader in readers))
                if key == WHOLE:
                    keys |= ways
                elif ways:
                    keys.add(key)
    return asked


def _ways(part: Part, writer: ast.stmt, name: str, reader: ast.stmt, needed: Collection[str]) -> set[str]:
    """Returns by which keys a statement needs what another one has given a name; `ANY` if not by keys."""
    entries = {each for each in needed if each.startswith(f"{name}[")}
    if not (name in needed or entries) or not part.blocks.reaches(writer, name, reader):
        return set()
    keys = {each[len(name) + 1 : -1] for each in entries} - {ANY}
    if name not in needed or (keys and f"{name}[*]" not in needed):
        return keys
    uses = [node for node in nodes_of(reader) if isinstance(node, (ast.Name, ast.Attribute))]
    places = {
        str(node.slice.value)
        for node in nodes_of(reader)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, int)
        and ast.unparse(node.value) == name
    }
    plain = sum(ast.unparse(node) == name for node in uses) > len(places) or not places
    return keys | ({ANY} if plain else places)


def merged(into: dict[str, set[str]], more: Mapping[str, set[str]]) -> None:
    """Adds what one function wants of others to what the rest wants."""
    for name, keys in more.items():
        into[name] = into.get(name, set()) | keys
