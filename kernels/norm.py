"""The norm of all gradients, and the factor that clips them, in one launch."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from diagnose.kernels.base import MANY, Arrays, Kernel, Settings


class Norm(Kernel):
    """Finds `torch.nn.utils.get_total_norm` of all gradients and what `clip_grad_norm_` multiplies them by.

    The bits of the result depend on the gradients alone: on no grid, no device and no alignment.
    """

    entries = ("gradient_norm",)
    arrays = ("g",)
    variants: ClassVar = {"all": {}, "many": MANY}
    tolerance: ClassVar = {"rtol": 3e-7, "atol": 0.0}

    def reference(self, arrays: Arrays, settings: Settings) -> dict[str, Any]:
        """See `Kernel.reference`; returns `norm`, `clip_coef` and `found_inf`."""
        norm = float(np.sqrt(np.sum(np.square(arrays["g"]))))
        coef = np.minimum(settings.max_norm / (norm + 1e-6), 1.0)
        return {"norm": norm, "clip_coef": float(coef), "found_inf": not np.isfinite(arrays["g"]).all()}
