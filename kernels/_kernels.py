"""The kernels of this folder by name, looked for once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import diagnose.kernels

from diagnose.core.plugins import discover

if TYPE_CHECKING:
    from diagnose.kernels.base import Kernel


@functools.cache
def kernels() -> dict[str, Kernel]:
    """All of them."""
    from diagnose.kernels.base import Kernel

    return discover(diagnose.kernels, Kernel)


def kernel(name: str) -> Kernel:
    """The kernel of that name, with dashes."""
    return kernels()[name]
