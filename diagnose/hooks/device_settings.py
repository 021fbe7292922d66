"""Which device the training thread computes on, and how torch is set up for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._cuda import accelerator_of, index_of
from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class DeviceSettingsHook(Hook):
    """Looks once, after a few steps, at the model's device and what decides its speed.

    On the training thread: which device is current is a thread's own; whoever reads the device's state from
    another thread gets it from here. Where the script has not initialised CUDA by then, nothing is asked:
    asking would do it.
    """

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        def inspect() -> None:
            import torch

            device = accelerator_of(models := recorder.met.live_modules())
            if device is not None:
                recorder.facts["accelerator"] = device.type
            if torch.cuda.is_initialized():
                recorder.facts["device"] = device_now(index_of(models))

        with added(recorder.looks.inspections, inspect):
            yield


def device_now(index: int | None = None) -> dict[str, Any]:
    """Returns what a CUDA device is, by `core.device.Device`'s names and those that identify it.

    Needs CUDA initialised. What this version of torch does not tell is `None`.

    Args:
        index: Its number; else the calling thread's, as where a script keeps no model on any.
    """
    import torch

    index = torch.cuda.current_device() if index is None else index
    properties = torch.cuda.get_device_properties(index)
    bus = getattr(properties, "pci_bus_id", None)
    address = (getattr(properties, "pci_domain_id", 0), bus, getattr(properties, "pci_device_id", 0))
    uuid = getattr(properties, "uuid", None)
    return {
        "index": index,
        "uuid": str(uuid) if uuid is not None else None,
        "pci_address": "{:08x}:{:02x}:{:02x}.0".format(*address) if bus is not None else None,
        "hip": bool(getattr(torch.version, "hip", None)),
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "total_bytes": properties.total_memory,
        "tf32": _told(_matmul_tf32),
        "cudnn_tf32": _told(_cudnn_tf32),
        "expandable_segments": "expandable_segments:true" in _allocator_settings().lower().replace(" ", ""),
    }


def _told(ask: Callable[[], bool]) -> bool | None:
    """Older names are asked only where there are no newer: torch 2.9 warns of them, and torch refuses to
    answer by them once a script has set the newer ones."""
    try:
        return ask()
    except (AttributeError, RuntimeError):
        return None


def _matmul_tf32() -> bool:
    from torch.backends import cuda

    precision = getattr(cuda.matmul, "fp32_precision", None)
    return bool(cuda.matmul.allow_tf32 if precision is None else precision == "tf32")


def _cudnn_tf32() -> bool:
    from torch.backends import cudnn

    precision = getattr(getattr(cudnn, "conv", None), "fp32_precision", None)
    return bool(cudnn.allow_tf32 if precision is None else precision == "tf32")


def _allocator_settings() -> str:
    """The settings in force: a script may change them after it has started."""
    from torch import _C

    settings = getattr(_C, "_accelerator_getAllocatorSettings", None)
    in_force = settings() if settings is not None else ""
    return in_force or ",".join(os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
