"""Runs the script's model beside its training: whatever that changes is put back."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CONTAINERS = (dict, OrderedDict, list, set, deque)
"""Attributes of these very types are put back with what they held: counters, caches and histories."""


COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of operations that wait for other ranks, which may have given up the check by then."""


class CannotCheck(Exception):
    """What the check needs is not there; the message says what, in words for the user."""


class RandomState:
    """The random generators at one moment: torch's on the CPU and on devices, Python's and NumPy's."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._devices = {
            device: torch.get_device_module(device.type).get_rng_state(device)
            for device in sorted(set(devices), key=str)
            if device.type not in ("cpu", "meta")
        }
        self._python = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy = numpy.get_state(legacy=False) if numpy else None

    def restore(self) -> None:
        """Sets all generators back to that moment."""
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            torch.get_device_module(device.type).set_rng_state(state, device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        return (
            torch.equal(self._cpu, other._cpu)
            and self._devices.keys() == other._devices.keys()
            and all(torch.equal(state, other._devices[device]) for device, state in self._devices.items())
            and self._python == other._python
            and _flat(self._numpy) == _flat(other._numpy)
        )

    __hash__ = None  # type: ignore[assignment]


def _flat(state: Any) -> Any:
    if state is None:
        return None
    inner = {
        name: getattr(value, "tolist", lambda value=value: value)()
        for name, value in state["state"].items()
    }
    return {**state, "state": inner}


@contextmanager
def random_numbers_again(devices: Iterable[torch.device]) -> Iterator[RandomState]:
    """On leaving, all random generators are as they were; yields their state."""
    before = RandomState(devices)
    try:
        yield before
    finally:
        before.restore()


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """The devices, by index, on which some tensors lie."""
    return {tensor.device for tensor in tensors}


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """What a call of the model changes in it while this is open is gone on leaving.

    Buffers, and tensors that are plain attributes, are copies inside, so that the script's own keep even
    their version counters. Attributes bound anew and containers get back what they held, `.data` of
    parameters its storage. The script's hooks on parameters do not run inside. Not put back: what the model
    changes outside itself, other tensors written in place (see `refuse_lasting_writes`), and what
    lies deeper in its attributes than one container (see `_watch.refuse_lasting_changes`).
    """
    copies: dict[int, torch.Tensor] = {}
    with ExitStack() as undo:
        for parameter in model.parameters():
            undo.callback(_point_to, parameter, parameter.detach())
            hooks = parameter._backward_hooks
            if hooks:
                undo.callback(_refill, hooks, dict(hooks))
                for key in [key for key, hook in hooks.items() if not is_ours(hook)]:
                    del hooks[key]
        for module in model.modules():
            attributes = vars(module)
            undo.callback(_refill, attributes, dict(attributes))
            for value in list(attributes.values()):
                if type(value) in CONTAINERS:
                    undo.callback(_refill, value, copy.copy(value))
                elif isinstance(value, torch.Generator):
                    undo.callback(value.set_state, value.get_state())
        for holder, name, value in _beside_parameters(model):
            if id(value) not in copies:
                copies[id(value)] = value.clone()
            holder[name] = copies[id(value)]
        yield


def _beside_parameters(model: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Returns a model's buffers and the tensors that are plain attributes, each with what holds it by which
    name."""
    return [
        (holder, name, value)
        for module in model.modules()
        for holder in (vars(module), module._buffers)
        for name, value in holder.items()
        if isinstance(value, torch.Tensor) and not value.requires_grad
    ]


def _refill(container: Any, held: Any) -> None:
    """Makes a container hold what it held; touches what has not changed as little as possible."""
    if isinstance(container, dict):
        if list(container) != list(held):
            container.clear()
            container.update(held)
        for key, value in held.items():
            if container[key] is not value:
                container[key] = value
    elif isinstance(container, set):
        if container != held:
            container.clear()
            container.update(held)
    elif len(container) != len(held) or any(
        now is not before for now, before in zip(container, held, strict=True)
    ):
        container.clear()
        container.extend(held)


def is_ours(hook: Any) -> bool:
    """Whether a hook belongs to an action in force: it is part of what is computed."""
    return str(getattr(hook, "__module__", "")).startswith("diagnose.")


def put_back(place: torch.Tensor, values: torch.Tensor) -> None:
    """Gives a tensor the values that it had; not written to where it has them: nothing can be written to
    one whose elements share their memory, as those of an expanded buffer do."""
    values = values.to(place.device)
    if place.layout is not torch.strided or not torch.equal(place, values):
        place.copy_(values)


def _point_to(parameter: nn.Parameter, held: torch.Tensor) -> None:
    if parameter.data_ptr() != held.data_ptr():
        parameter.data = held


class _OnlyNewIsWritten(TorchDispatchMode):
    """Lets operations write to tensors that have been made inside, and to some others, and lets none wait
    for other ranks.

    Args:
        model: Its parameters are told from other tensors in the message.
        others: The others.
    """

    def __init__(self, model: nn.Module, others: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = storages(model.parameters())
        self._writable = storages(others) | {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COLLECTIVES:
            raise CannotCheck("the model talks to other ranks while it is called")
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[index] if index < len(args) else kwargs.get(argument.name)
                places = storages(_tensors_in(written)) - self._writable
                if places:
                    own = places <= self._parameters
                    what = "its own parameters" if own else "a tensor that could not be put back"
                    raise CannotCheck(f"the model writes to {what} while it is called")
        result = func(*args, **kwargs)
        made = storages(_tensors_in(result))
        if func is not torch.ops.aten.lift_fresh.default:  # which gets what `torch.tensor` has made
            made -= storages(_tensors_in([*args, *kwargs.values()]))
        self._writable |= made
        return result


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or the results of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns where some tensors have their elements; sparse ones are left out."""
    dense = (tensor for tensor in tensors if tensor.layout is torch.strided)
    return {tensor.untyped_storage().data_ptr() for tensor in dense}


_known_to_read: WeakSet[nn.Module] = WeakSet()


@contextmanager
def refuse_lasting_writes(model: nn.Module, inputs: Iterable[torch.Tensor]) -> Iterator[bool]:
    """Inside, a first call of the model is stopped before it writes to what has no way back: parameters,
    and older tensors that are neither its modules' own nor its inputs; and before it waits for other ranks.
    To be opened inside of `untouched`, whose copies may be written to.

    Args:
        inputs: Copies of what it is called with.

    Yields:
        Whether a call is due; of one model it is once.

    Raises:
        CannotCheck: If the call would do so.
    """
    if model in _known_to_read:
        yield False
        return
    copies = [*inputs, *(held for *_, held in _beside_parameters(model))]
    with ExitStack() as stack:
        if "torch._dynamo.eval_frame" in sys.modules:  # compiled code would run past the watch
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_OnlyNewIsWritten(model, copies))
        yield True
    _known_to_read.add(model)
