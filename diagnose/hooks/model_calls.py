"""With what the models are called, looked at in a few steps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from diagnose.hooks._frames import resolve, user_frame
from diagnose.hooks._padding import padding_of
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

LOOKED_AT = 5
"""Steps looked at. The first is cut at its beginning, and only tells of its batch."""


@dataclass(slots=True)
class Call:
    """One outermost call of a model."""

    model: int
    has_grad: bool
    site: tuple[int, int] | None
    batch: weakref.ref[torch.Tensor] | None = None


class ModelCallsHook(Hook):
    """Looks at the inputs of the training models in a few steps, with a module hook that then goes.

    Not where `torch.compile` is at work: the hook would be part of what it compiles.
    """

    requires = "torch.nn.modules.module"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        look: _Look | None = None

        def inspect() -> None:
            nonlocal look
            if not _compiles():
                look = _Look(recorder)

        recorder.inspections.append(inspect)
        try:
            yield
        finally:
            recorder.inspections.remove(inspect)
            if look is not None:
                look.close()


def _compiles() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


class _Look:
    """The few steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._models = {id(model) for model in (r() for r in recorder.modules) if _has_parameters(model)}
        self._first_step = self._step = recorder.steps
        self._calls: list[Call] = []
        self._repeats: list[int] = []
        self._repeats_with_grad: list[int] = []
        self._site: tuple[int, int] | None = None
        self._padding: list[tuple[int, int]] = []
        self._batch_sizes: list[int] = []
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(self._before)

    def close(self) -> None:
        """Takes the hook out."""
        self._handle.remove()

    def _before(self, module: Any, args: tuple[Any, ...]) -> None:
        if self._recorder.on_training_thread():
            self._recorder.guarded(self._see, module, args)

    def _see(self, module: Any, args: tuple[Any, ...]) -> None:
        if self._recorder.steps != self._step:
            self._end_step()
            if self._step - self._first_step >= LOOKED_AT or _compiles():
                self.close()
                return
        if id(module) in self._models:
            self._calls.append(Call(id(module), torch.is_grad_enabled(), user_frame(sys._getframe(3))))
        elif not self._calls or self._calls[-1].batch is not None:
            return  # inside a call whose input is known
        # Keyword arguments are not shown to the hook: the first module inside that is given a tensor is.
        tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        if tensor is None or not tensor.dim():
            return
        call = self._calls[-1]
        call.batch = weakref.ref(tensor)
        if call.has_grad:
            self._batch_sizes.append(len(tensor))
            padding = padding_of(tensor)
            if padding is not None:
                self._padding.append(padding)

    def _end_step(self) -> None:
        calls, self._calls = self._calls, []
        first = self._step == self._first_step
        self._step = self._recorder.steps
        if first:
            return
        trained = [call for call in calls if call.has_grad]
        free, again = 0, 0
        for index, call in enumerate(calls):
            others = calls[:index] if call.has_grad else trained
            if any(call is not other and _same_input(call, other) for other in others):
                free += not call.has_grad
                again += call.has_grad
                self._site = call.site
        self._repeats.append(free)
        self._repeats_with_grad.append(again)
        file, line = resolve(*self._site)[:2] if self._site is not None else ("", 0)
        tokens = sum(tokens for _, tokens in self._padding)
        self._recorder.facts["calls"] = {
            "num_steps": len(self._repeats),
            "repeated": sum(self._repeats) / len(self._repeats),
            "repeated_with_grad": sum(self._repeats_with_grad) / len(self._repeats_with_grad),
            "padding_share": sum(pad for pad, _ in self._padding) / tokens if tokens else None,
            "batch_size": self._batch_sizes[-1] if self._batch_sizes else None,
            "file": file,
            "line": line,
        }


def _has_parameters(model: Any) -> bool:
    return model is not None and next(model.parameters(), None) is not None


def _same_input(one: Call, other: Call) -> bool:
    """Whether both were given the very same tensor; one that is gone cannot be compared."""
    if one.batch is None or other.batch is None or one.model != other.model:
        return False
    tensor = one.batch()
    return tensor is not None and tensor is other.batch()
