"""What makes a device's figures unfit to judge the script by. These are notes: never a fault of its."""

from __future__ import annotations

from diagnose.core.profile import Profile
from diagnose.core.units import format_share

MIN_OTHER_SHARE = 0.03
"""A desktop or a monitor draws now and then; training notices nothing of it."""


def traps(profile: Profile) -> tuple[str, ...]:
    """Returns a note for each circumstance outside the script that the figures suffer from."""
    device = profile.device
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
