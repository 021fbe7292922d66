"""The repeated blocks of a model: the layers of a transformer, the stages' blocks of a residual network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn

from diagnose.actions._routes import models_with_weights
from diagnose.core.job import Job

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""What holds blocks that come one after the other."""

Kind = tuple[Any, ...]
"""Blocks of one kind are of one class and have parameters of the same shapes: one graph does for all."""


def blocks(job: Job) -> dict[Kind, list[nn.Module]]:
    """Returns the blocks to compile by kind: repeated ones, or, where nothing repeats, whole models."""
    found: dict[Kind, list[nn.Module]] = defaultdict(list)
    for model in models_with_weights(job):
        inner = getattr(model, "module", model)
        for block in list(_repeated(inner)) or [inner]:
            if all(block is not known for known in found[kind_of(block)]):
                found[kind_of(block)].append(block)
    return dict(found)


def kind_of(block: nn.Module) -> Kind:
    """Returns what a block has in common with those that one graph does for."""
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in block.named_parameters())
    return type(block), shapes


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost blocks that repeat inside a module."""
    children = list(module.children())
    repeats = set()
    if isinstance(module, LISTS):
        classes = [type(child) for child in children]
        repeats = {cls for cls in classes if classes.count(cls) > 1}
    for child in children:
        if type(child) in repeats and _is_block(child):
            yield child
        else:
            yield from _repeated(child)


def _is_block(module: nn.Module) -> bool:
    """Whether a module does several things with weights; a single layer of torch's is fast as it is."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return bool(module._modules) and next(module.parameters(), None) is not None
