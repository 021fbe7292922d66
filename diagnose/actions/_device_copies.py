"""Copies of batches on the GPU that were begun before the script asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch

from diagnose.hooks.base import StandIn, replaced

PLAIN_OPTIONS = frozenset({"device", "non_blocking"})
"""What a call may say and still ask for nothing but the tensor on the device."""


class SideStream:
    """Copies to a GPU beside what the script computes there.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begins to copy; returns the copy, and what says when it is complete."""
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        with torch.cuda.stream(self._stream):
            copy = pinned.to(self.device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return copy, done

    def hand_over(self, copy: torch.Tensor, done: Any) -> None:
        """Lets the stream that the script computes on wait for the copy, and own its memory."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        copy.record_stream(current)


class Copies:
    """Tensors of the script's that are on the device already, or on their way.

    A tensor is found by being the very object, with nothing written to it since. It is handed over once: a
    second copy of the same tensor is the script's own. An entry ends with its tensor.

    Args:
        side: Makes the copies.
    """

    def __init__(self, side: Any) -> None:
        self._side = side
        self._begun: dict[int, tuple[Callable[[], Any], int, torch.Tensor, Any]] = {}

    def begin(self, tensor: torch.Tensor) -> None:
        """Begins to copy a tensor."""
        if type(tensor) is not torch.Tensor or tensor.requires_grad or id(tensor) in self._begun:
            return
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        key = id(tensor)
        copy, done = self._side.begin(tensor)
        begun = self._begun
        self._begun[key] = ref(tensor, lambda _: begun.pop(key, None)), tensor._version, copy, done

    def take(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the copy of a tensor, `None` if there is none, or not of what it holds now."""
        entry = self._begun.pop(id(tensor), None)
        if entry is None or entry[0]() is not tensor or entry[1] != tensor._version:
            return None
        self._side.hand_over(entry[2], entry[3])
        return entry[2]

    def __len__(self) -> int:
        return len(self._begun)

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        """Lets `Tensor.to` and `Tensor.cuda` return what is there, where they are asked for just that."""
        device = self._side.device

        def to(original: Callable[..., Any]) -> Callable[..., Any]:
            def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if self._begun and id(tensor) in self._begun and asks_for(device, args, kwargs):
                    copy = self.take(tensor)
                    if copy is not None:
                        return copy
                return original(tensor, *args, **kwargs)

            return StandIn(moved, original)

        def cuda(original: Callable[..., Any]) -> Callable[..., Any]:
            def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                plain = asks_for(device, args or (device.type,), kwargs)
                if self._begun and id(tensor) in self._begun and plain:
                    copy = self.take(tensor)
                    if copy is not None:
                        return copy
                return original(tensor, *args, **kwargs)

            return StandIn(moved, original)

        with replaced(torch.Tensor, "to", to), replaced(torch.Tensor, "cuda", cuda):
            yield


def asks_for(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `Tensor.to` ask for the tensor on a device, and for no other change."""
    if not PLAIN_OPTIONS.issuperset(kwargs) or len(args) > 1 or (args and "device" in kwargs):
        return False
    wanted = args[0] if args else kwargs.get("device")
    if type(wanted) is int:
        wanted = torch.device(device.type, wanted)
    elif isinstance(wanted, str):
        wanted = torch.device(wanted)
    if not isinstance(wanted, torch.device) or wanted.type != device.type:
        return False
    index: int | None = wanted.index
    if index is None and device.type == "cuda":
        index = torch.cuda.current_device()
    return bool(index == device.index)
