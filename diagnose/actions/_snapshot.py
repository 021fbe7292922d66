"""Keeps what training has come to at one moment, and puts it back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from diagnose.actions._gone import emptied_with
from diagnose.actions._layout import CODES
from diagnose.actions._memory import available_bytes
from diagnose.actions._optimizers import parameters_of
from diagnose.actions._untouched import RandomState, devices_of, put_back
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job

MOST_SHARE = 0.5
"""Of the host's memory that is available: the script goes on allocating beside it."""

SCALER = ("_scale", "_growth_tracker")
"""What a `GradScaler` changes as it goes."""


class Snapshot:
    """Parameters, buffers, the optimizers' state, scalers and random numbers between two steps.

    Kept on the host; taking it from a device waits for that. Not kept, because the script's own counters
    cannot be turned back either: learning rates and schedulers, and where the loop is in its data. What the
    script averages or logs itself is out of reach. It all goes with the first optimizer that the script is
    done with.

    Args:
        job: The job, between two steps.
        scalers: Its `GradScaler`s.

    Raises:
        CannotApply: If there is too little memory.
    """

    def __init__(self, job: Job, scalers: Iterable[Any] = ()) -> None:
        optimizers = list(job.optimizers)
        self._scalers = list(scalers)
        places = list({id(tensor): tensor for tensor in _changed_by_steps(job)}.values())
        state = [value for optimizer in optimizers for value in _tensors(optimizer.state)]
        needed = sum(tensor.numel() * tensor.element_size() for tensor in (*places, *state))
        free = int(available_bytes() * MOST_SHARE / max(1, job.local_ranks))
        if needed > free:
            raise CannotApply(
                f"weights and optimizer state take {needed >> 20} MiB, and {free >> 20} MiB may be used"
            )
        self._epochs_begun = job.epochs_begun
        self._random = RandomState(devices_of(places))
        self._tensors = [(place, _Held.of(place)) for place in places]
        self._states = [_copied(optimizer.state) for optimizer in optimizers]
        owners = optimizers or job.models
        self._owners = [emptied_with(each, self._tensors, self._states) for each in owners]
        self._scales = [{name: _copied(vars(each).get(name)) for name in SCALER} for each in self._scalers]

    def check(self) -> None:
        """Looks whether all can be put back.

        Raises:
            CannotApply: If a tensor has another shape now, or the script is done with them.
        """
        if any(owner() is None for owner in self._owners):
            raise CannotApply("the script has done with what it had trained")
        for place, held in self._tensors:
            if place.shape != held.tensor.shape:
                now, before = list(place.shape), list(held.tensor.shape)
                raise CannotApply(f"a tensor of shape {before} has come to be one of {now}")

    def restore(self, job: Job) -> None:
        """Puts all back, into the very tensors it was taken from.

        Random numbers go on as they are where an epoch has begun since: turned back, they would shuffle the
        next one in the same order again.
        """
        with torch.no_grad():
            for place, held in self._tensors:
                put_back(place, held.tensor)
            for owner, state in zip(self._owners, self._states, strict=False):
                optimizer: Any = owner()
                for gone in optimizer.state.keys() - state.keys():
                    del optimizer.state[gone]
                _refill(optimizer.state, state)
            for scaler, scales in zip(self._scalers, self._scales, strict=True):
                _refill(vars(scaler), scales)
        if job.epochs_begun == self._epochs_begun:
            self._random.restore()


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor's values on the host, and where they belong."""

    tensor: torch.Tensor
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Held:
        tensor = tensor.detach()
        return cls(tensor.clone() if tensor.device.type == "cpu" else tensor.cpu(), tensor.device)


def _changed_by_steps(job: Job) -> Iterator[torch.Tensor]:
    """Also parameters that no model of the loop holds."""
    for model in job.models:
        yield from model.parameters()
        yield from model.buffers()
    for optimizer in job.optimizers:
        yield from parameters_of(optimizer)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Held.of(value)
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return copy.deepcopy(value)


def _refill(container: Any, held: dict[Any, Any]) -> None:
    """Makes a dictionary hold what it held: tensors that still fit keep being the same objects."""
    for key, value in held.items():
        now = container.get(key)
        if isinstance(value, _Held):
            kept = value.tensor
            if _takes(now, kept):
                now.copy_(kept)
            else:
                container[key] = kept.clone().to(value.device)
        elif isinstance(value, dict) and isinstance(now, dict):
            for gone in now.keys() - value.keys():
                del now[gone]
            _refill(now, value)
        elif isinstance(value, dict):
            made: dict[Any, Any] = {}
            container[key] = made
            _refill(made, value)
        else:
            container[key] = copy.deepcopy(value)


def _takes(now: Any, kept: torch.Tensor) -> bool:
    """Whether a tensor can get the values; `CODES` only where they lie as they did, for their scales."""
    if not isinstance(now, torch.Tensor) or (now.shape, now.dtype) != (kept.shape, kept.dtype):
        return False
    return kept.dtype is not CODES or now.stride() == kept.stride()
