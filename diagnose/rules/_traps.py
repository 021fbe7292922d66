"""What of a device is no fault of the script's: its figures are unfit to judge it by, or it is broken."""

from __future__ import annotations

from diagnose.core.device import Device
from diagnose.core.profile import Profile
from diagnose.core.units import format_share

MIN_OTHER_SHARE = 0.03
"""A desktop or a monitor draws now and then; training notices nothing of it."""


def traps(profile: Profile) -> tuple[str, ...]:
    """Returns a note for each circumstance outside the script that figures, or results, suffer from."""
    return (*_broken_memory(profile.device), *_neighbours(profile.device))


def _broken_memory(device: Device) -> tuple[str, ...]:
    if not device.uncorrected_errors:
        return ()
    errors = "an error" if device.uncorrected_errors == 1 else f"{device.uncorrected_errors} errors"
    return (
        f"the device's memory had {errors} that ECC could not correct since its driver was loaded: see"
        " nvidia-smi -q -d ECC,ROW_REMAPPER, and have the card checked.",
    )


def _neighbours(device: Device) -> tuple[str, ...]:
    if not device.other_processes:
        return ()
    share = device.other_sm_share
    who = "1 other process" if device.other_processes == 1 else f"{device.other_processes} other processes"
    if share is None:
        return (f"{who} had memory on the device; if they computed, the times suffer.",)
    if share < MIN_OTHER_SHARE:
        return ()
    return (
        f"{who} computed on the device {format_share(share)} of the time: times are longer than the"
        " script's own, and so is what each finding would win.",
    )
