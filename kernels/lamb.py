"""LAMB in two launches."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from diagnose.kernels._structs import Feature, GroupFlag
from diagnose.kernels.base import Arrays, Kernel, Settings, one_variant_per_pair


class Lamb(Kernel):
    """Takes one step of LAMB (You et al. 2020) as apex computes it.

    `clip_coef` is the global clipping of gradients, which `gradient_norm` finds in a launch before.
    """

    entries = ("lamb_moments", "lamb_update")
    arrays = ("p", "g", "m", "v")
    variants = one_variant_per_pair(copy=Feature.COPY, stochastic=Feature.STOCHASTIC)
    tolerance: ClassVar = {"rtol": 2e-6, "atol": 1e-6}

    def reference(self, arrays: Arrays, settings: Settings) -> dict[str, Any]:
        flags, p = settings.flags, arrays["p"]
        g = arrays["g"] * settings.clip_coef * (-1 if flags & GroupFlag.MAXIMIZE else 1)
        share = 1.0 if flags & GroupFlag.NO_GRAD_AVERAGING else 1 - settings.beta1
        m = settings.beta1 * arrays["m"] + share * g
        v = settings.beta2 * arrays["v"] + (1 - settings.beta2) * g * g
        corrects = not flags & GroupFlag.NO_BIAS_CORRECTION
        correction1 = 1 - settings.beta1**settings.step if corrects else 1.0
        correction2 = 1 - settings.beta2**settings.step if corrects else 1.0
        way = m / correction1 / (np.sqrt(v / correction2) + settings.eps) + settings.weight_decay * p
        norm_p, norm_way = np.linalg.norm(p), np.linalg.norm(way)
        adapts = settings.weight_decay != 0 or flags & GroupFlag.ALWAYS_ADAPT
        ratio = norm_p / norm_way if adapts and norm_p > 0 and norm_way > 0 else 1.0
        return {"p": p - settings.lr * ratio * way, "m": m, "v": v}
