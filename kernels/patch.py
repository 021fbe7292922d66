"""Words written into the table from a kernel's arguments."""

from __future__ import annotations

from typing import Any, ClassVar

from diagnose.kernels._structs import PATCH_MANY_VALUES, PATCH_VALUES
from diagnose.kernels.base import Arrays, Kernel, Settings


class Patch(Kernel):
    """Writes up to `VALUES` words of 8 bytes into memory, `stride` words apart."""

    entries = ("patch",)
    arrays = ()
    variants: ClassVar = {"few": {"VALUES": PATCH_VALUES}, "many": {"VALUES": PATCH_MANY_VALUES}}
    tolerance: ClassVar = {"rtol": 0.0, "atol": 0.0}

    def reference(self, arrays: Arrays, settings: Settings) -> dict[str, Any]:
        """See `Kernel.reference`: words are moved, nothing is computed."""
        return dict(arrays)
