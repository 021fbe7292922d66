"""With what the models are called, looked at in a few steps."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from diagnose.hooks._batch import first_tensor
from diagnose.hooks._frames import resolve, user_frame
from diagnose.hooks._padding import Padding, padding_in
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

LOOKED_AT = 5
"""Steps looked at."""

REMEMBERED = 4
"""Calls within which a second one with the same tensor belongs to the same step."""


@dataclass(slots=True)
class Call:
    """One outermost call of a model."""

    model: int
    has_grad: bool
    training: bool
    switches: tuple[object, ...]
    site: tuple[int, int] | None
    batch: weakref.ref[torch.Tensor] | None = None


class ModelCallsHook(Hook):
    """Looks at the inputs of the training models in a few steps, where the forward hook sees them."""

    requires = "torch.nn.modules.module"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""

        def inspect() -> None:
            look = _Look(recorder)
            recorder.on_forward, recorder.on_batch = look.see, look.note_loaded

        recorder.inspections.append(inspect)
        try:
            yield
        finally:
            recorder.inspections.remove(inspect)
            recorder.on_forward = recorder.on_batch = None


class _Look:
    """The few steps."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        models: list[Any] = [model for model in (r() for r in recorder.modules) if _has_parameters(model)]
        self._models = {id(model) for model in models}
        self._trained = {id(parameter) for model in models for parameter in model.parameters()}
        self._untrained = 0
        self._free = 0
        self._first_step = recorder.steps
        self._calls: deque[Call] = deque(maxlen=REMEMBERED)
        self._repeats = {False: 0, True: 0}  # by whether the call had gradients
        self._site: tuple[int, int] | None = None
        self._padding: list[Padding] = []
        self._loaded: list[Padding] = []
        self._batch_size: int | None = None
        self._autocast: str | None = None

    def see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model is about to be called; after the last of the steps, tells what was seen and goes."""
        if self._recorder.steps - self._first_step >= LOOKED_AT:
            self._recorder.on_forward = self._recorder.on_batch = None
            self._tell()
        elif id(module) in self._models:
            site = user_frame(sys._getframe(1))
            call = Call(id(module), torch.is_grad_enabled(), module.training, _switches(module), site)
            self._calls.append(call)
            if call.has_grad:
                self._autocast = _autocast_dtype(next(module.parameters()).device.type)
            tensor = first_tensor(given := (*args, kwargs))
            repeated = tensor is not None and tensor.dim() > 0 and self._given(call, tensor, given)
            self._free += not (call.has_grad or repeated) and call.training
        elif not torch.is_grad_enabled() and self._is_another(module):
            self._untrained += 1

    def note_loaded(self, batch: Any) -> None:
        """A loader gave a batch: on a device nothing is asked of what the model gets of it."""
        padding = padding_in(batch)
        if padding is not None:
            self._loaded.append(padding)

    def _is_another(self, module: Any) -> bool:
        """Whether a module is a model, and has nothing of a trained one."""
        first = next(module.parameters(), None)
        return first is not None and id(first) not in self._trained

    def _given(self, call: Call, tensor: torch.Tensor, given: Any) -> bool:
        """Notes what a call was given; returns whether the same model was just trained on that tensor."""
        before = [other for other in self._calls if other is not call]
        repeated = call.training and any(
            other.has_grad
            and (other.model, other.switches) == (call.model, call.switches)
            and other.batch
            and other.batch() is tensor
            for other in before
        )
        if repeated:
            self._repeats[call.has_grad] += 1
            self._site = call.site
        call.batch = weakref.ref(tensor)
        if call.has_grad:
            self._batch_size = len(tensor)
            padding = padding_in(given)
            if padding is not None:
                self._padding.append(padding)
        return repeated

    def _tell(self) -> None:
        file, line = resolve(*self._site)[:2] if self._site is not None else ("", 0)
        padded = self._padding or self._loaded
        tokens = sum(batch.tokens for batch in padded)
        self._recorder.facts["calls"] = {
            "num_steps": LOOKED_AT,
            "repeated": self._repeats[False] / LOOKED_AT,
            "repeated_with_grad": self._repeats[True] / LOOKED_AT,
            "untrained": self._untrained / LOOKED_AT,
            "free": self._free / LOOKED_AT,
            "padding_share": sum(batch.padding for batch in padded) / tokens if tokens else None,
            "overlong_share": sum(batch.overlong for batch in padded) / tokens if tokens else None,
            "padded_tokens": tokens / len(padded) if padded else None,
            "batch_size": self._batch_size,
            "autocast_dtype": self._autocast,
            "file": file,
            "line": line,
        }


def _switches(model: Any) -> tuple[object, ...]:
    """How the modules are switched: a model whose adapters are disabled for a moment is another model."""
    return tuple(
        value for module in model.modules() for value in vars(module).values() if type(value) in (bool, str)
    )


def _has_parameters(model: Any) -> bool:
    return model is not None and next(model.parameters(), None) is not None


def _autocast_dtype(device: str) -> str:
    """The type that autocast computes in on such a device, on this thread; empty where it is off."""
    if not torch.is_autocast_enabled(device):
        return ""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
