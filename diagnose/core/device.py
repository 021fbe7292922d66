"""Plain readings of an accelerator. Every one is optional: `None` was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diagnose.core.phases import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the device and its allocator say over the measured steps.

    Attributes:
        name: As the driver names it.
        capability: Compute capability, such as `(8, 0)`.
        busy_share: Part of the wall time in which at least one kernel of ours ran.
        utilisation_share: Likewise of anybody's, as the driver counts it.
        sm_share: Part of the multiprocessors that had work, averaged over the time in which a kernel ran;
            collectives, which take few by design, are left out.
        idle_ns: Nanoseconds per step in which no kernel ran, by what the training thread did meanwhile.
        idle_at_most_ns: Likewise the most that it can have been. Where the device is behind the host, that
            is next to nothing; where it is not, nearly all of a phase: then the host sets the pace.
        launch_bound_ns: Nanoseconds per step in which no kernel ran and the host was in an operation, but
            in no call that waits for the device.
        num_kernels: Kernels launched per step.
        fp32_flops_per_s: Highest rate of float32 arithmetic outside tensor cores.
        bandwidth_bytes_per_s: Highest rate of its memory.
        total_bytes: Memory of the device.
        peak_bytes: Most that tensors ever held.
        reserved_bytes: Most that torch's allocator took from the driver.
        allocated_bytes: What tensors held when `reserved_bytes` was reached.
        inactive_split_bytes: Reserved, free, and in pieces of larger blocks.
        expandable_segments: Whether the allocator may make its blocks longer.
        alloc_retries: How often the allocator had to give memory back and ask again, over the run.
        retry_ns: Nanoseconds per step that such retries took.
        out_of_memory: How often it had none to give at all, over the run.
        tensor_core_share: Part of the kernel time in kernels that use tensor cores.
        matmul_share: Part of the busy time in matrix products and convolutions.
        layout_share: Part of the busy time in conversions between memory layouts.
        tf32: Whether float32 matrix products may use TF32.
        cudnn_tf32: Whether float32 convolutions may.
        autocast_dtype: The type that autocast computes in; empty where it is off.
        clock_share: Clock of the cores relative to their highest, on average while kernels ran.
        throttle_share: Part of the time in which power or heat held the clock down.
        throttle_reasons: Part of the time in which each reason did, by NVML's names for its bits:
            `SwPowerCap`, `SwThermalSlowdown`, `HwThermalSlowdown`, `HwPowerBrakeSlowdown`, `HwSlowdown`.
        power_w: Power that the card took on average, in watts.
        power_limit_share: The limit of power that is set, relative to the card's default.
        temperature_c: Its highest temperature.
        uncorrected_errors: Errors of its memory that ECC found and could not correct, since the driver was
            loaded.
        other_processes: Processes of others that hold memory on the device.
        other_sm_share: Part of the wall time in which their kernels ran.
    """

    name: str = ""
    capability: tuple[int, int] | None = None
    busy_share: float | None = None
    utilisation_share: float | None = None
    sm_share: float | None = None
    idle_ns: Mapping[Phase, float] | None = None
    idle_at_most_ns: Mapping[Phase, float] | None = None
    launch_bound_ns: float | None = None
    num_kernels: float | None = None
    fp32_flops_per_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    total_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    inactive_split_bytes: int | None = None
    expandable_segments: bool | None = None
    alloc_retries: int | None = None
    retry_ns: float | None = None
    out_of_memory: int | None = None
    tensor_core_share: float | None = None
    matmul_share: float | None = None
    layout_share: float | None = None
    tf32: bool | None = None
    cudnn_tf32: bool | None = None
    autocast_dtype: str | None = None
    clock_share: float | None = None
    throttle_share: float | None = None
    throttle_reasons: Mapping[str, float] | None = None
    power_w: float | None = None
    power_limit_share: float | None = None
    temperature_c: int | None = None
    uncorrected_errors: int | None = None
    other_processes: int | None = None
    other_sm_share: float | None = None
