"""Fused CUDA optimizer kernels; imported as `diagnose.kernels`.

`swap(optimizer)` lets kernels step a live optimizer of torch's, `unswap` takes them away again, `support`
says in words why they cannot. `Adam`, `AdamW`, `AdamW8bit`, `MasterAdamW`, `SGD`, `Lion` and `Lamb` are
optimizers that kernels step from the start; `clip_grad_norm_` needs none. `info()` tells what was compiled.
Importing this compiles nothing and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Adam": "_optimizers",
    "AdamW": "_optimizers",
    "AdamW8bit": "_optimizer_8bit",
    "CannotSwap": "_swap",
    "Lamb": "_optimizers",
    "Lion": "_optimizers",
    "MasterAdamW": "_optimizer_master",
    "SGD": "_optimizers",
    "clip_grad_norm_": "_clip",
    "info": "_info",
    "support": "_swap",
    "swap": "_swap",
    "unswap": "_swap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
