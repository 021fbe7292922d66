"""A driver's `libnvidia-ml.so.1` for tests, compiled from `emulation/nvml.cpp`; real `pynvml` calls it."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.emulated import CACHE

SOURCE = Path(__file__).parent / "emulation" / "nvml.cpp"
NAME = "libnvidia-ml.so.1"

UUID = "GPU-5ba1c5ef-0d45-5a1b-b3b0-8f8c2f1c5a0d"
IDENTITY = {"index": 0, "uuid": UUID.removeprefix("GPU-"), "pci_address": "00000000:65:00.0", "hip": False}

HEALTHY = {
    "uuid": UUID,
    "count": 1,
    "busy_percent": 93,
    "power_mw": 390_000,
    "power_limit_mw": 400_000,
    "default_power_limit_mw": 400_000,
    "sm_mhz": 1380,
    "max_sm_mhz": 1410,
    "max_memory_mhz": 1215,
    "reasons": 0,
    "pcie_generation": 4,
    "max_pcie_generation": 4,
    "pcie_width": 16,
    "max_pcie_width": 16,
    "received_kib_per_s": 2_000_000,
    "sent_kib_per_s": 1_000,
    "uncorrected_errors": 0,
    "temperature_c": 61,
    "num_cores": 6912,
    "memory_bus_bits": 5120,
}
"""A busy A100 that nothing ails."""


@functools.cache
def folder() -> Path:
    """Compiles the library, unless that was done before, and returns its folder, for `LD_LIBRARY_PATH`."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:24]
    place = CACHE / f"nvml-{key}"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    library = place / NAME
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            made = Path(scratch) / NAME
            command = ("g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{NAME}")
            subprocess.run([*command, str(SOURCE), "-o", str(made)], check=True, capture_output=True)
            made.replace(library)
    return place


def tell(path: Path, *lines: str, without: Sequence[str] = (), **changes: float) -> Path:
    """Writes what the library shall say, a healthy device but for the changes; returns the file.

    Args:
        path: The file, for `NVML_STUB`.
        lines: What is no figure: see the top of `nvml.cpp`.
        without: Figures that this device does not have.
        changes: Figures.
    """
    figures = {name: value for name, value in {**HEALTHY, **changes}.items() if name not in without}
    text = "\n".join([*(f"{name} {value}" for name, value in figures.items()), *lines])
    new = path.with_suffix(".new")
    new.write_text(text + "\n")
    new.replace(path)  # it is read at any moment
    return path
