"""AdamW on fp32 masters of parameters in 16 bits as an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from diagnose.kernels._algorithms import ADAMW_MASTER
from diagnose.kernels._masters import has_master, made_from, take_over
from diagnose.kernels._optimizers import Closure, SteppedByKernels, check_numbers, evaluated
from diagnose.kernels._swap import ClipLevel
from torch.optim import adamw
from torch.optim.optimizer import ParamsT

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class MasterAdamW(SteppedByKernels):
    """AdamW that keeps each parameter of 16 bits in fp32 too and steps that: the parameter is its rounding.

    State is that of `torch.optim.AdamW` with moments in fp32, and `master_param` for each parameter of 16
    bits. A checkpoint loads into `torch.optim.AdamW`, which rounds the moments and does not look at the
    masters; one of AdamW's loads here, where masters begin as the parameters are. What others write into a
    parameter, as loading a model does, is taken over into its master, unless they write through `.data`.

    Args:
        params: Parameters or groups of them; those in fp32 are stepped as by AdamW.
        lr: Learning rate.
        betas: Of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled.
        amsgrad: Whether the largest second moment so far is used.
        maximize: Climbs.
        clip: As for `swap`.
    """

    algorithm = ADAMW_MASTER

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        clip: ClipLevel = "off",
    ) -> None:
        check_numbers(lr=float(lr), weight_decay=weight_decay, betas=betas, eps=eps)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults, clip=clip)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`, which would round all to the parameters' type."""
        super().load_state_dict(state_dict)
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for place, p in zip(places, params, strict=True):
            given = state_dict["state"].get(place, {})
            for name in (*_MOMENTS, ADAMW_MASTER.master):
                if name in given:
                    self.state[p][name] = given[name].to(p.device, torch.float32, copy=True)
            if given and has_master(p):
                self.state[p].setdefault(ADAMW_MASTER.master, made_from(p))

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> torch.Tensor | None:
        """Takes one step; see `torch.optim.Optimizer.step`."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _step(group, self.state[p], p, p.grad)
        return loss


def _step(group: dict[str, Any], state: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
    names = ADAMW_MASTER.moments(group)
    if not state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        state |= {name: ADAMW_MASTER.make(place, p) for place, name in enumerate(names)}
        if has_master(p):
            state[ADAMW_MASTER.master] = made_from(p)
    master = state.get(ADAMW_MASTER.master, p)
    if master is not p:
        take_over(master, p)
    beta1, beta2 = group["betas"]
    adamw.adamw(
        [master],
        [grad.float()],
        [state[names[0]]],
        [state[names[1]]],
        [state[name] for name in names[2:]],
        [state["step"]],
        foreach=False,
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )
    if master is not p:
        p.copy_(master)
