"""Makes one optimizer step on copies: of parameters, of gradients, and of the optimizer itself."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from diagnose.actions._untouched import CannotCheck, is_ours

MOST_BYTES = 1 << 28
"""Parameters that are copied for a check; of larger models some of each group, the largest left out."""

MADE_UP_GRADIENT = 1e-2
"""Standard deviation of a gradient where the script has cleared its own already."""


class ShadowUpdate:
    """One optimizer of the job, to make steps beside the training.

    Only torch's own optimizers: of another class nobody knows what its `step` reaches besides groups and
    state.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        kind = type(optimizer)
        if not kind.__module__.startswith("torch.optim.") or isinstance(optimizer, LBFGS):
            raise CannotCheck(f"steps of {kind.__qualname__} cannot be made beside the training")
        self.optimizer = optimizer
        groups = [[p for p in group["params"] if self._is_trained(p)] for group in optimizer.param_groups]
        self.chosen = _affordable(groups)
        generator = torch.Generator().manual_seed(0)
        self.gradients = {
            id(parameter): (
                _made_up(parameter, generator)
                if parameter.grad is None
                else parameter.grad.detach().clone()
            )
            for parameter in chain(*self.chosen)
        }

    def _is_trained(self, parameter: torch.Tensor) -> bool:
        """Whether the script's own steps change it, as far as can be told: where others have a state, one
        with neither state nor gradient is frozen."""
        state = self.optimizer.state
        return parameter.grad is not None or bool(state.get(parameter)) or not any(state.values())

    def step(self, dtype: torch.dtype | None = None) -> dict[str, list[torch.Tensor]]:
        """Makes a step with the optimizer as it is set now.

        Hooks of actions run; the script's and torch's process-wide ones do not. An action's hook must work
        on the optimizer that it is given.

        Args:
            dtype: Computes in this type.

        Returns:
            The parameters, and each kind of state, afterwards.
        """
        shadow: Any = object.__new__(type(self.optimizer))
        vars(shadow).update(vars(self.optimizer))
        shadow.state = defaultdict(dict)
        shadow.param_groups = []
        copies: list[torch.Tensor] = []
        for group, chosen in zip(self.optimizer.param_groups, self.chosen, strict=True):
            params = [self._copied(parameter, shadow.state, dtype) for parameter in chosen]
            copies += params
            rest = {name: _duplicate(value, None) for name, value in group.items() if name != "params"}
            shadow.param_groups.append({"params": params, **rest})
        _make_step(shadow)
        after: dict[str, list[torch.Tensor]] = {"parameters": [p.detach() for p in copies]}
        for parameter in copies:
            for name, value in shadow.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    after.setdefault(name, []).append(value.to(parameter.device))
        return after

    def _copied(self, parameter: torch.Tensor, states: Any, dtype: torch.dtype | None) -> torch.Tensor:
        made: torch.Tensor = _duplicate(parameter, dtype).requires_grad_()
        made.grad = _duplicate(self.gradients[id(parameter)], dtype)
        state = self.optimizer.state.get(parameter)
        if state is not None:
            # Counters keep their type: they are counted, not computed.
            states[made] = {
                name: _duplicate(value, dtype if getattr(value, "shape", None) == parameter.shape else None)
                for name, value in state.items()
            }
        return made


def _make_step(shadow: Any) -> None:
    step = type(shadow).step
    if getattr(step, "hooked", False):  # torch's wrapper, which runs hooks: the script's, too
        step = step.__wrapped__
    args: tuple[Any, ...] = (shadow,)
    kwargs: dict[str, Any] = {}
    for hook in _ours(shadow._optimizer_step_pre_hooks):
        changed = hook(shadow, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    step(*args, **kwargs)
    for hook in _ours(shadow._optimizer_step_post_hooks):
        hook(shadow, args, kwargs)


def _ours(hooks: dict[int, Any]) -> Iterator[Any]:
    return (hook for hook in list(hooks.values()) if is_ours(hook))


def _duplicate(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    made = value.detach().clone()
    return made.to(dtype) if dtype is not None and made.is_floating_point() else made


def _made_up(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    numbers = torch.randn(parameter.shape, generator=generator, device="cpu") * MADE_UP_GRADIENT
    made = torch.empty_like(parameter, requires_grad=False)  # strides and all
    return made.copy_(numbers)


def _affordable(groups: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Chooses parameters of every group, the smallest first, as many as may be copied."""
    left = MOST_BYTES
    chosen: list[set[int]] = [set() for _ in groups]
    by_size = [sorted(params, key=lambda p: p.numel() * p.element_size()) for params in groups]
    for rank, row in enumerate(zip_longest(*by_size)):
        for mine, parameter in zip(chosen, row, strict=True):
            if parameter is not None:
                num_bytes = parameter.numel() * parameter.element_size()
                if rank == 0 or num_bytes <= left:
                    mine.add(id(parameter))
                    left -= num_bytes
    return [[p for p in params if id(p) in mine] for params, mine in zip(groups, chosen, strict=True)]
