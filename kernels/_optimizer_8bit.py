"""AdamW with moments of one byte each as an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diagnose.kernels._adamw_8bit_state import decoded, encode, in_order_of
from diagnose.kernels._algorithms import ADAMW_8BIT
from diagnose.kernels._layout import fits
from diagnose.kernels._optimizers import Closure, SteppedByKernels, check_numbers, evaluated
from diagnose.kernels._swap import ClipLevel, swap_of
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class AdamW8bit(SteppedByKernels):
    """AdamW whose moments take a byte each; `state_dict` holds them as `torch.optim.AdamW` does.

    A checkpoint of either loads into the other; what comes from AdamW is rounded to codes.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled.
        maximize: Climbs.
        clip: As for `swap`.
        allow: As for `swap`.
    """

    algorithm = ADAMW_8BIT

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        clip: ClipLevel = "off",
        allow: Sequence[str] = (),
    ) -> None:
        check_numbers(lr=float(lr), weight_decay=weight_decay, betas=betas, eps=eps)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, clip=clip, allow=allow)

    def _put_under(self) -> None:
        if swap_of(self) is None:
            super()._put_under()
            self.register_state_dict_post_hook(_as_adamw_saves)
            self.register_load_state_dict_post_hook(_into_codes)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> torch.Tensor | None:
        """Takes one step; see `torch.optim.Optimizer.step`."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _adamw_8bit_step(group, self.state[p], p, p.grad)
        return loss


def _moments(state: dict[str, Any], p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if "exp_avg" in state:  # the script has put a state of torch's in its place
        return in_order_of(p, state.pop("exp_avg")), in_order_of(p, state.pop("exp_avg_sq"))
    if "exp_avg_codes" not in state:
        return torch.zeros_like(p, dtype=torch.float32), torch.zeros_like(p, dtype=torch.float32)
    m = decoded(state["exp_avg_codes"], state["exp_avg_scales"], signed=True, like=p)
    root = decoded(state["exp_avg_sq_codes"], state["exp_avg_sq_scales"], signed=False, like=p)
    return m, root * root


def _set_moments(state: dict[str, Any], p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    names = ADAMW_8BIT.moments({})
    held = [state.get(name) for name in names]
    if not all(isinstance(each, torch.Tensor) for each in held) or not fits([m, *ADAMW_8BIT.alike(held)]):
        state.update({name: ADAMW_8BIT.make(place, p) for place, name in enumerate(names)})
    encode(m, state["exp_avg_codes"], state["exp_avg_scales"], signed=True)
    encode(v.sqrt(), state["exp_avg_sq_codes"], state["exp_avg_sq_scales"], signed=False)


def _as_adamw_saves(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = dict(saved["state"])
    for index, held in state.items():
        if "exp_avg_codes" in held:
            m, v = _moments(held, params[index])
            state[index] = {"step": held["step"], "exp_avg": m, "exp_avg_sq": v}
    return {**saved, "state": state}


def _into_codes(optimizer: Optimizer) -> None:
    for p, state in optimizer.state.items():
        if "exp_avg" in state:
            _set_moments(state, p, *_moments(state, p))


def _adamw_8bit_step(
    group: dict[str, Any], state: dict[str, Any], p: torch.Tensor, grad: torch.Tensor
) -> None:
    beta1, beta2 = group["betas"]
    grad = -grad.float() if group["maximize"] else grad.float()
    m, v = _moments(state, p)
    state.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
    state["step"] += 1
    step = float(state["step"])
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
    kept = p.float() * (1 - group["lr"] * group["weight_decay"])
    p.copy_(kept - m / (1 - beta1**step) / root * group["lr"])
    _set_moments(state, p, m, v)
