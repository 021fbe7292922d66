"""One NVIDIA device as its driver sees it, through NVML. Nothing here needs CUDA, or touches it.

The library is passed in: `pynvml`, whose names have changed over the years.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from diagnose.launch.kin import Kin

Figures = dict[str, Any]
"""Figures by name. One that is absent could not be read."""

SUCCESS, NOT_FOUND, FUNCTION_NOT_FOUND = 0, 6, 13

REFUSED = frozenset({2, 3, 4, 25, 26})
"""Invalid argument, not supported, no permission, version mismatch, deprecated: never answered here."""

GONE = frozenset({1, 9, 15, 16, 18, 28})
"""Uninitialized, driver not loaded, GPU lost, reset required, driver replaced, GPU not found."""

REASONS = {
    "GpuIdle": 0x01,
    "ApplicationsClocksSetting": 0x02,
    "SwPowerCap": 0x04,
    "HwSlowdown": 0x08,
    "SyncBoost": 0x10,
    "SwThermalSlowdown": 0x20,
    "HwThermalSlowdown": 0x40,
    "HwPowerBrakeSlowdown": 0x80,
    "DisplayClockSetting": 0x100,
}
"""Bits of why the clock is what it is, by NVML's names since its first version."""

SM_CLOCK, MEMORY_CLOCK = 1, 2
TEMPERATURE_OF_GPU = 0
UNCORRECTED, SINCE_BOOT = 1, 0
RECEIVED = 1

MOST_PERCENT = 100
"""NVML's utilisation of a process is at times a number without meaning, far above this."""


class Unreadable(Exception):
    """The device's readings cannot be had, now and for the rest of the run; the message says why."""


