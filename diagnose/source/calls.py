"""The call in the user's script that made an object, and the same call with arguments changed."""

from __future__ import annotations

import ast
from collections.abc import Container

from diagnose.source.calling import is_call
from diagnose.source.names import last_name
from diagnose.source.sources import Sources
from diagnose.source.statements import all_lines, nodes_within

MAX_LENGTH = 300
"""A longer call is no line to paste; the fix then names the argument alone."""

_SCHEDULE = (
    *("n_microbatches", "loss_fn", "args_chunk_spec", "kwargs_chunk_spec", "output_merge_spec"),
    "scale_grads",
)

BY_PLACE = {
    "DataLoader": (
        *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn"),
        *("pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    ),
    "ScheduleGPipe": ("stage", *_SCHEDULE),
    "Schedule1F1B": ("stage", *_SCHEDULE),
    "ScheduleInterleaved1F1B": ("stages", *_SCHEDULE, "backward_requires_autograd", "defer_pp_recv"),
}
"""Which argument stands at which place (torch/utils/data/dataloader.py and
torch/distributed/pipelining/schedules.py, torch 2.13)."""


def call_at(sources: Sources, file: str, line: int, name: str) -> str:
    """Returns the text of a call, on one line, or an empty text where it cannot be found.

    Args:
        file: The file; empty when unknown.
        line: A line that the call covers.
        name: What is called, such as `DataLoader`; `data.DataLoader` is found too, and what it was imported
            as. Where no call on the line has the name, nothing is.
    """
    tree = sources.tree(file) if file and line else None
    if tree is None:
        return ""
    known = {name, *aliases(tree, name)}
    calls = [node for node in nodes_within(tree) if is_call(node, known) and line in all_lines(node)]
    if not calls:
        return ""
    innermost = min(calls, key=lambda node: len(all_lines(node)))
    text = ast.unparse(innermost)
    return text if len(text) <= MAX_LENGTH else ""


def aliases(tree: ast.AST, name: str) -> set[str]:
    """Returns what a file calls a name that it imports: `DDP`."""
    imported = (
        alias for node in nodes_within(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    )
    return {alias.asname for alias in imported if alias.name == name and alias.asname}


def with_arguments(call: str, fallback: str, **arguments: str | float | bool | None) -> str:
    """Returns a call with arguments set by keyword; those it has already are changed where they stand.

    Args:
        call: The call's text, from `call_at`. One that takes `**options` may hold the argument there, so
            it is written over them: `**{**options, 'x': 1}`; of one that takes `*args` nothing is known.
        fallback: What is called where `call` is empty: `DataLoader` gives `DataLoader(..., x=1)`.
        arguments: Their new values. `None` takes the argument out; where `**options` may hold it, that
            cannot be written, and the call is as if it were not known.
    """
    node = ast.parse(call or "f()", mode="eval").body
    assert isinstance(node, ast.Call)
    has_rest = any(isinstance(given, ast.Starred) for given in node.args)
    _name_from_first(node, arguments)
    unpacked = [keyword.value for keyword in node.keywords if keyword.arg is None]
    keywords = {keyword.arg: keyword for keyword in node.keywords if keyword.arg is not None}
    unknown = has_rest or (
        unpacked and any(value is None and name not in keywords for name, value in arguments.items())
    )
    if not call or unknown:
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)
        return f"{fallback}(..., {shown})"
    added: dict[str, ast.expr] = {}
    for name, value in arguments.items():
        if value is None:
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != name]
        elif name in keywords:
            keywords[name].value = ast.Constant(value)
        else:
            added[name] = ast.Constant(value)
    if added and unpacked:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg is not None]
        options = ast.Dict(
            keys=[*(None for _ in unpacked), *(ast.Constant(name) for name in added)],
            values=[*unpacked, *added.values()],
        )
        node.keywords.append(ast.keyword(arg=None, value=options))
    else:
        node.keywords += [ast.keyword(arg=name, value=value) for name, value in added.items()]
    return ast.unparse(node)


def _name_from_first(call: ast.Call, changed: Container[str]) -> None:
    """Gives the arguments that stand by place their names, from the first on that is to change."""
    places = BY_PLACE.get(last_name(call.func), ())[: len(call.args)]
    first = next((at for at, name in enumerate(places) if name in changed), len(call.args))
    named = zip(places[first:], call.args[first:], strict=True)
    call.keywords[:0] = [ast.keyword(arg=name, value=value) for name, value in named]
    del call.args[first:]
