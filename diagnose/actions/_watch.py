"""Remembers how the script called its model last, so that the call can be made again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from diagnose.actions._blame import raised_by_us
from diagnose.actions._held import Held
from diagnose.actions._nested import differentiable, tensors
from diagnose.actions._untouched import CannotCheck
from diagnose.core.job import Job

Autocast = list[tuple[str, torch.dtype, bool]]


@dataclass(slots=True, kw_only=True)
class Call:
    """One outermost call of a model in training.

    Attributes:
        versions: Version counter of each tensor among the arguments, when the call began.
        autocast: The autocast contexts that the call was made in.
        differentiable: How many tensors of the output carry a gradient.
        gradients: What the loss sent back into them, by their index. Filled by the backward pass.
        changes: What it changed that could not be put back, if it were made again; empty if nothing.
    """

    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    autocast: Autocast = field(default_factory=list)
    differentiable: int = 0
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    changes: str = ""


def autocast_now(device_types: Iterable[str]) -> Autocast:
    """Returns device type, dtype and cache flag of each autocast context that is open."""
    return [
        (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled())
        for device_type in sorted(device_types)
        if torch.is_autocast_enabled(device_type)
    ]


def in_autocast(contexts: Autocast) -> AbstractContextManager[object]:
    """Opens autocast contexts again."""
    stack = ExitStack()
    for device_type, dtype, cached in contexts:
        stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=cached))
    return stack


class Watch:
    """A route that changes nothing and remembers the latest call.

    The gradients are caught by a hook on the output itself, so they are what the script's own loss sends
    back, whatever it is; the hook sits in front of anything the script does to the output afterwards. A
    parameter that the model returns gets none: it would stay there, and see other gradients besides.
    """

    def __init__(self, device_type: str) -> None:
        self.call: Call | None = None
        self._changes = ""
        self._device_types = {"cpu", device_type}

    def __call__(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call()
        try:
            call.versions = [(tensor, tensor._version) for tensor in tensors((args[1:], kwargs))]
            call.autocast = autocast_now(self._device_types)
            held = Held(unwrapped(args[0])) if self.call is None else None
        except Exception as error:
            if not raised_by_us(error):
                raise
            return original(*args, **kwargs)
        output = original(*args, **kwargs)
        try:
            for end in differentiable(output):
                if not end.is_leaf:
                    end.register_hook(_keeper(call.gradients, call.differentiable))
                call.differentiable += 1
            if held is not None:
                self._changes = held.changed(Held(unwrapped(args[0])))
            call.changes = self._changes
            self.call = call  # last: a call that failed is not the latest
        except Exception as error:
            if not raised_by_us(error):
                raise
        return output


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Returns what DDP wraps: a call of its own would prepare its reducer for a backward pass that may
    never come, and a further one in a step anew."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def _keeper(kept: dict[int, torch.Tensor], index: int) -> Callable[[torch.Tensor | None], None]:
    def keep(gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # there is none for a result that the loss leaves out, beside one it takes
            kept[index] = gradient.detach()

    return keep


@contextmanager
def watched(job: Job) -> Iterator[None]:
    """While open, the latest call of each model is remembered, with the gradients that came back.

    Open it a step before the first numerics check. Without it a check knows neither the gradients, and
    makes some up, nor the autocast contexts. It keeps alive one gradient of the output's size per model.
    """
    watches = {id(model): Watch(torch.device(job.device).type) for model in job.models}
    for model, watch in watches.items():
        job.routes.setdefault(model, []).insert(0, watch)
    try:
        yield
    finally:
        for model, watch in watches.items():
            routes = job.routes.get(model, [])  # none of a model that is gone
            routes[:] = [other for other in routes if other is not watch]
            if not routes:
                job.routes.pop(model, None)


def refuse_lasting_changes(call: Call | None) -> None:
    """Raises `CannotCheck` if a call has changed what could not be put back, were it made again."""
    if call is not None and call.changes:
        raise CannotCheck(f"each call of the model changes {call.changes}, which could not be put back")


def latest_call(job: Job, model: Any) -> Call | None:
    """What is remembered of the model's latest call."""
    calls = [route.call for route in job.routes.get(id(model), ()) if isinstance(route, Watch)]
    return calls[0] if calls else None
