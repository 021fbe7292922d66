"""AdamW with moments of one byte each, in one launch."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from diagnose.kernels._structs import Feature, GroupFlag
from diagnose.kernels.base import Arrays, Kernel, Settings, one_variant_per_pair
from numpy.typing import NDArray

BLOCK_ELEMENTS = 256
"""Elements that share a scale."""


class AdamW8bit(Kernel):
    """Takes one step of AdamW on decoded moments and codes them again.

    Tolerance is that of the parameters. `m` comes back within a 32nd of itself or 2^-12 of its block's
    largest, the root of `v` within a 64th of itself or 2^-12 of its block's largest.
    """

    entries = ("adamw_8bit",)
    arrays = ("p", "g", "m", "v")
    variants = one_variant_per_pair(copy=Feature.COPY, stochastic=Feature.STOCHASTIC)
    tolerance: ClassVar = {"rtol": 1.3e-6, "atol": 1e-6}

    def reference(self, arrays: Arrays, settings: Settings) -> dict[str, Any]:
        """See `Kernel.reference`; `m` and `v` go in and come out decoded."""
        p, g = arrays["p"], arrays["g"] * settings.clip_coef
        if settings.flags & GroupFlag.MAXIMIZE:
            g = -g
        if settings.flags & GroupFlag.DECOUPLED:
            p = p * (1 - settings.lr * settings.weight_decay)
        elif settings.weight_decay:
            g = g + settings.weight_decay * p
        m = settings.beta1 * arrays["m"] + (1 - settings.beta1) * g
        v = settings.beta2 * arrays["v"] + (1 - settings.beta2) * g * g
        root = np.sqrt(v / (1 - settings.beta2**settings.step))
        way = m / (1 - settings.beta1**settings.step) / (root + settings.eps)
        return {"p": p - settings.lr * way, "m": m, "v": v}


def code_values(*, signed: bool) -> NDArray[np.float32]:
    """What each of the 256 codes stands for in parts of its block's scale, of `m` or of the root of `v`."""
    codes, fraction = (np.arange(128), 4) if signed else (np.arange(256), 5)
    steps, binades = 2**fraction, 7
    even = codes * 2.0 ** -(binades + fraction)
    normal = (1 + codes % steps / steps) * 2.0 ** (codes // steps - 1 - binades)
    values = np.where(codes < steps, even, normal).astype(np.float32)
    return np.concatenate([values, -values]) if signed else values
