"""Gradients multiplied in place, or not touched where the factor is 1."""

from __future__ import annotations

from typing import Any, ClassVar

from diagnose.kernels.base import MANY, Arrays, Kernel, Settings


class Scale(Kernel):
    """Multiplies all gradients by a factor that lies on the device. Factor 1 writes nothing."""

    entries = ("scale",)
    arrays = ("g",)
    variants: ClassVar = {"all": {}, "many": MANY}
    tolerance: ClassVar = {"rtol": 1.2e-7, "atol": 0.0}

    def reference(self, arrays: Arrays, settings: Settings) -> dict[str, Any]:
        return {"g": arrays["g"] * settings.clip_coef}
