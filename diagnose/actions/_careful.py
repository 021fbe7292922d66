"""Calls of a model that compute in another way, and give that up rather than fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diagnose.actions._blame import raised_by_us
from diagnose.actions._nested import tensors
from diagnose.actions._untouched import RandomState, put_back
from diagnose.actions.base import CannotApply
from diagnose.core.job import Route
from diagnose.hooks._signals import from_signal_handler

MAX_SIGNATURES = 32
"""Kinds of input before whose first call the state is kept. Keeping it copies every buffer; a model that
has worked for so many kinds of input works for the next one."""

RECOVERABLE = (RuntimeError, TypeError, ValueError, NotImplementedError)
"""What torch raises where an operation does not know a layout or a type."""


MAX_MESSAGE = 160
"""Characters of an exception's message: torch's go on for pages."""


class Failure:
    """Whether a change has failed in use, for all the models of one action.

    Attributes:
        reason: Why it was given up; empty while it works.
    """

    def __init__(self) -> None:
        self.reason = ""

    def refuse_again(self) -> None:
        """Raises `CannotApply` if the change was given up before."""
        if self.reason:
            raise CannotApply(self.reason)


class Careful:
    """A route that goes through another one while that works.

    When the other one raises, the model is called once more as the script wrote it, with random number
    generators and buffers as they were; an error of the script's own is then raised by that call. Ever
    after, the change is off. Memory that runs out, what torch never raises, and what a signal handler
    raises is the script's at once, unless it comes from our own lines.

    Args:
        change: Calls the model in another way.
        failure: Where the reason goes.
        undo: Called before the second call.
        everywhere: Whether the model goes through it without gradients, too: see `core.job.Route`.
    """

    def __init__(
        self,
        change: Route,
        failure: Failure,
        undo: Callable[[], None] = lambda: None,
        *,
        everywhere: bool = False,
    ) -> None:
        self.everywhere = everywhere
        self._change = change
        self._failure = failure
        self._undo = undo
        self._known: set[Any] = set()

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._failure.reason:
            return call(*args, **kwargs)
        restore = _nothing
        try:
            restore = self._restorer(args, kwargs)
            return self._change(call, args, kwargs)
        except Exception as error:
            if from_signal_handler(error.__traceback__):
                raise  # the script's own
            lasting = isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RECOVERABLE)
            if lasting and not raised_by_us(error):
                raise
            self._failure.reason = f"it failed in use: {in_short(error)}"
        self._undo()
        restore()
        return call(*args, **kwargs)

    def _restorer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        """Returns what puts the state back that a forward pass changes."""
        if len(self._known) >= MAX_SIGNATURES:
            return _nothing
        signature = tuple((tensor.shape, tensor.dtype) for tensor in tensors((args[1:], kwargs)))
        if signature in self._known:
            return _nothing
        self._known.add(signature)
        return state_restorer(args[0])


def _nothing() -> None:
    """Restores nothing: a model that works for inputs of a kind goes on working for them."""


def state_restorer(model: torch.nn.Module) -> Callable[[], None]:
    """Keeps the buffers of a model and the state of all random number generators; returns what puts them
    back."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    random = RandomState(torch.device("cuda", gpu) for gpu in gpus)

    def restore() -> None:
        with torch.no_grad():
            for buffer, before in buffers:
                put_back(buffer, before)
        random.restore()

    return restore


def in_short(error: Exception) -> str:
    """An exception in one line: its class, and how its message begins."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_MESSAGE]}"
