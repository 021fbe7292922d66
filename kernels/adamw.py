"""Adam, AdamW and amsgrad in one launch."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from diagnose.kernels._structs import Feature, GroupFlag
from diagnose.kernels.base import Arrays, Kernel, Settings, one_variant_per_pair


class AdamW(Kernel):
    """Takes one step of `torch.optim.AdamW`, or of `torch.optim.Adam` without `GroupFlag.DECOUPLED`."""

    entries = ("adamw",)
    arrays = ("p", "g", "m", "v", "v_max")
    variants = one_variant_per_pair(
        amsgrad=Feature.AMSGRAD,
        copy=Feature.COPY,
        stochastic=Feature.STOCHASTIC,
        unscale=Feature.UNSCALE,
    )
    tolerance: ClassVar = {"rtol": 1.3e-6, "atol": 1e-6}

    def reference(self, arrays: Arrays, settings: Settings) -> dict[str, Any]:
        flags = settings.flags
        p, g = arrays["p"], arrays["g"] * settings.clip_coef
        if flags & GroupFlag.MAXIMIZE:
            g = -g
        if flags & GroupFlag.DECOUPLED:
            p = p * (1 - settings.lr * settings.weight_decay)
        elif settings.weight_decay:
            g = g + settings.weight_decay * p
        m = settings.beta1 * arrays["m"] + (1 - settings.beta1) * g
        v = settings.beta2 * arrays["v"] + (1 - settings.beta2) * g * g
        found = {"m": m, "v": v}
        if flags & GroupFlag.AMSGRAD:
            v = found["v_max"] = np.maximum(arrays["v_max"], v)
        root = np.sqrt(v / (1 - settings.beta2**settings.step))
        way = m / (1 - settings.beta1**settings.step) / (root + settings.eps)
        return {"p": p - settings.lr * way, **found}
