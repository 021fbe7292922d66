"""Steps a live AdamW of torch's by kernels that keep its moments in one byte each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim import AdamW, Optimizer

from diagnose.actions._gone import unless_gone
from diagnose.actions._optimizers import parameters_of
from diagnose.kernels._adamw_8bit_state import decoded, encode, in_order_of
from diagnose.kernels._algorithms import ADAMW_8BIT
from diagnose.kernels._optimizer_8bit import _adamw_8bit_step
from diagnose.kernels._stepper import Stepper
from diagnose.kernels._swap import COPIED, StandIn, support

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = ADAMW_8BIT.moments({})


def why_not(optimizer: Optimizer) -> str:
    """Returns why the moments of an optimizer cannot be kept in bytes, in words; empty if they can."""
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if type(optimizer) is not AdamW:
        return f"states of one byte are AdamW's; {name} is another"
    if any(group["amsgrad"] or group["differentiable"] or group["capturable"] for group in groups):
        return "AdamW keeps a third moment, is differentiable or capturable"
    if any(hasattr(p, "_local_tensor") for p in parameters_of(optimizer)):
        return "parameters are spread over ranks"
    return "; ".join(support(optimizer))


@contextmanager
def in_bytes(optimizer: Optimizer) -> Iterator[list[str]]:
    """Keeps the moments of an optimizer in one byte each while open.

    `state_dict` shows them as torch's AdamW has them, rounded to what the codes can tell, and a checkpoint
    that is loaded meanwhile is coded. Gives a list which says, once the kernels have failed, why.

    Raises:
        RuntimeError: On leaving, if the device has no room for all moments: then they stay in bytes, and
            kernels go on to step them. Torch's own step could not.
    """
    kernels = _Kernels(optimizer)
    hooks, taken_out = kernels.hung(optimizer), unless_gone(_Kernels.taken_out, kernels)
    try:
        _encode(optimizer)
        broken = kernels.stepper.broken
        del optimizer, kernels
        yield broken
    finally:
        num_coded = taken_out()
        if not num_coded:
            hooks.close()
    if num_coded:  # where the script has raised, its own error is the one to hear of
        raise RuntimeError(
            f"the device has no room for the moments of {num_coded} parameters: all stay in one byte each, "
            "and kernels go on to step them"
        )


class _Kernels:
    """The hooks of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.stepper = _stepper(optimizer)
        self._optimizer = ref(optimizer)

    def hung(self, optimizer: Optimizer) -> ExitStack:
        """Hooks all into the optimizer; closing takes it out."""
        hooks = ExitStack()
        hooks.callback(unless_gone(_copy_as_torch, optimizer))
        setattr(optimizer, COPIED, self.as_torch_copies)
        hooks.callback(optimizer.register_load_state_dict_post_hook(self.loaded).remove)
        # Before all others, which expect moments.
        hooks.callback(optimizer.register_state_dict_post_hook(self.as_torch_saves, prepend=True).remove)
        hooks.callback(optimizer.register_step_pre_hook(self.before_step).remove)
        return hooks

    def taken_out(self) -> int:
        """Gives the optimizer its moments; see `_decode`."""
        self.stepper.release()
        optimizer = self._optimizer()
        return 0 if optimizer is None else _decode(optimizer)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Hands torch's own `step` a stand-in that leaves it nothing to do."""
        if is_dynamo_compiling():
            return None
        stepper = self.stepper
        if optimizer is not self._optimizer():  # a copy of it, as the tuner makes to compare updates
            stepper = _stepper(optimizer)
        return (_Coded(optimizer, stepper, lambda: None), *args[1:]), kwargs

    def loaded(self, optimizer: Optimizer) -> None:
        """The script has loaded a checkpoint."""
        _encode(optimizer)

    def as_torch_saves(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """The script saves one."""
        state = self.stepper.saved(saved["state"])
        params = parameters_of(optimizer)
        return {
            **saved,
            "state": {index: _as_torch(held, params[index]) for index, held in state.items()},
        }

    def as_torch_copies(self) -> dict[str, Any]:
        """Takes the place of `Optimizer.__getstate__`: a copy has none of our hooks, and must not have
        codes."""
        optimizer: Any = self._optimizer()
        held: dict[str, Any] = type(optimizer).__getstate__(optimizer)
        plain = {p: _as_torch(state, p) for p, state in self.stepper.saved(held["state"]).items()}
        return {**held, "state": defaultdict(dict, plain)}


def _copy_as_torch(optimizer: Optimizer) -> None:
    optimizer.__dict__.pop(COPIED, None)


def _stepper(optimizer: Optimizer) -> Stepper:
    stepper = Stepper(optimizer, ADAMW_8BIT)
    stepper.scaling_is_ours = True  # what the kernels leave comes to no step of torch's that unscales
    return stepper


class _Coded(StandIn):  # type: ignore[misc]
    """A stand-in that also steps what the kernels leave: torch's own code knows no codes."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """See `StandIn`. Empty: nothing is left."""
        own: dict[str, Any] = self.__dict__
        if own["_left"] is None:
            optimizer, stepper = own["_optimizer"], own["_stepper"]
            with torch.no_grad():
                for group in stepper.step():
                    for p in group["params"]:
                        _adamw_8bit_step(group, optimizer.state[p], p, p.grad)
            own["_left"] = []
        return []


def _encode(optimizer: Optimizer) -> None:
    for p, state in optimizer.state.items():
        if MOMENTS[0] in state:
            m, v = (in_order_of(p, state[name]) for name in MOMENTS)
            coded = {name: ADAMW_8BIT.make(place, p) for place, name in enumerate(CODES)}
            encode(m, coded["exp_avg_codes"], coded["exp_avg_scales"], signed=True)
            encode(v.sqrt_(), coded["exp_avg_sq_codes"], coded["exp_avg_sq_scales"], signed=False)
            for name in MOMENTS:
                del state[name]
            state.update(coded)


def _decode(optimizer: Optimizer) -> int:
    """Gives each parameter moments as torch keeps them, and frees its codes; returns for how many there is
    no room on the device."""
    left = _decode_what_fits(optimizer)
    if left and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # what the codes have left is in pieces of other sizes
        left = _decode_what_fits(optimizer)
    return left


def _decode_what_fits(optimizer: Optimizer) -> int:
    coded = [(p, state) for p, state in optimizer.state.items() if CODES[0] in state]
    for p, state in coded:
        plain = _on_device(_as_torch(state, p), p)
        if plain:
            state.clear()
            state.update(plain)
    return sum(CODES[0] in state for _, state in coded)


def _on_device(plain: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
    """The state with its moments where the parameter is; empty where there is no room."""
    try:
        return {**plain, **{name: plain[name].to(p.device) for name in MOMENTS}}
    except torch.OutOfMemoryError:
        return {}


def _as_torch(state: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
    """One parameter's state as torch's AdamW keeps it; on the CPU where its device has no room."""
    if CODES[0] not in state:
        return state
    try:
        moments = _decoded(state, p)
    except torch.OutOfMemoryError:
        on_cpu = torch.empty_like(p, device="cpu", memory_format=torch.preserve_format)
        moments = _decoded({name: state[name].cpu() for name in CODES}, on_cpu)
    return {"step": state["step"], **moments}


def _decoded(state: dict[str, Any], p: torch.Tensor) -> dict[str, torch.Tensor]:
    m = decoded(state["exp_avg_codes"], state["exp_avg_scales"], signed=True, like=p)
    root = decoded(state["exp_avg_sq_codes"], state["exp_avg_sq_scales"], signed=False, like=p)
    return {"exp_avg": m.to(p.dtype), "exp_avg_sq": root.mul_(root).to(p.dtype)}
