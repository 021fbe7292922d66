"""Updates all tensors of an optimizer in one call, and the optimizer does not show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from diagnose.actions._gone import unless_gone
from diagnose.hooks._fusing import CLASSES, why_not_fused
from diagnose.hooks._signals import from_signal_handler
from diagnose.kernels._layout import fits
from diagnose.kernels._stepper import own_count
from diagnose.kernels._swap import Swap, support, swap

LOOK_STEPS = 3
LOOK_EVERY = 50
"""The tensors' layouts are compared in so many first steps, and then now and again: it takes as long as
updating a few of them, and a loop does what it does in every step."""

CHECKED = "_need_device_dtype_check_for_fused"
"""What torch notes on an optimizer after its first fused step."""


def implementation(optimizer: Optimizer) -> Callable[[Optimizer], AbstractContextManager[list[str]]]:
    """Returns what steps an optimizer in a faster way while its context is open. That gives a list which
    says, once it has failed, why."""
    if not support(optimizer):
        return by_kernels
    on_cpu = optimizer.param_groups[0]["params"][0].device.type == "cpu"
    return fused_by_torch if on_cpu else fused_on_device


def why_not(optimizer: Optimizer) -> str:
    """Returns why an optimizer cannot be stepped in a faster way, in words; empty if it can."""
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if type(optimizer) not in CLASSES:
        return f"torch has no fused {name}"
    if any(group.get("capturable") for group in groups):
        return f"{name} is capturable: a CUDA graph may hold its steps"
    if not support(optimizer):
        return ""
    if is_fused(optimizer):
        return f"{name} is fused already"
    return why_not_fused(optimizer)


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the script has asked torch for its fused step."""
    return all(group["fused"] for group in optimizer.param_groups)


@contextmanager
def by_kernels(optimizer: Optimizer) -> Iterator[list[str]]:
    """Lets kernels of our own step one optimizer while open, and clip wherever the script does."""
    with ExitStack() as stack:
        taken = swap(optimizer)
        stack.callback(unless_gone(Swap.remove, taken))
        broken = taken.stepper.broken
        del optimizer, taken
        yield broken


@contextmanager
def fused_by_torch(optimizer: Optimizer) -> Iterator[list[str]]:
    """Fuses the steps of one optimizer while open."""
    flags = _Flags()
    checked = vars(optimizer).get(CHECKED)
    with ExitStack() as stack:
        stack.callback(unless_gone(_set_checked, optimizer, checked))
        stack.callback(optimizer.register_step_pre_hook(flags.set).remove)
        stack.callback(optimizer.register_step_post_hook(flags.restore).remove)
        # A step that raises has no end, and hooks of the script's come before ours: both may save.
        stack.callback(optimizer.register_state_dict_pre_hook(flags.restore).remove)
        stack.callback(unless_gone(_Flags.restore, flags))  # before they go, and the flags with them
        del optimizer, flags
        yield []


def _set_checked(optimizer: Optimizer, checked: bool | None) -> None:
    if checked is None:
        vars(optimizer).pop(CHECKED, None)
    else:
        setattr(optimizer, CHECKED, checked)


@contextmanager
def fused_on_device(optimizer: Optimizer) -> Iterator[list[str]]:
    """Likewise where the parameters are on an accelerator: a fused step counts steps there.

    The optimizer's `state_dict` shows the counts where they are without us.
    """

    with ExitStack() as stack:
        stack.callback(unless_gone(_move_steps, optimizer, {}))
        stack.callback(optimizer.register_step_pre_hook(_StepsOnDevice()).remove)
        stack.callback(optimizer.register_state_dict_post_hook(_with_own_steps).remove)
        told = stack.enter_context(fused_by_torch(optimizer))
        del optimizer
        yield told


class _StepsOnDevice:
    """A step hook that moves the counts of steps once for every state that an optimizer gets: now, and when
    one is loaded."""

    def __init__(self) -> None:
        self._state: Any = None

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._state is not optimizer.state and not is_dynamo_compiling():
            self._state = optimizer.state
            _move_steps(optimizer, {"fused": True})


class _Flags:
    """The flags of an optimizer's groups: ours during a step, the script's at all other times.

    So a checkpoint, a copy and a scheduler see the script's, and a loaded checkpoint cannot end what is in
    force. Once the tensors of some step do not fit, or something of ours fails, the script's own
    implementation goes on for good.
    """

    def __init__(self) -> None:
        self._theirs: list[tuple[dict[str, Any], Any, Any]] = []
        self._state: Any = None
        self._momenta: dict[int, tuple[list[bool], int, bool]] = {}
        self._steps = 0
        self._fits = False

    def set(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step."""
        if is_dynamo_compiling():
            return
        try:
            self._set(optimizer)
        except Exception as error:
            if from_signal_handler(error.__traceback__):
                raise  # the script's own
            self._fits = False
            self.restore()

    def _set(self, optimizer: Optimizer) -> None:
        if self._theirs:  # the last step raised an exception
            self.restore()
        if optimizer.state is not self._state:
            self._state, self._steps, self._fits = optimizer.state, 0, True
            self._momenta.clear()
        if self._fits and (self._steps < LOOK_STEPS or not self._steps % LOOK_EVERY):
            # Measured with a gradient of another layout, torch's fused step on a CPU computes garbage.
            self._fits = all(map(fits, tensors_together(optimizer)))
        self._steps += 1
        for group in optimizer.param_groups:
            if self._fits and not self._lacks_momentum(optimizer, group):
                self._theirs.append((group, group["fused"], group["foreach"]))
                group["fused"], group["foreach"] = True, False

    def _lacks_momentum(self, optimizer: Optimizer, group: dict[str, Any]) -> bool:
        """See the function. Parameters are gone through only where there are other gradients than in the
        last step, or another number of momenta: it takes a quarter as long as the fused step."""
        if not group.get("momentum"):
            return False
        without = [p.grad is None for p in group["params"]]
        num_momenta = sum(map(len, optimizer.state.values()))
        known = self._momenta.get(id(group))
        if known is None or known[:2] != (without, num_momenta):
            known = (without, num_momenta, _lacks_momentum(optimizer, group))
            self._momenta[id(group)] = known
        return known[2]

    def restore(self, *_: Any) -> None:
        """After a step."""
        for group, fused, foreach in self._theirs:
            group["fused"], group["foreach"] = fused, foreach
        self._theirs.clear()


def _lacks_momentum(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether of the parameters with a gradient some have a momentum and others have none yet, as those do
    that are trained from now on: torch's fused step of SGD raises an exception there."""
    state = optimizer.state
    has = [
        state.get(p, {}).get("momentum_buffer") is not None for p in group["params"] if p.grad is not None
    ]
    return any(has) and not all(has)


def tensors_together(optimizer: Optimizer) -> Iterator[list[torch.Tensor]]:
    """For each parameter with a gradient: it, the gradient, and its state of the same shape."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                state = optimizer.state.get(p, {}).values()
                alike = [s for s in state if isinstance(s, torch.Tensor) and s.shape == p.shape]
                yield [p, p.grad, *alike]


def _move_steps(optimizer: Optimizer, flags: dict[str, bool]) -> None:
    """Moves the counts of steps to where torch keeps them under each group's own flags and these."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = own_count(state["step"], {**group, **flags}, p)


def _with_own_steps(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = dict(state_dict["state"])
    held = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    for index, (group, p) in enumerate(held):  # torch numbers them so
        if isinstance(state.get(index, {}).get("step"), torch.Tensor):
            state[index] = {**state[index], "step": own_count(state[index]["step"], group, p)}
    return {**state_dict, "state": state}
