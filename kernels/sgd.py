"""SGD with momentum, dampening and nesterov in one launch."""

from __future__ import annotations

from typing import Any, ClassVar

from diagnose.kernels._structs import Feature, GroupFlag
from diagnose.kernels.base import Arrays, Kernel, Settings, one_variant_per_pair


class Sgd(Kernel):
    """Takes one step of `torch.optim.SGD`.

    `beta1` is the momentum and `beta2` the dampening. In step 1 of a row its buffer is not read but set.
    """

    entries = ("sgd",)
    arrays = ("p", "g", "m")
    variants = one_variant_per_pair(
        copy=Feature.COPY, stochastic=Feature.STOCHASTIC, unscale=Feature.UNSCALE
    )
    tolerance: ClassVar = {"rtol": 1.3e-6, "atol": 1e-6}

    def reference(self, arrays: Arrays, settings: Settings) -> dict[str, Any]:
        p, g = arrays["p"], arrays["g"] * settings.clip_coef
        if settings.flags & GroupFlag.MAXIMIZE:
            g = -g
        g = g + settings.weight_decay * p
        if "m" not in arrays:
            return {"p": p - settings.lr * g}
        m = g if settings.step == 1 else settings.beta1 * arrays["m"] + (1 - settings.beta2) * g
        way = g + settings.beta1 * m if settings.flags & GroupFlag.NESTEROV else m
        return {"p": p - settings.lr * way, "m": m}
