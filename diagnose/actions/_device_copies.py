"""Copies of batches on the GPU that were begun before the script asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from diagnose.actions._careful import Failure
from diagnose.actions._loader_purity import same
from diagnose.hooks.base import StandIn, replaced

PLAIN_OPTIONS = frozenset({"device", "non_blocking"})
"""What a call may say and still ask for nothing but the tensor on the device."""

SOME = 1024
"""So many elements of a tensor are looked at where not all are: reading them takes some 0.2 ms, on a busy
CPU."""

CHANGED = "the script changes a batch where torch does not see it, as by `tensor.numpy()` or `tensor.data`"


class SideStream:
    """Copies to a GPU beside what the script computes there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begins to copy; returns the copy, and what says when it is complete. Until then the tensor is
        read, if its memory is pinned."""
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        with torch.cuda.stream(self._stream):
            copy = pinned.to(self.device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return copy, done

    def hand_over(self, copy: torch.Tensor, done: Any, *, waits: bool) -> None:
        """Lets the stream that the script computes on wait for the copy, and own its memory.

        Args:
            copy: What `begin` returned.
            done: Likewise.
            waits: Whether the script has asked for more: to wait until its own tensor is read.
        """
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        copy.record_stream(current)
        if waits:
            done.synchronize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A copy that was begun.

    Attributes:
        tensor: Gives what it is of, while that lives.
        version: That of the tensor when it was begun.
        held: What the tensor held then: all of it, or some.
        places: Where in the tensor that stands; `None` if it is all.
        copy: The copy.
        done: Says when it is complete.
    """

    tensor: Callable[[], Any]
    version: int
    held: torch.Tensor
    places: torch.Tensor | None
    copy: torch.Tensor
    done: Any

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is what the tensor on the device would be, by all that torch knows of it."""
        return (
            self.tensor() is tensor
            and self.version == tensor._version
            and self.copy.shape == tensor.shape
            and self.copy.dtype == tensor.dtype
            and not tensor.requires_grad
        )

    def is_current(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor still holds what it held."""
        return same(self.held, _held(tensor, self.places))


def _held(tensor: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    return tensor.contiguous().view(-1) if places is None else torch.take(tensor, places)


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Some places in a tensor, as far apart as can be."""
    return torch.arange(0, tensor.numel(), max(1, tensor.numel() // SOME), device="cpu")


class Copies:
    """Tensors of the script's that are on the device already, or on their way.

    A tensor is found by being the very object, with nothing written to it since. It is handed over once: a
    second copy of the same tensor is the script's own. An entry ends with its tensor.

    What is written past torch, as to an array that shares the memory, is found by what the tensor holds;
    then no more copies are handed over.

    Args:
        side: Makes the copies.
        failure: Gets why they are given up.
    """

    def __init__(self, side: Any, failure: Failure) -> None:
        self._side = side
        self._failure = failure
        self._begun: dict[int, Begun] = {}

    def begin(self, tensor: torch.Tensor, *, closely: bool = True) -> None:
        """Begins to copy a tensor.

        Args:
            closely: Whether all of it is kept, to see later whether it is still the same, or some.
        """
        if type(tensor) is not torch.Tensor or tensor.requires_grad or id(tensor) in self._begun:
            return
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        places = None if closely else _places(tensor)
        held = _held(tensor, places).clone()
        copy, done = self._side.begin(tensor)
        key, begun = id(tensor), self._begun
        begun[key] = Begun(
            tensor=ref(tensor, lambda _: begun.pop(key, None)),
            version=tensor._version,
            held=held,
            places=places,
            copy=copy,
            done=done,
        )

    def take(self, tensor: torch.Tensor, *, waits: bool) -> torch.Tensor | None:
        """Returns the copy of a tensor, `None` if there is none, or not of what it holds now.

        Args:
            waits: Whether the script may write to it from then on.
        """
        begun = self._begun.pop(id(tensor), None)
        if begun is None or self._failure.reason or not begun.is_of(tensor):
            return None
        if not begun.is_current(tensor):
            self._failure.reason = CHANGED
            return None
        self._side.hand_over(begun.copy, begun.done, waits=waits and tensor.is_pinned())
        return begun.copy

    @contextmanager
    def looked_up(self) -> Iterator[None]:
        """Lets `Tensor.to` and `Tensor.cuda` return what is there, where they are asked for just that."""
        device = self._side.device

        def looking(original: Callable[..., Any], *default: Any) -> Callable[..., Any]:
            def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                known = self._begun and id(tensor) in self._begun
                if known and asks_for(device, args or default, kwargs):
                    copy = self.take(tensor, waits=not kwargs.get("non_blocking"))
                    if copy is not None:
                        return copy
                return original(tensor, *args, **kwargs)

            return StandIn(moved, original)

        def cuda(original: Callable[..., Any]) -> Callable[..., Any]:
            return looking(original, device.type)

        with replaced(torch.Tensor, "to", looking), replaced(torch.Tensor, "cuda", cuda):
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
