"""What the devices of this machine reach, as it was measured: one small file per device, in the state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from diagnose.core.deep_window import Rates
from diagnose.core.machine import DeviceRates, Rate
from diagnose.store.gains import ledger_path

VERSION = 1


def rates_folder() -> Path:
    """Returns where they lie: beside the ledger of predictions."""
    return ledger_path().parent / "rates"


def keep_rates(rates: DeviceRates) -> Path:
    """Writes what a device reaches, in place of what was known of the same device, driver and torch.

    Raises:
        OSError: If it cannot be written.
    """
    key = "\n".join((rates.device, rates.driver, rates.torch))
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = rates_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path, beside = folder / f"{name}.json", folder / f".{name}.{os.getpid()}"
    beside.write_text(json.dumps({"version": VERSION, **asdict(rates)}, indent=1), encoding="utf-8")
    beside.replace(path)
    return path


def kept_rates() -> list[DeviceRates]:
    """Returns all that can be read, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(rates_folder().glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                kept = json.loads(path.read_text(encoding="utf-8"))
                if kept.pop("version") == VERSION:
                    flops = {str(dtype): Rate(**rate) for dtype, rate in kept.pop("flops").items()}
                    found.append(
                        DeviceRates(**{**kept, "copy_bytes": Rate(**kept["copy_bytes"]), "flops": flops})
                    )
    return sorted(found, key=lambda rates: -rates.measured_unix)


def read_rates(device: str, dtype: str) -> Rates | None:
    """Returns the newest rates of a device for products of one dtype; `None` where there are none."""
    for rates in kept_rates():
        flops = rates.flops.get(dtype or "float32")
        if rates.device == device and flops is not None:
            return Rates(device=device, copy_bytes_per_s=rates.copy_bytes.median, flops_per_s=flops.median)
    return None
