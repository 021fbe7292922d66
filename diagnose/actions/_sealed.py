"""Whether gradients get into a model's call, and out of it, only where `_boundary` sees them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import nn

from diagnose.actions._careful import in_short
from diagnose.actions._module_hooks import FORWARD, hooks_of
from diagnose.actions._nested import differentiable, tensors
from diagnose.actions._shadow_step import Shadow
from diagnose.actions._untouched import CONTAINERS, CannotCheck
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job

MARK = "diagnose: in the graph of a call"
"""Key in the metadata of the graph's nodes."""


def refuse_unsealed(job: Job, model: nn.Module) -> None:
    """Raises `CannotApply` if a gradient can come into a call past its outputs, or has to leave it for a
    tensor that is neither a parameter nor an input.

    Makes the latest call again, beside the training.
    """
    if any(hooks_of(model, FORWARD)):
        raise CannotApply("the model has forward hooks, which may keep what a call computes inside")
    try:
        with job.unmeasured():
            shadow = Shadow(job, model)
            shadow.rehearse()
            _refuse_unsealed(shadow)
    except (CannotApply, torch.OutOfMemoryError):
        raise
    except CannotCheck as error:
        raise CannotApply(str(error)) from error
    except Exception as error:  # the script's own code, called where the script does not call it
        raise CannotApply(f"the model cannot be called twice: {in_short(error)}") from error


def _refuse_unsealed(shadow: Shadow) -> None:
    with shadow.beside():
        marks = _marks(shadow)
        for path, module in shadow.inner.named_modules():
            for name, value in vars(module).items():
                if any(tensor.grad_fn is not None for tensor in _held(value)):
                    where = f"{path}.{name}".strip(".")
                    raise CannotApply(f"{where} of the model holds a tensor that has a gradient")
        if _is_alive(marks):
            raise CannotApply("something keeps what a call of the model computes inside")


class _Mark:
    """Lives as long as the node that it is noted on."""


def _marks(shadow: Shadow) -> list[ref[_Mark]]:
    """Calls the model and lets go of what it returns; tells of each node of the graph whether it lives."""
    inputs = shadow.copies()
    starts = {id(tensor) for tensor in [*shadow.inner.parameters(), *tensors(inputs)]}
    marks = []
    for node in _nodes(differentiable(shadow.called(inputs))):
        leaf = getattr(node, "variable", None)
        if leaf is None:
            mark = node.metadata[MARK] = _Mark()
            marks.append(ref(mark))
        elif id(leaf) not in starts:
            raise CannotApply("the model uses a tensor that takes a gradient and is none of its parameters")
    return marks


def _nodes(ends: Iterable[torch.Tensor]) -> Iterator[Any]:
    ahead = [end.grad_fn for end in ends if end.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                ahead.append(following)


def _held(value: Any) -> list[torch.Tensor]:
    """The tensors that an attribute is, or holds as a container."""
    items: Iterable[Any] = (value,)
    if type(value) in (*CONTAINERS, tuple):
        items = value.values() if isinstance(value, dict) else value
    return [each for each in items if isinstance(each, torch.Tensor)]


def _is_alive(marks: list[ref[_Mark]]) -> bool:
    if any(mark() is not None for mark in marks):
        gc.collect()  # a cycle may hold them
    return any(mark() is not None for mark in marks)
