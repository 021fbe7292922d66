"""Updates each parameter as soon as its gradient is there, and frees the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from diagnose.actions._blame import raised_by_us
from diagnose.actions._careful import in_short
from diagnose.actions._gone import entered
from diagnose.actions._memory import refuse_unless_short
from diagnose.actions._optimizers import hooks_on, parameters_of
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

WATCHED_STEPS = 2
"""Steps that are only watched: whether anything but the optimizer's step comes between a gradient and its
use. One could be a step that a scaler skips."""


class OptimizerInBackward(Action):
    """Makes each parameter's update inside the backward pass, so that only one gradient is alive at a time.

    ## What it does
    As soon as a parameter's gradient is complete the optimizer's own code updates that parameter, with the
    optimizer's own state and settings, and the gradient is freed. The script's `optimizer.step()` finds
    nothing left to do. Schedulers, checkpoints and hooks of steps see the optimizer they know.

    ## When it takes effect
    After two steps that are only watched: if there gradients are accumulated, clipped, scaled or otherwise
    changed before the step, or the settings are, it stays out, and says so when it is tried again. Later
    it does so from the second pass on that no step of the optimizer follows.

    ## When it cannot help
    It saves the memory of the gradients and no time: named with `--only` it stays for that, unless steps
    take twice as long. A script that only reads `.grad`, say to log its norm,
    cannot be told from one that does not, and would find `None`: hence it is never tried unasked. It is
    refused for DDP, whose ranks have not exchanged a gradient at that moment, for optimizers that are not
    torch's own, and while memory is not short.

    ## What was measured
    AdamW ends with weights equal bit for bit.
    """

    safety = Safety.TRAINING
    order = 60
    excludes = frozenset({"fused-optimizer", "autocast-fp16"})
    settle_steps = WATCHED_STEPS + 1
    frees_memory = True
    hangs_on = ("optimizers",)

    def __init__(self) -> None:
        self._unfit: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()

    def check(self, job: Job) -> None:
        refuse_unless_short(job)
        if not job.optimizers:
            raise CannotApply("no optimizer has stepped")
        if any(isinstance(model, DistributedDataParallel) for model in job.models):
            raise CannotApply("under DDP a gradient is complete only when the ranks have exchanged it")
        self._refuse_unfit(job)

    def _refuse_unfit(self, job: Job) -> None:
        for optimizer in job.optimizers:
            refuse_unfit(optimizer)
            if optimizer in self._unfit:
                raise CannotApply(self._unfit[optimizer])

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        self._refuse_unfit(job)
        with ExitStack() as stack:
            tell = self._unfit.__setitem__
            entered(stack, (EarlySteps(each, tell).installed(each) for each in job.optimizers))
            yield

    def state(self, job: Job) -> Any:
        return [
            (
                hooks_on(optimizer, "step_pre", "step_post"),
                [tuple(p._post_accumulate_grad_hooks or ()) for p in parameters_of(optimizer)],
            )
            for optimizer in job.optimizers
        ]


def refuse_unfit(optimizer: Optimizer) -> None:
    """Raises `CannotApply` if the optimizer cannot update one parameter by itself."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or isinstance(optimizer, LBFGS):
        raise CannotApply(f"{kind.__qualname__} may look at all gradients at once")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise CannotApply(f"{kind.__qualname__} is to be differentiated itself")


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _largest(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the size of the largest element: exact, in whatever order it is looked for."""
    values = gradient.detach()
    values = values._values() if values.is_sparse else values
    return torch.linalg.vector_norm(values, float("inf")) if values.numel() else values.sum()


class EarlySteps:
    """One optimizer whose updates are made in the backward pass, once it has been watched.

    Args:
        unfit: Told of it, and why it stays as it is, if it does.
    """

    def __init__(self, optimizer: Optimizer, unfit: Callable[[Optimizer, str], None]) -> None:
        self._alive = ref(optimizer)  # whose hooks hold this, as do those of its parameters
        self._unfit = unfit
        self._watched = 0
        self._out = False
        self._arrived: dict[int, tuple[int, int, torch.Tensor]] = {}
        self._updated: set[int] = set()
        self._settings: Any = None
        self._step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)

    @contextmanager
    def installed(self, optimizer: Optimizer) -> Iterator[None]:
        """Hangs on the parameters and the optimizer while open."""
        with ExitStack() as stack:
            self._hang_on(optimizer, stack)
            del optimizer
            yield

    def _hang_on(self, optimizer: Optimizer, stack: ExitStack) -> None:
        stack.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
                stack.callback(handle.remove)

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        try:
            self._use(parameter)
        except Exception as error:
            if not raised_by_us(error):
                raise
            self._stay_out(f"it failed in use: {in_short(error)}")

    def _use(self, parameter: torch.Tensor) -> None:
        optimizer = self._alive()
        if self._out or optimizer is None or parameter.grad is None:
            return
        if self._watched >= WATCHED_STEPS:
            if id(parameter) in self._updated:  # no step of the optimizer has come in between
                self._stay_out("the script has come to add up gradients, or to step another optimizer")
            else:
                self._updated.add(id(parameter))
                self._update(optimizer, parameter)
            return
        if id(parameter) in self._arrived:
            self._stay_out("gradients of several backward passes are added up")
        self._settings = self._settings or _settings_of(optimizer)
        gradient = parameter.grad
        self._arrived[id(parameter)] = (id(gradient), gradient._version, _largest(gradient))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._look(optimizer, args, kwargs)
        except Exception as error:
            if not raised_by_us(error):
                raise
            self._stay_out(f"it failed in use: {in_short(error)}")

    def _look(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._updated.clear()
        if self._out or self._watched >= WATCHED_STEPS:
            return
        if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            self._stay_out("the script's GradScaler leaves it to the fused step to unscale gradients")
        if not all(map(self._is_as_it_came, parameters_of(optimizer))):
            self._stay_out("gradients are changed between the backward pass and the step, as by clipping")
        if len(args) > 1 or kwargs:
            self._stay_out("the step computes its loss itself")
        if self._settings is not None and self._settings != _settings_of(optimizer):
            self._stay_out("the settings are changed between the backward pass and the step")
        self._arrived.clear()
        self._settings = None
        self._watched += 1

    def _is_as_it_came(self, parameter: torch.Tensor) -> bool:
        """Whether nothing has changed a gradient since. What a scaler divides, and what is written to
        `.data`, no version tells of."""
        gradient = parameter.grad
        if gradient is None:
            return True
        known = self._arrived.get(id(parameter))
        if known is None or known[:2] != (id(gradient), gradient._version):
            return False
        return torch.allclose(_largest(gradient), known[2], rtol=0, atol=0, equal_nan=True)

    def _stay_out(self, reason: str) -> None:
        optimizer = self._alive()
        if not self._out and optimizer is not None:
            self._out = True
            self._unfit(optimizer, reason)

    def _update(self, optimizer: Optimizer, parameter: torch.Tensor) -> None:
        """Lets the optimizer's own code see one parameter only."""
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        single: Any = object.__new__(type(optimizer))
        vars(single).update(vars(optimizer))  # the state is the optimizer's own
        single.param_groups = [{**group, "params": [parameter]}]
        with torch.no_grad():
            self._step(single)
        parameter.grad = None
