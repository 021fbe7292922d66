"""Heat, or a power limit below the card's own, slows the device down"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.core.units import format_share
from diagnose.rules._device import DeviceRule, busy_ns, sets_the_pace
from diagnose.rules._examples import card, profile
from diagnose.rules._phases import shared

FAULTS = {
    "SwThermalSlowdown": "the card is too hot",
    "HwThermalSlowdown": "the card is too hot",
    "HwPowerBrakeSlowdown": "the power supply asks for less",
    "HwSlowdown": "heat or the power supply, by the hardware",
}
"""Reasons that no healthy machine has. Reaching the card's own power limit is none: large products do."""

POWER_CAP = "SwPowerCap"

REDUCED = 0.95
"""A power limit below this part of the default was set by somebody."""

MIN_REASON_SHARE = 0.2
"""Part of the time: a moment's slowdown is no fault."""

MIN_SHARE = 0.03

LOW, EXPECTED = 0.4, 0.8
"""Kernels that wait for memory do not gain from a faster clock of the cores."""


class ThrottledDevice(DeviceRule):
    """
    ## What it means
    The device lowers its clock, and says why: heat, the power supply, or a power limit that was set below
    the card's default. Every kernel takes longer in proportion.

    ## What to do
    Heat: look at fans, dust, airflow, and the neighbour slots. Power: look at the limit with
    `nvidia-smi -q -d POWER` and restore the default. In a cloud, ask for another machine.

    ## When it is wrong
    A limit that the operator wants. It reads the driver's reasons and the clock, never the temperature:
    clocks fall long before its limit. No run on a GPU has tried it yet.
    """

    needs = ("device.throttle_reasons", "device.clock_share", "device.busy_share")
    fires_on = (
        profile(device=card(clock_share=0.6, throttle_reasons={"HwThermalSlowdown": 0.9})),
        profile(device=card(clock_share=0.7, throttle_reasons={"SwPowerCap": 0.95}, power_limit_share=0.6)),
    )
    silent_on = (
        profile(device=card()),
        profile(device=card(clock_share=0.8, throttle_reasons={"SwPowerCap": 0.95})),
        profile(device=card(clock_share=0.6, throttle_reasons={"GpuIdle": 0.9})),
        profile(device=card(clock_share=0.6, throttle_reasons={"HwThermalSlowdown": 0.05})),
        profile(device=card(clock_share=0.6, throttle_reasons={"HwSlowdown": 0.9}, busy_share=0.3)),
    )

    def check(self, profile: Profile) -> Finding | None:
        device = profile.device
        assert device.throttle_reasons is not None and device.clock_share is not None
        words = dict(FAULTS)
        limit = device.power_limit_share
        if limit is not None and limit < REDUCED:
            words[POWER_CAP] = f"its power limit is set to {format_share(limit)} of the default"
        reasons = {name: share for name, share in device.throttle_reasons.items() if name in words}
        if not reasons or not sets_the_pace(profile):
            return None
        worst = max(reasons, key=lambda name: reasons[name])
        slower = 1 - device.clock_share
        lost_ns = EXPECTED * slower * busy_ns(profile)
        if reasons[worst] < MIN_REASON_SHARE or lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"The device runs at {format_share(device.clock_share)} of its clock: {words[worst]}.",
            lost_ns=shared(profile, lost_ns),
            low_ns=LOW * slower * busy_ns(profile),
            high_ns=slower * busy_ns(profile),
            assumption="most kernels are as much faster as the clock would be",
            evidence=(
                f"The driver gave {worst} as the reason {format_share(reasons[worst])} of the time.",
                f"The clock was {format_share(device.clock_share)} of the highest on average.",
            ),
            fix="Restore cooling or power: nvidia-smi -q -d PERFORMANCE,POWER,CLOCK shows the reasons now.",
        )
