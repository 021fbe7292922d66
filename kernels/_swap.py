"""Puts kernels under a live optimizer of torch's, and takes them away again, without anyone noticing.

The object stays: schedulers, scalers and wrappers hold it, some hold its `step`. A step hook hands torch's
own `step` a stand-in whose `param_groups` launches the kernels when torch asks for it, after the closure,
and gives back what is left for torch to do.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from diagnose.kernels._algorithms import ALGORITHMS, Algorithm, algorithm_of, group_refusals
from diagnose.kernels._clip import CLIPPING, Pending, versions, warn_touched
from diagnose.kernels._device import why_none
from diagnose.kernels._foreign import foreign, foreign_refusals
from diagnose.kernels._layout import disjoint, fits
from diagnose.kernels._shards import PLAIN, is_sharded, own_part
from diagnose.kernels._stepper import Due, Stepper, nothing_due
from diagnose.kernels._structs import PAIRS
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from diagnose.core.errors import DiagnoseError

ClipLevel = Literal["exact", "off", "deferred"]

AMP = "_step_supports_amp_scaling"
"""What `GradScaler` looks for on an optimizer that takes scaled gradients."""

COPIED = "__getstate__"
"""What `copy` and `pickle` ask an optimizer for: a copy gets counts of steps as torch keeps them."""

ALLOWED = ("stochastic-rounding",)


class CannotSwap(DiagnoseError):
    """The optimizer cannot be stepped by kernels; the message says why."""


class Swap:
    """Kernels under one optimizer.

    Attributes:
        clip: What becomes of gradient clipping: see `swap`.
        stepper: What does its steps.
        pending: What its next step has still to do to its gradients.
    """

    def __init__(self, optimizer: Optimizer, clip: ClipLevel, allow: Sequence[str]):
        unknown = [name for name in allow if name not in ALLOWED]
        if unknown:
            raise ValueError(f"unknown in allow: {', '.join(unknown)}; known: {', '.join(ALLOWED)}")
        if clip not in get_args(ClipLevel):
            raise ValueError(f"clip is {clip!r}; known: {', '.join(get_args(ClipLevel))}")
        params = (param for group in optimizer.param_groups for param in group["params"])
        if clip == "deferred" and any(map(is_sharded, params)):
            raise CannotSwap(
                f"{type(optimizer).__name__}: parameters are sharded, and the norm of gradients is a sum "
                "over ranks, which torch makes: clipping cannot be deferred, only exact or off."
            )
        self._optimizer = weakref.ref(optimizer)  # whose hooks hold this
        self.clip = clip
        self.stepper = Stepper(optimizer, _algorithm(optimizer))
        self.stepper.stochastic = "stochastic-rounding" in allow
        self.pending: Pending | None = None
        self.stepper.unscales_in_memory = clip != "deferred"
        if clip != "off":
            CLIPPING.add(self)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_state_dict_post_hook(self._as_torch_saves),
        ]
        setattr(optimizer, COPIED, self._as_torch_copies)

    @property
    def optimizer(self) -> Any:
        """The optimizer; `None` once the script has dropped it."""
        return self._optimizer()

    def remove(self) -> None:
        """Takes the kernels away: torch goes on from the same state."""
        for handle in self._handles:
            handle.remove()
        optimizer = self.optimizer
        if optimizer is None:
            CLIPPING.discard(self)
            return
        vars(optimizer).pop(COPIED, None)
        grads = self.grads()
        if self.pending is not None and self.pending.is_of(grads):
            self.pending.carry_out(grads)
        self.pending = None
        CLIPPING.discard(self)
        if self.stepper.scaling_is_ours:
            delattr(optimizer, AMP)
        self.stepper.release()

    def defer(
        self,
        grads: Sequence[torch.Tensor],
        places: list[int],
        outcome_4: torch.Tensor,
        *,
        max_norm: float,
        coef: torch.Tensor | None = None,
        grad_scale: torch.Tensor | None = None,
    ) -> None:
        """Notes what the next step has to do to the gradients at these addresses, beside what is noted for
        them already."""
        noted = self.pending if self.pending is not None and self.pending.is_of(grads) else None
        if noted is not None and noted.coef is not None and coef is not None and noted.is_untouched():
            coef = torch.minimum(noted.coef, coef)  # clipped twice: to the smaller norm
        self.pending = Pending(
            grads=list(map(weakref.ref, grads)),
            places=places,
            versions=versions(grads),
            coef=coef,
            grad_scale=grad_scale if grad_scale is not None else noted and noted.grad_scale,
            outcome_4=outcome_4,
            max_norm=max_norm,
        )

    def due(self, grads: Sequence[torch.Tensor | None]) -> Pending | None:
        """What a step has to do to these gradients, if they are those that it was noted for."""
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        if not pending.is_of([grad for grad in grads if grad is not None]):
            return None
        if not pending.is_untouched():
            warn_touched(type(self.optimizer).__name__)
            self.clip = "exact"
        return pending

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return None
        if optimizer is not self.optimizer:  # a copy of it, as the tuner makes to compare updates
            twin = Stepper(optimizer, _algorithm(optimizer))
            twin.stochastic = self.stepper.stochastic
            return (StandIn(optimizer, twin, nothing_due), *args[1:]), kwargs
        if (
            self.clip == "deferred"
            and not getattr(optimizer, AMP, False)
            and not _is_accelerated(optimizer)
        ):
            # From the next step on, so that this one has shown by whom it is called.
            self.stepper.scaling_is_ours = True
            setattr(optimizer, AMP, True)
        return (StandIn(optimizer, self.stepper, self.due), *args[1:]), kwargs

    def grads(self) -> list[torch.Tensor]:
        """Those that its optimizer has now."""
        groups = getattr(self.optimizer, "param_groups", [])
        params = [param for group in groups for param in group["params"]]
        return [param.grad for param in params if param.grad is not None]

    def _as_torch_saves(self, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        return {**saved, "state": self.stepper.saved(saved["state"])}

    def _as_torch_copies(self) -> dict[str, Any]:
        """Takes the place of `Optimizer.__getstate__`."""
        held: dict[str, Any] = type(self.optimizer).__getstate__(self.optimizer)
        return {**held, "state": defaultdict(dict, self.stepper.saved(held["state"]))}


class StandIn:
    """What torch's own `step` takes for the optimizer, for one step.

    Args:
        optimizer: The optimizer.
        stepper: What steps it.
        due: From its gradients to what is still to be done to them.
    """

    def __init__(self, optimizer: Optimizer, stepper: Stepper, due: Due) -> None:
        vars(self).update(_optimizer=optimizer, _stepper=stepper, _due=due, _left=None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Launches the kernels; the groups of what they have left to torch."""
        own = vars(self)
        if own["_left"] is None:
            own["_left"] = own["_stepper"].step(own["_due"])
        left: list[dict[str, Any]] = own["_left"]
        return left

    def __getattr__(self, name: str) -> Any:
        if name in ("grad_scale", "found_inf") and vars(self)["_stepper"].scaling_is_ours:
            return None
        return getattr(vars(self)["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_optimizer"], name, value)


