"""The link to the device runs below what it could"""

from __future__ import annotations

from diagnose.core.copies import Copies
from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_ms, format_share
from diagnose.rules._device import DeviceRule
from diagnose.rules._examples import profile

MIN_SHARE = 0.04
"""Of the step, in which the device waits for a copy."""


def linked(ms: float, width: int) -> Profile:
    """A loop that waits so long of 100 ms for copies, over so many lanes of 16."""
    copies = Copies(
        to_device_ns=ms * 1e6,
        link_width=width,
        link_max_width=16,
        link_generation=4,
        link_max_generation=4,
    )
    return profile(device="cuda", copy_ms=ms, copies=copies)


class DegradedLink(DeviceRule):
    """
    ## What it means
    The PCIe link between host and device runs with fewer lanes, or in an older generation, than both ends
    support, also under load. Copies take longer in the same proportion.

    ## What to do
    Reseat the card, move it to a slot with all lanes, look at the BIOS setting and at risers and cables;
    on a cloud machine, ask for another one.

    ## When it is wrong
    A link that falls back to save power between one kernel and the next: it is read only while kernels run,
    and of those readings the best counts.
    """

    needs = (
        "copies.to_device_ns",
        "copies.link_width",
        "copies.link_max_width",
        "copies.link_generation",
        "copies.link_max_generation",
    )
    explains = ("saturated-link",)
    fires_on = (linked(30, 4),)
    silent_on = (linked(30, 16), linked(1, 4))

    def check(self, profile: Profile) -> Finding | None:
        copies = profile.copies
        width, most = copies.link_width, copies.link_max_width
        generation, newest = copies.link_generation, copies.link_max_generation
        assert width and most and generation and newest and copies.to_device_ns is not None
        spent_ns = min(copies.to_device_ns, profile.spent_ns(Phase.COPY))
        # A generation doubles the rate of a lane.
        speed = min(1.0, width / most) * min(1.0, 2.0 ** (generation - newest))
        lost_ns = spent_ns * (1 - speed)
        if not lost_ns or spent_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"The link to the device runs at {format_share(speed)} of its speed: {width} of {most}"
            f" lanes, generation {generation} of {newest}.",
            lost_ns={Phase.COPY: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=lost_ns,
            assumption="copies are as much faster as the link could be",
            evidence=(
                f"{width} of {most} lanes and generation {generation} of {newest}, read under load.",
                f"The device waits {format_ms(spent_ns)} of each step for copies.",
            ),
            fix="Have the slot, the riser and the BIOS looked at, or use another machine.",
        )
