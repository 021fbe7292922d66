"""What is copied between host and device, and over which link. `None` was not measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies between host and device, per step, and the link they take.

    Attributes:
        to_device_bytes: Bytes sent to the device, by `Tensor.to`, `cuda` and `copy_` in the loop.
        to_device_ns: Time in which the device copied from the host and computed nothing, by its own clock.
        pageable_share: Part of the bytes sent that came from memory that is not page-locked.
        constant_bytes: Part of `to_device_bytes` that was the same tensor, unchanged, in the step before.
        constant_ns: Time that sending those took.
        constant_file: Where most of them are sent; empty when unknown.
        constant_line: Its line.
        to_host_bytes: Bytes fetched from the device.
        to_host_ns: Time in which the loop waited for them.
        to_host_file: Where most of them are fetched; empty when unknown.
        to_host_line: Its line.
        link_bytes_per_s: Highest rate to the device that the driver counted, over 20 ms at a time.
        link_limit_bytes_per_s: Rate that the link, as it runs, could reach.
        link_generation: PCIe generation that the link runs at under load.
        link_max_generation: The highest that card and slot support.
        link_width: Lanes in use.
        link_max_width: Lanes that card and slot support.
    """

    to_device_bytes: float | None = None
    to_device_ns: float | None = None
    pageable_share: float | None = None
    constant_bytes: float | None = None
    constant_ns: float | None = None
    constant_file: str = ""
    constant_line: int = 0
    to_host_bytes: float | None = None
    to_host_ns: float | None = None
    to_host_file: str = ""
    to_host_line: int = 0
    link_bytes_per_s: float | None = None
    link_limit_bytes_per_s: float | None = None
    link_generation: int | None = None
    link_max_generation: int | None = None
    link_width: int | None = None
    link_max_width: int | None = None