class Nvml:
    """One device, opened.

    Args:
        library: `pynvml`, initialised.
        identity: What the training thread says of its device, see `hooks.device_settings`.

    Raises:
        Unreadable: If it cannot be found, or is a slice of a device.
    """

    def __init__(self, library: Any, identity: Mapping[str, Any]) -> None:
        self._library = library
        self._error = library.NVMLError
        self._mismatch = getattr(library, "NVMLLibraryMismatchError", library.NVMLError)
        self._absent: set[tuple[Any, ...]] = set()
        self._kin = Kin()
        self._seen_us = 0
        self._handle = self._find(identity)
        mode = self._ask(("nvmlDeviceGetMigMode",))
        if mode is not None and mode[0]:
            raise Unreadable("the device is divided by MIG, and NVML's figures are of the whole of it")

    # -- which device

    def _find(self, identity: Mapping[str, Any]) -> Any:
        uuid, address = identity.get("uuid"), identity.get("pci_address")
        if uuid:
            bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
            handle = self._handle_by("nvmlDeviceGetHandleByUUID", f"GPU-{bare}")
            if handle is not None:
                return handle
            if self._handle_by("nvmlDeviceGetHandleByUUID", f"MIG-{bare}") is not None:
                raise Unreadable("the device is a slice made by MIG, and NVML's figures are of the whole")
        handle = self._handle_by("nvmlDeviceGetHandleByPciBusId", address) if address else None
        if handle is None and not uuid and not address:
            handle = self._by_number(int(identity.get("index", 0)))
        if handle is None:
            raise Unreadable(f"NVML knows no device {uuid or address or identity.get('index')}")
        return handle

    def _by_number(self, index: int) -> Any:
        """For a torch that does not identify devices: CUDA numbers them in another order than NVML."""
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        name = visible[index] if index < len(visible) else str(index)
        if name.startswith("GPU-"):
            return self._handle_by("nvmlDeviceGetHandleByUUID", name)
        same_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if name.isdigit() and (same_order or self._library.nvmlDeviceGetCount() == 1):
            return self._handle_by("nvmlDeviceGetHandleByIndex", int(name) if same_order else 0)
        return None

    def _handle_by(self, function: str, key: Any) -> Any:
        try:
            return getattr(self._library, function)(key)
        except self._error as error:
            if error.value in GONE - {28}:
                raise Unreadable(str(error)) from error
            return None

    # -- figures

    def constants(self) -> Figures:
        """Reads what does not change while a process runs."""
        ask = self._ask
        highest = ("nvmlDeviceGetMaxClockInfo",)
        figures = {
            "max_sm_hz": _times(1e6, ask(highest, SM_CLOCK)),
            "max_memory_hz": _times(1e6, ask(highest, MEMORY_CLOCK)),
            "default_power_limit_w": _times(1e-3, ask(("nvmlDeviceGetPowerManagementDefaultLimit",))),
            "max_pcie_generation": ask(("nvmlDeviceGetMaxPcieLinkGeneration",)),
            "max_pcie_width": ask(("nvmlDeviceGetMaxPcieLinkWidth",)),
            "num_cores": ask(("nvmlDeviceGetNumGpuCores",)),
            "memory_bus_bits": ask(("nvmlDeviceGetMemoryBusWidth",)),
        }
        return {name: value for name, value in figures.items() if value is not None}

    def read(self) -> Figures:
        """Reads what changes.

        One of the figures, the link's traffic, is counted over 20 ms, which pass in here.

        Raises:
            Unreadable: If the driver or the device is gone.
        """
        ask = self._ask
        utilisation = ask(("nvmlDeviceGetUtilizationRates",))
        figures = {
            "busy_share": utilisation.gpu / 100 if utilisation is not None else None,
            "power_w": _times(1e-3, ask(("nvmlDeviceGetPowerUsage",))),
            "power_limit_w": _times(
                1e-3, ask(("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit"))
            ),
            "sm_hz": _times(1e6, ask(("nvmlDeviceGetClockInfo",), SM_CLOCK)),
            "reasons": self._reasons(),
            "pcie_generation": ask(("nvmlDeviceGetCurrPcieLinkGeneration",)),
            "pcie_width": ask(("nvmlDeviceGetCurrPcieLinkWidth",)),
            "to_device_bytes_per_s": _times(1024, ask(("nvmlDeviceGetPcieThroughput",), RECEIVED)),
            "uncorrected_errors": ask(("nvmlDeviceGetTotalEccErrors",), UNCORRECTED, SINCE_BOOT),
            "temperature_c": ask(("nvmlDeviceGetTemperature",), TEMPERATURE_OF_GPU),
            **self._others(),
        }
        figures = {name: value for name, value in figures.items() if value is not None}
        if not figures:
            raise Unreadable("NVML answers none of the questions about this device")
        return figures

    def _reasons(self) -> Sequence[str] | None:
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        bits = self._ask(names)
        return None if bits is None else [name for name, bit in REASONS.items() if bits & bit]

    def _others(self) -> Figures:
        """Processes on the device that are none of this run's.

        Inside a container NVML may give the numbers that processes have outside: then ours is not among
        them, and whose they are cannot be told. Unless there is one, which nobody has here: this one is on
        the device, so it is that. One that is there, and not ours, may serve several, as MPS does.
        """
        name = "nvmlDeviceGetComputeRunningProcesses"
        found = self._ask((f"{name}_v3", f"{name}_v2", name))
        pids = {process.pid for process in found or ()}
        others = {pid for pid in pids if not self._kin.has(pid)}
        if os.getpid() not in pids and (len(pids) != 1 or others):
            return {}
        if not others:
            return {"other_processes": 0, "other_sm_share": 0.0}
        share = self._busy_with(others)
        return {"other_processes": len(others), **({} if share is None else {"other_sm_share": share})}

    def _busy_with(self, pids: set[int]) -> float | None:
        """Returns the part of the time since the last look in which the device ran these processes."""
        samples = self._ask(("nvmlDeviceGetProcessUtilization",), self._seen_us)
        if samples is None:
            return None
        self._seen_us = max((sample.timeStamp for sample in samples), default=self._seen_us)
        percents: dict[int, list[int]] = {}
        for sample in samples:
            if sample.pid in pids and sample.smUtil <= MOST_PERCENT:
                percents.setdefault(sample.pid, []).append(sample.smUtil)
        return min(1.0, sum(sum(each) / len(each) for each in percents.values()) / 100)

    def _ask(self, names: Sequence[str], *args: Any) -> Any:
        """Calls the first of several names that this library and driver have, with the device.

        Returns:
            The answer; `None` where the driver has none. What it refuses once is not asked again.
        """
        if (names, args) in self._absent:
            return None
        for name in names:
            function = getattr(self._library, name, None)
            if function is None:
                continue
            try:
                return function(self._handle, *args)
            except self._mismatch:
                continue
            except self._error as error:
                if error.value == FUNCTION_NOT_FOUND:
                    continue
                if error.value in GONE:
                    raise Unreadable(str(error)) from error
                if error.value in (SUCCESS, NOT_FOUND):
                    return []  # no samples since the last look
                if error.value in REFUSED:
                    break
                return None  # perhaps next time
        self._absent.add((names, args))
        return None


def _times(unit: float, number: float | None) -> float | None:
    return None if number is None else unit * number
