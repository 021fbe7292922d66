"""Modules that hold nothing to train: what they compute without gradients is no evaluation of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref


class Bare:
    """Answers which modules have no parameters, nor a model beside their parts."""

    def __init__(self) -> None:
        import torch

        self._module = torch.nn.Module
        self._compiled = torch.jit.ScriptModule  # where a frozen one's parameters are gone
        self._known: dict[int, ref[Any]] = {}

    def is_bare(self, module: Any) -> bool:
        """Whether a module has nothing that can be trained, or was, nor a model beside its parts: what is
        kept in a list, `self.teacher = [teacher]`, is none of them."""
        known = self._known.get(id(module))
        if known is not None and known() is module:
            return True
        if next(module.parameters(), None) is not None:
            return False
        for part in module.modules():
            if isinstance(part, self._compiled):
                return False
            if self.any_module(held for name, held in vars(part).items() if name != "_modules"):
                return False
        self._known[id(module)] = ref(module)
        return True

    def any_module(self, things: Iterable[Any]) -> bool:
        """Whether one of some things is a module, or a plain list, tuple or dictionary with one."""
        return any(isinstance(each, self._module) for thing in things for each in _several(thing))


def _several(thing: Any) -> Iterable[Any]:
    """Returns what a plain list, tuple or dictionary holds, or else the thing alone."""
    if type(thing) is dict:
        return thing.values()
    return thing if type(thing) in (list, tuple) else (thing,)
