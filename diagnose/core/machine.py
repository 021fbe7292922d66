"""What a machine's devices reach, measured: the roof that a step's rates are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A rate from several measurements.

    Attributes:
        median: Per second.
        low: The slowest of them.
        high: The fastest.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What one device reaches, with the driver and the torch it was measured with.

    Attributes:
        device: As the driver names it; `cpu` for the processor.
        driver: Version of its driver; of a CPU, its model and the threads that torch used.
        torch: Version.
        copy_bytes: Bytes read and written per second by a large copy.
        flops: Floating point operations per second of a large matrix product, by dtype. One that the device
            does not support is absent.
        measured_unix: When.
    """

    device: str
    driver: str
    torch: str
    copy_bytes: Rate
    flops: Mapping[str, Rate] = field(default_factory=dict)
    measured_unix: float = 0.0
