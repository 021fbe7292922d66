"""Lion in one launch."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from diagnose.kernels._structs import Feature, GroupFlag
from diagnose.kernels.base import Arrays, Kernel, Settings, one_variant_per_pair


class Lion(Kernel):
    """Takes one step of Lion (Chen et al. 2023), which moves by the sign of an interpolated momentum."""

    entries = ("lion",)
    arrays = ("p", "g", "m")
    variants = one_variant_per_pair(copy=Feature.COPY, stochastic=Feature.STOCHASTIC)
    tolerance: ClassVar = {"rtol": 1.3e-6, "atol": 1e-6}

    def reference(self, arrays: Arrays, settings: Settings) -> dict[str, Any]:
        g = arrays["g"] * settings.clip_coef
        if settings.flags & GroupFlag.MAXIMIZE:
            g = -g
        way = np.sign(settings.beta1 * arrays["m"] + (1 - settings.beta1) * g)
        kept = arrays["p"] * (1 - settings.lr * settings.weight_decay)
        return {
            "p": kept - settings.lr * way,
            "m": settings.beta2 * arrays["m"] + (1 - settings.beta2) * g,
        }
