"""Measures what the devices of this machine reach: a large copy, and a large matrix product per dtype."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch

from diagnose.actions.tf32_matmul import float32_products
from diagnose.core.machine import DeviceRates, Rate

REPEATS = 9
"""Odd, so that the median is a measurement."""

COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""Far more than caches hold; 256 MiB is, on a CPU, beyond most."""

COPIES = {"cpu": 1, "cuda": 16}
"""Copies that are timed together: one takes less than a millisecond at some TB/s, and to launch it and to
wait for it takes some 20 us beside that."""

LONG_ENOUGH_S = {"cpu": 0.05, "cuda": 0.005}
"""A product this long is large enough for its rate to grow no further with its size."""

SIZES = tuple(1 << power for power in range(8, 15))
DTYPES = {
    "cpu": ("float32", "bfloat16"),
    "cuda": ("float64", "float32", "tf32", "bfloat16", "float16"),
}


def devices() -> list[str]:
    """Returns the devices to measure: the CPU, and each CUDA device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index}" for index in range(count))]


def measure(device: str) -> DeviceRates:
    """Measures one device. Takes some seconds, in which nothing else should run on it."""
    kind = torch.device(device).type
    flops = {}
    for dtype in DTYPES[kind]:
        rate = _product(device, kind, dtype)
        if rate is not None:
            flops[dtype] = rate
    return DeviceRates(
        device=name_of(device),
        driver=_driver(kind),
        torch=str(torch.__version__),
        copy_bytes=_copy(device, kind),
        flops=flops,
        measured_unix=time.time(),
    )


def name_of(device: str) -> str:
    """Returns a device's name as runs know it."""
    return "cpu" if torch.device(device).type == "cpu" else torch.cuda.get_device_name(device)


def _driver(kind: str) -> str:
    if kind == "cuda":
        return f"CUDA {torch.version.cuda}"
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {torch.get_num_threads()} threads"


def _copy(device: str, kind: str) -> Rate:
    source = torch.ones(COPY_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)

    def work() -> None:
        for _ in range(COPIES[kind]):
            target.copy_(source)

    return _rate(COPIES[kind] * 2 * COPY_BYTES[kind], list(_times(work, device)))


def _product(device: str, kind: str, dtype: str) -> Rate | None:
    """Returns the rate of a product large enough; `None` where the device has none of that type."""
    real = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    try:
        with float32_products("high" if dtype == "tf32" else "highest"):
            for size in SIZES:
                # Not of ones: a card at its limit of power runs faster where few bits change.
                left = torch.randn(size, size, device=device, dtype=real)
                right, out = torch.randn_like(left), torch.empty_like(left)
                work = partial(torch.mm, left, right, out=out)
                work()
                _wait(device)
                took = next(_times(work, device))
                if took >= LONG_ENOUGH_S[kind] or size == SIZES[-1]:
                    return _rate(2 * size**3, list(_times(work, device)))
    except (RuntimeError, NotImplementedError):  # not supported, or no memory for it
        return None
    return None


def _times(work: Callable[[], object], device: str) -> Iterator[float]:
    work()  # makes the pages, picks the algorithm
    _wait(device)
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        _wait(device)
        yield time.perf_counter() - begun


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _rate(amount: float, times_s: list[float]) -> Rate:
    return Rate(median=amount / median(times_s), low=amount / max(times_s), high=amount / min(times_s))
