"""Tensors in what models take and return: tuples, dictionaries, and the output classes of libraries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


def mapped(change: Change, value: Any) -> Any:
    """Returns `value` with each tensor in it changed, and every container of the type it had.

    A container in which nothing changes is returned itself. An object of an unknown kind is left alone.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: mapped(change, item) for key, item in value.items()}
        if all(changed[key] is value[key] for key in changed):
            return value
        return changed if type(value) is dict else type(value)(changed)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        items = [mapped(change, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init
        }
        changed = {name: mapped(change, item) for name, item in fields.items()}
        if all(changed[name] is fields[name] for name in fields):
            return value
        return dataclasses.replace(value, **changed)
    return value


def mapped_once(change: Change, value: Any) -> Any:
    """Likewise, but a tensor that is there several times is changed once, and stays one."""
    made: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = change(tensor)
        return made[id(tensor)]

    return mapped(once, value)


def tensors(value: Any) -> list[torch.Tensor]:
    """Returns every tensor that `mapped` would change."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(note, value)
    return found


def differentiable(value: Any) -> list[torch.Tensor]:
    """Returns those that carry a gradient, each once."""
    return list({id(tensor): tensor for tensor in tensors(value) if tensor.requires_grad}.values())
