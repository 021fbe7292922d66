"""A model's forward pass under autocast, while the rest of the loop computes as before."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from diagnose.actions._nested import mapped
from diagnose.actions._routes import models_with_weights
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job, Route

PROBE_SIZES = (256, 1024)
"""Sides of the square matrices that are multiplied for the probe: small layers and large ones."""

CUDA_SIZES, CUDA_PRODUCTS = (1024, 4096), 20
"""Likewise on a GPU, and how many products it is waited for: to begin one, and to wait, takes longer than a
smaller one does."""

MIN_RATE = 1.1
"""Products must become so much faster at least: casting weights and activations takes time, too."""

HOPELESS_RATE = 0.5
"""Small products this slow end the probe: where a type is emulated, a large one takes seconds."""

SINGLE = (torch.float32,)
LOW = (torch.bfloat16, torch.float16)


class AutocastInUse(RuntimeError):
    """The script's own autocast is in force where ours would begin."""


def refuse_lower_precision(job: Job) -> None:
    """Raises `CannotApply` if the models compute in other types than float32 already."""
    models = models_with_weights(job)
    dtypes = {p.dtype for model in models for p in model.parameters()}
    if others := sorted(str(dtype) for dtype in dtypes - set(SINGLE)):
        raise CannotApply(f"some parameters are {others[0].removeprefix('torch.')}")
    for model in models:
        for module in model.modules():
            if "quantized" in type(module).__module__:
                raise CannotApply(f"{type(module).__name__} is quantized")


def under_autocast(device: str, dtype: torch.dtype) -> Route:
    """Returns a route that calls a model under autocast and gives floats back, as Accelerate does."""

    def route(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_autocast_enabled(device):
            raise AutocastInUse("the script uses autocast itself")
        with torch.autocast(device, dtype=dtype):
            result = call(*args, **kwargs)
        return mapped(_to_float, result)

    return route


def _to_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in LOW else tensor


def on_its_gpu(job: Job) -> AbstractContextManager[Any]:
    """Makes the GPU that the job's models are on the current one, which `cuda` means; nothing on a CPU."""
    known = job.device == "cuda" and job.torch_device is not None
    return torch.cuda.device(job.torch_device) if known else nullcontext()


def refuse_slower(device: str, dtype: torch.dtype) -> None:
    """Raises `CannotApply` if products of matrices are hardly faster in `dtype` on this device."""
    rates: list[float] = []
    sizes = CUDA_SIZES if device == "cuda" else PROBE_SIZES
    if device == "cuda":  # the clock of a card that was idle rises in tens of milliseconds, else float32's
        _seconds(sizes[-1], "nn", device, torch.float32)
    for size in sizes:
        for layout in ("nn", "nt", "tn"):
            single, low = (_seconds(size, layout, device, each) for each in (torch.float32, dtype))
            rates.append(single / low)
        rate = statistics.geometric_mean(rates)
        if rate < (MIN_RATE if size == sizes[-1] else HOPELESS_RATE):
            name = str(dtype).removeprefix("torch.")
            raise CannotApply(
                f"products of matrices in {name} run at {rate:.2f} times the rate of float32 here"
            )


def _seconds(size: int, layout: str, device: str, dtype: torch.dtype) -> float:
    """Returns the time of one product: forward, of a gradient of the input, or of one of the weight."""
    try:
        left, right = _operands(size, layout, device, dtype)
        num = CUDA_PRODUCTS if device == "cuda" else 1
        times = []
        with torch.no_grad():
            for products in (1, num, num):
                begun = time.perf_counter()
                for _ in range(products):
                    left @ right
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append((time.perf_counter() - begun) / products)
    except torch.OutOfMemoryError as error:
        raise CannotApply("there is no memory to time products in") from error
    return min(times[1:])


def _operands(size: int, layout: str, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)  # the script's own must not move
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    return left.t() if layout[0] == "t" else left, right.t() if layout[1] == "t" else right
