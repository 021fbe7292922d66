"""Plain readings of an accelerator. Every one is optional: `None` was not measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the device and its allocator say over the measured steps.

    Attributes:
        name: As the driver names it.
        capability: Compute capability, such as `(8, 0)`.
        busy_share: Part of the wall time in which at least one kernel ran.
        total_bytes: Memory of the device.
        peak_bytes: Most that tensors ever held.
        reserved_bytes: Most that torch's allocator took from the driver.
        allocated_bytes: What tensors held when `reserved_bytes` was reached.
        inactive_split_bytes: Reserved, free, and in pieces of larger blocks.
        alloc_retries: How often the allocator had to give memory back and ask again, over the run.
        retry_ns: Nanoseconds per step that such retries took.
        tensor_core_share: Part of the kernel time in kernels that use tensor cores.
        matmul_share: Part of the kernel time in matrix products and convolutions.
        layout_share: Part of the kernel time in conversions between memory layouts.
        tf32: Whether float32 products may use TF32.
        autocast_dtype: The type that autocast computes in; empty where it is off.
        clock_share: Clock of the cores relative to their highest, on average.
        throttle_share: Part of the time in which power or heat held the clock down.
        cudnn_benchmark: Whether cuDNN tries its algorithms out.
    """

    name: str = ""
    capability: tuple[int, int] | None = None
    busy_share: float | None = None
    total_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    inactive_split_bytes: int | None = None
    alloc_retries: int | None = None
    retry_ns: float | None = None
    tensor_core_share: float | None = None
    matmul_share: float | None = None
    layout_share: float | None = None
    tf32: bool | None = None
    autocast_dtype: str | None = None
    clock_share: float | None = None
    throttle_share: float | None = None
    cudnn_benchmark: bool | None = None