def swap(optimizer: Optimizer, *, clip: ClipLevel = "exact", allow: Sequence[str] = ()) -> Swap:
    """Lets kernels step an optimizer from its next step on, in its own state.

    Args:
        optimizer: Any whose `support` gives no reason.
        clip: `exact` lets kernels clip too, and gradients are what torch would make of them; `deferred`
            clips and unscales inside the step, and until then `.grad` shows what was there before; `off`
            leaves clipping to torch.
        allow: `stochastic-rounding` rounds bf16 parameters at random, which keeps small updates.

    Raises:
        CannotSwap: If it cannot be done; nothing was changed.
        ValueError: If `clip` or `allow` are none of these.
    """
    reasons = support(optimizer)
    if reasons:
        name = type(optimizer).__name__
        raise CannotSwap(f"{name}: {'; '.join(reasons)}. Training goes on with torch's {name}.")
    return Swap(optimizer, clip, allow)


def unswap(optimizer: Optimizer) -> None:
    """Takes the kernels away from under an optimizer; without them, does nothing."""
    found = swap_of(optimizer)
    if found is not None:
        found.remove()


def swap_of(optimizer: Optimizer) -> Swap | None:
    """The swap that is in force on an optimizer."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Swap):
            return owner
    return None


def support(optimizer: Optimizer) -> list[str]:
    """Why kernels cannot step an optimizer, in words; empty if they can."""
    name, groups = type(optimizer).__name__, optimizer.param_groups
    params = [param for group in groups for param in group["params"]]
    if _known(optimizer) is None:
        known = ", ".join(sorted(each.__name__ for each in ALGORITHMS))
        return [f"there are kernels for {known}, not for {name} of {type(optimizer).__module__}"]
    found = [reason for group in groups for reason in group_refusals(group)]
    found += foreign_refusals(optimizer)
    found += [why_none(place) for place in {param.device for param in params}]
    found += sorted({_why_not(param) for param in params})
    params = [own_part(param) for param in params]
    if swap_of(optimizer) is not None:
        found.append("its steps are done by kernels already")
    if not params:
        found.append("it has no parameters")
    if not any(found) and not disjoint(params):
        found.append("two parameters share memory")
    counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    if not all(isinstance(count, torch.Tensor) and count.dtype is torch.float32 for count in counts):
        found.append("it counts steps in another type than float32")
    return list(filter(None, dict.fromkeys(found)))


def _known(optimizer: Optimizer) -> Algorithm | None:
    found = foreign(optimizer)
    return algorithm_of(optimizer) if found is None else found.algorithm


def _algorithm(optimizer: Optimizer) -> Algorithm:
    found = _known(optimizer)
    assert found is not None, "support() has looked"
    return found


def _why_not(param: torch.Tensor) -> str:
    if is_sharded(param):
        return _why_not(own_part(param))
    if type(param) not in PLAIN:
        return f"a parameter is a {type(param).__name__}"
    if all(param.dtype is not of for of, _, _ in PAIRS):
        return f"a parameter is of {param.dtype}"
    if param.grad is not None and param.grad.layout is not torch.strided:
        return "a gradient is sparse"
    if not fits([param]):
        return "a parameter has gaps in memory"
    return ""


def _is_accelerated(optimizer: Optimizer) -> bool:
    """Whether this step was called by an `AcceleratedOptimizer` with a scaler. That learns from whether
    `step` is called whether it was skipped, and a step that takes scaled gradients always is."""
    step = vars(optimizer).get("step")
    return str(getattr(step, "__module__", "")).startswith("accelerate.")
