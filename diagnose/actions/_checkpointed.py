"""Lets modules forget their activations after the forward pass, and compute them again in the backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from diagnose.actions._blame import raised_by_us
from diagnose.actions._gone import entered, unless_gone
from diagnose.actions._module_hooks import FORWARD, hooks_of
from diagnose.actions._untouched import RandomState, random_numbers_again, untouched
from diagnose.actions.base import CannotApply

SLOT = "_compiled_call_impl"
"""Where torch looks for another way to call this one instance. Copies and pickles of a module leave it out,
so a copy made in the meantime computes as the script wrote it."""


@contextmanager
def checkpointed(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, calls of the modules in training keep their inputs only.

    A module with hooks of the script's, registered meanwhile, is called as ever: they would run again.

    Their second call sees the random numbers of the first, and what it does to buffers, such as counting a
    batch twice, is gone afterwards.
    """
    with ExitStack() as stack:
        entered(stack, map(_in_slot, modules))
        del modules
        yield


@contextmanager
def _in_slot(module: nn.Module) -> Iterator[None]:
    alive, hooks = ref(module), hooks_of(module, FORWARD)

    def call(*args: Any, **kwargs: Any) -> Any:
        module: Any = alive()  # it is being called
        original = module._call_impl
        again = None
        try:
            if torch.is_grad_enabled() and module.training and not any(hooks):
                again = _Again(module)
        except Exception as error:
            if not raised_by_us(error):
                raise
        if again is None:
            return original(*args, **kwargs)
        return checkpoint(
            original, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again), **kwargs
        )

    with ExitStack() as stack:
        stack.callback(unless_gone(_leave_slot, module, call))
        vars(module)[SLOT] = call
        del module
        yield


def _leave_slot(module: nn.Module, call: Any) -> None:
    if vars(module).get(SLOT) is call:
        del vars(module)[SLOT]


class _Again:
    """Surrounds each later call. Torch itself sees to its own generators only, not Python's nor NumPy's."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._random = RandomState(())
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        try:
            with ExitStack() as stack:
                stack.enter_context(random_numbers_again(()))
                stack.enter_context(untouched(self._module))
                self._random.restore()
                self._open.append(stack.pop_all())
        except Exception as error:
            if not raised_by_us(error):
                raise
            self._open.append(ExitStack())  # the script's backward pass outranks what a call leaves behind

    def __exit__(self, *exception: object) -> None:
        self._open.pop().close()


def refuse_unfit(module: nn.Module, name: str) -> None:
    """Raises `CannotApply` if a second call of the module would do more than the first."""
    if SLOT not in vars(nn.Module):
        raise CannotApply(f"this torch has no torch.nn.Module.{SLOT}")
    for part in module.modules():
        if vars(part).get(SLOT) is not None:
            raise CannotApply(f"{name} is compiled")
        if isinstance(part, torch.jit.ScriptModule):
            raise CannotApply(f"{name} is a TorchScript module")
    if any(hooks_of(module, FORWARD)):
        raise CannotApply(f"{name} has hooks of the script's, which a second call would run again")


def is_fit(module: nn.Module) -> bool:
    """Whether `refuse_unfit` has nothing against the module."""
    try:
        refuse_unfit(module, "")
    except CannotApply:
        return False
    return True
