"""What the training loss was in each step: the tensors that the script's backward passes began at."""

from __future__ import annotations

import functools
import statistics
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_dynamo_compiling

from diagnose.hooks.base import hidden, replaced, unseen

MOST_UNREAD = 1000
"""Steps whose loss is kept while nobody asks for it."""

Guarded = Callable[..., None]
"""Calls a function with arguments, and lets none of its errors through to the script."""


class Losses:
    """Notes the loss of each backward pass, and never waits for a device: what lies on one is copied to
    the host behind the work that computes it, and read when it has arrived.

    A loss that a `GradScaler` has scaled is noted as it was before. Of a backward pass that begins at no
    single number nothing is noted.

    Args:
        guarded: See `Guarded`.
        is_wanted: Whether somebody is going to ask after this step. Of others nothing is noted.

    Attributes:
        scalers: Scalers that have scaled a loss.
    """

    def __init__(self, guarded: Guarded, is_wanted: Callable[[], bool] = lambda: True) -> None:
        self.scalers: WeakSet[Any] = WeakSet()
        self._guarded = guarded
        self._is_wanted = is_wanted
        self._thread = get_ident()
        self._inside = False
        self._step: list[_Noted] = []
        self._unread: deque[list[_Noted]] = deque(maxlen=MOST_UNREAD)
        self._scaled: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes losses while open."""
        with (
            replaced(torch.autograd, "backward", self._noting),
            replaced(GradScaler, "scale", self._unscaling),
        ):
            yield

    def step_ended(self) -> list[float]:
        """A step has ended. Returns the mean loss of each step that is known by now and was not told
        before, in order."""
        if self._step:
            self._unread.append(self._step)
            self._step = []
        known = []
        while self._unread and all(noted.has_arrived() for noted in self._unread[0]):
            known.append(statistics.fmean(noted.value() for noted in self._unread.popleft()))
        return known

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            # Else it is a part of a backward pass, as of a checkpoint.
            outermost = not (self._inside or is_dynamo_compiling() or get_ident() != self._thread)
            if outermost and self._is_wanted():
                self._guarded(self._note, args[0] if args else kwargs.get("tensors"))
                self._inside = True
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                unseen(error)
                raise
            finally:
                if outermost:
                    self._inside = False

        return hidden(functools.wraps(original)(backward))

    def _unscaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            try:
                scaled = original(scaler, outputs)
            except BaseException as error:
                unseen(error)
                raise
            if get_ident() == self._thread:
                self._guarded(self._note_scaled, scaler, outputs, scaled)
            return scaled

        return hidden(functools.wraps(original)(scale))

    def _note_scaled(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        if isinstance(scaled, torch.Tensor):
            self.scalers.add(scaler)
            self._scaled = (weakref.ref(scaled), outputs.detach())

    def _note(self, roots: Any) -> None:
        for root in roots if isinstance(roots, list | tuple) else (roots,):
            if self._scaled is not None and self._scaled[0]() is root:
                root = self._scaled[1]
            if _is_readable(root):
                self._step.append(_Noted(root.detach()))
        self._scaled = None


def _is_readable(root: Any) -> bool:
    """Whether it is one number that can be had without asking other ranks or waiting."""
    if not isinstance(root, torch.Tensor) or hasattr(root, "_local_tensor"):
        return False
    if root.numel() != 1 or not root.is_floating_point():
        return False
    kind = root.device.type
    return kind == "cpu" or (kind == "cuda" and not torch.cuda.is_current_stream_capturing())


class _Noted:
    """One loss, on its way to the host."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._arrival: Any = None
        if loss.device.type == "cpu":
            self._host: torch.Tensor | None = None
            self._value = float(loss)
        else:
            # To pinned memory, in order on the stream; not by the method that hooks look at, as it is ours.
            self._host = torch._C.TensorBase.to(loss, "cpu", non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record(torch.cuda.current_stream(loss.device))

    def has_arrived(self) -> bool:
        """Asks, and does not wait."""
        if self._host is not None and self._arrival.query():
            self._value, self._host = float(self._host), None
        return self._host is None

    def value(self) -> float:
        """Returns it once it has arrived."""
        return self._value
