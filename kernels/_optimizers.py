"""Optimizers with torch's signatures and state that are stepped by kernels from their first step on.

Where kernels cannot step, on a CPU for one, the plain implementation of each does: torch's own, or the one
here for those that torch does not have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from diagnose.kernels._algorithms import ALGORITHMS, LAMB, LION, Algorithm, algorithm_of
from diagnose.kernels._clip import CLIPPING, places
from diagnose.kernels._swap import ClipLevel, Swap, swap_of
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

Closure = Callable[[], torch.Tensor]


class SteppedByKernels(Optimizer):
    """Puts kernels under an optimizer when it is made, and again under its copies and pickles.

    Attributes:
        algorithm: How it is stepped.
        clip: What becomes of gradient clipping, as for `swap`; it is torch's if nothing else is asked for.
        allow: What is allowed beside torch's arithmetic, as for `swap`.
    """

    algorithm: ClassVar[Algorithm]
    clip: ClipLevel = "off"
    allow: tuple[str, ...] = ()

    def __init__(
        self, *args: Any, clip: ClipLevel = "off", allow: Sequence[str] = (), **kwargs: Any
    ) -> None:
        self.clip, self.allow = clip, tuple(allow)
        super().__init__(*args, **kwargs)
        self._put_under()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "clip": self.clip, "allow": self.allow}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._put_under()

    def _put_under(self) -> None:
        if algorithm_of(self) is not None and swap_of(self) is None:  # a subclass may compute anything
            Swap(self, self.clip, self.allow)


def _with_how(theirs: type[Optimizer]) -> inspect.Signature:
    """The signature of torch's class with what `SteppedByKernels` takes beside."""
    signature = inspect.signature(theirs)
    ours = inspect.signature(SteppedByKernels).parameters
    return signature.replace(
        parameters=[*signature.parameters.values(), *(ours[name] for name in ("clip", "allow"))]
    )


class Adam(SteppedByKernels, torch.optim.Adam):
    """`torch.optim.Adam`, by kernels."""

    algorithm = ALGORITHMS[torch.optim.Adam]
    __signature__ = _with_how(torch.optim.Adam)


class AdamW(SteppedByKernels, torch.optim.AdamW):
    """`torch.optim.AdamW`, by kernels."""

    algorithm = ALGORITHMS[torch.optim.AdamW]
    __signature__ = _with_how(torch.optim.AdamW)


class SGD(SteppedByKernels, torch.optim.SGD):
    """`torch.optim.SGD`, by kernels."""

    algorithm = ALGORITHMS[torch.optim.SGD]
    __signature__ = _with_how(torch.optim.SGD)


class Lion(SteppedByKernels):
    """Lion (Chen et al. 2023): moves by the sign of an interpolated momentum; weight decay is decoupled.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate; a third to a tenth of AdamW's.
        betas: Of the interpolation, and of the momentum.
        weight_decay: Three to ten times AdamW's.
        maximize: Climbs.
        clip: As for `swap`.
        allow: As for `swap`.
    """

    algorithm = LION

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        clip: ClipLevel = "off",
        allow: Sequence[str] = (),
    ) -> None:
        check_numbers(lr=float(lr), weight_decay=weight_decay, betas=betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, clip=clip, allow=allow)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """Takes one step; see `torch.optim.Optimizer.step`."""
        loss = evaluated(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                way = state["exp_avg"].lerp(grad, 1 - beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(way * group["lr"])
                state["exp_avg"].lerp_(grad, 1 - beta2)
        return loss


class Lamb(SteppedByKernels):
    """LAMB (You et al. 2020) as apex's FusedLAMB computes it.

    Gradients are clipped to `max_grad_norm` together, inside the step; without kernels, in memory.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        betas: Of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Part of the update, whose norm it enters.
        bias_correction: Whether moments are corrected for having begun at zero.
        grad_averaging: Whether the gradient enters the first moment by `1 - beta1`, not by 1.
        max_grad_norm: What the norm of all gradients is clipped to; 0 for no clipping.
        use_nvlamb: Whether parameters without weight decay are adapted too.
        maximize: Climbs.
        clip: As for `swap`, of what the script clips beside.
        allow: As for `swap`.
    """

    algorithm = LAMB

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        maximize: bool = False,
        clip: ClipLevel = "off",
        allow: Sequence[str] = (),
    ) -> None:
        check_numbers(
            lr=float(lr), weight_decay=weight_decay, betas=betas, eps=eps, max_grad_norm=max_grad_norm
        )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
            "maximize": maximize,
        }
        super().__init__(params, defaults, clip=clip, allow=allow)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> torch.Tensor | None:  # type: ignore[override]
        """Takes one step; see `torch.optim.Optimizer.step`."""
        loss = evaluated(closure)
        self.clip_in_step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    _lamb_step(group, self.state[p], p, p.grad)
        return loss

    def clip_in_step(self) -> None:
        """Finds by how much this step has to clip all gradients, and hands it to what makes the step; where
        no kernels do, clips in memory."""
        max_norm = self.defaults["max_grad_norm"]
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None]
        if not max_norm or not grads:
            return
        swap = swap_of(self)
        if swap is None:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
            return
        grad_scale = getattr(self, "grad_scale", None)
        if grad_scale is None and swap.pending is not None and swap.pending.is_of(grads):
            grad_scale = swap.pending.grad_scale
        outcome_4 = CLIPPING.outcome(grads, max_norm, epsilon=0.0, grad_scale=grad_scale)
        if outcome_4 is None:
            norm = torch.nn.utils.get_total_norm(grads).float()
            if grad_scale is not None:
                norm = norm / grad_scale.to(norm.device)
            outcome_4 = torch.stack([norm, torch.clamp(max_norm / norm, max=1.0)])
        swap.defer(grads, places(grads), outcome_4, max_norm=max_norm, coef=outcome_4[1])


def _lamb_step(group: dict[str, Any], state: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
    if not state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    beta1, beta2 = group["betas"]
    if group["maximize"]:
        grad = -grad
    state["step"] += 1
    state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    corrects, step = group["bias_correction"], float(state["step"])
    correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if corrects else (1.0, 1.0)
    root = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
    way = (state["exp_avg"] / correction1).div_(root).add_(p, alpha=group["weight_decay"])
    ratio = torch.ones((), dtype=torch.float32, device=p.device)
    if group["weight_decay"] != 0 or group["use_nvlamb"]:
        norm_p, norm_way = p.float().norm(), way.float().norm()
        ratio = torch.where((norm_p > 0) & (norm_way > 0), norm_p / norm_way, ratio)
    p.sub_(way * (ratio * group["lr"]))


def evaluated(closure: Closure | None) -> torch.Tensor | None:
    """What the closure returns, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_numbers(*, betas: tuple[float, float], **numbers: float) -> None:
    """Looks whether an optimizer's numbers make sense.

    Raises:
        ValueError: If one does not, by its name.
    """
    for name, number in numbers.items():
        if not number >= 0.0:
            raise ValueError(f"{name} is {number}; it must not be negative")
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas are {betas}; each must be at least 0 and less than 1")
