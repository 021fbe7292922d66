"""The same tensor is sent to the device in every step"""

from __future__ import annotations

from diagnose.core.copies import Copies
from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._device import DeviceRule
from diagnose.rules._examples import profile
from diagnose.rules.base import WORTH_SHARE


class RepeatedUpload(DeviceRule):
    """
    ## What it means
    A tensor that does not change (a mask, class weights, position indices) is copied to the device anew in
    every step.

    ## What to do
    Copy it once before the loop, make it on the device, or register it with `register_buffer` so that it
    moves with the model.

    ## When it is wrong
    A tensor whose values change in place without its version being counted, such as one that shares
    memory with numpy. A constant that the loop makes anew each time, with `torch.tensor`, is not seen.
    """

    needs = ("copies.constant_ns", "copies.constant_bytes")
    explains = ("pageable-copies", "saturated-link")
    fires_on = (
        profile(
            device="cuda",
            copy_ms=10,
            copies=Copies(constant_ns=8e6, constant_bytes=4e6, constant_file="train.py", constant_line=40),
        ),
    )
    silent_on = (
        profile(device="cuda", copy_ms=10, copies=Copies(constant_ns=0.0, constant_bytes=0.0)),
        profile(device="cuda", copy_ms=10, copies=Copies(constant_ns=1e6, constant_bytes=4e3)),
    )

    def check(self, profile: Profile) -> Finding | None:
        copies = profile.copies
        spent_ns, sent = copies.constant_ns, copies.constant_bytes
        assert spent_ns is not None and sent is not None
        lost_ns = min(spent_ns, profile.spent_ns(Phase.COPY))
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"{format_bytes(sent)} that never change are sent to the device in every step.",
            lost_ns={Phase.COPY: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=lost_ns,
            assumption="the tensor stays on the device",
            evidence=(
                f"The same storage, unchanged since the step before, is sent again: {format_ms(spent_ns)}.",
            ),
            fix="Move the tensor to the device once, before the loop.",
            file=copies.constant_file,
            line=copies.constant_line,
        )
