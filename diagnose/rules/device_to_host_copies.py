"""Results are fetched from the device in every step"""

from __future__ import annotations

from diagnose.core.copies import Copies
from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._device import DeviceRule
from diagnose.rules._examples import profile

MIN_SHARE = 0.04
"""Of the step."""

MIN_BYTES = 1 << 16
"""Per step. A few numbers, such as a loss, make the loop wait too, but that is `host-sync`."""


class DeviceToHostCopies(DeviceRule):
    """
    ## What it means
    The loop copies whole tensors (predictions, images, embeddings) from the device to the host in every
    step, and waits until the device has computed them and the link has carried them.

    ## What to do
    Keep sums on the device and fetch them every hundred steps; fetch with `non_blocking=True` into pinned
    memory and look at them a step later.

    ## When it is wrong
    Where the host needs the values to decide on the next step.
    """

    needs = ("copies.to_host_bytes", "copies.to_host_ns")
    explains = ("host-sync",)
    fires_on = (
        profile(
            device="cuda",
            copy_ms=20,
            copies=Copies(to_host_bytes=3e7, to_host_ns=18e6, to_host_file="train.py", to_host_line=52),
        ),
        profile(device="cuda", other_ms=20, copies=Copies(to_host_bytes=3e7, to_host_ns=18e6)),
    )
    silent_on = (
        profile(device="cuda", copy_ms=20, copies=Copies(to_host_bytes=4.0, to_host_ns=18e6)),
        profile(device="cuda", copy_ms=1, copies=Copies(to_host_bytes=3e6, to_host_ns=1e6)),
    )

    def check(self, profile: Profile) -> Finding | None:
        copies = profile.copies
        fetched, spent_ns = copies.to_host_bytes, copies.to_host_ns
        assert fetched is not None and spent_ns is not None
        # `.to("cpu")` is charged to the copies, `.cpu()` to the line that it stands in.
        copying_ns = min(spent_ns, profile.spent_ns(Phase.COPY))
        waiting_ns = min(spent_ns - copying_ns, profile.spent_ns(Phase.OTHER))
        lost_ns = copying_ns + waiting_ns
        if fetched < MIN_BYTES or lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"{format_bytes(fetched)} are fetched from the device in every step:"
            f" {format_share(lost_ns / profile.step_time_ns)} of the time.",
            lost_ns={Phase.COPY: copying_ns, Phase.OTHER: waiting_ns},
            low_ns=0.3 * lost_ns,
            high_ns=lost_ns,
            assumption="results are fetched rarely, or while the device computes",
            evidence=(
                f"{format_bytes(fetched)} per step come from the device, and the loop waits"
                f" {format_ms(spent_ns)} for them.",
            ),
            fix="Keep results on the device and fetch them now and then.",
            file=copies.to_host_file,
            line=copies.to_host_line,
        )
