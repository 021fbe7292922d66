"""The loop waits for a tensor's value in each step"""

from __future__ import annotations

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.rules._examples import profile
from diagnose.rules._lines import STRAGGLER, LineRule, at

OF_EACH = ".tolist("
"""Reads each number of a tensor. What else reads one takes no time where nothing is waited for: what the
sampler sees there was spent just before, as Python hears signals between calls only."""


class HostSync(LineRule):
    """
    ## What it means
    `.item()`, `.cpu()`, `float(tensor)`, a condition on a tensor: Python needs a value, so the host
    waits until the device has computed it, and then has to fill the device's queue anew. On a CPU there
    is nothing to wait for, and a value costs a microsecond or two: only `.tolist()` counts there, which
    makes an object of each number.

    ## What to do
    Keep values as tensors and read them every N steps; accumulate the loss with `running +=
    loss.detach()`. What the model itself needs on the host, such as the lengths for
    `pack_padded_sequence`, keep there from the start: let the loader hand it over as a tensor of the CPU.

    ## When it is wrong
    A loop whose next step depends on the value. On a device whose host is always far ahead, the wait is
    where the device's time shows, and nothing is won by moving it.
    """

    explains = (STRAGGLER,)
    idiom = "sync"
    beside = ("log", "metric", "clip", "ema", "save", "wait")
    what = "Reading tensors back"
    assumption = "what the lines were sampled in is not needed in each step"
    fix = "Accumulate on the device, and read the value every 100 steps."
    code = "running += loss.detach()"
    fires_on = (
        profile(device="cuda", other_ms=12, where=(at("running += loss.item()", 0.1, "sync"),)),
        profile(device="cuda", other_ms=12, where=(at("values = out.cpu().numpy()", 0.04, "sync"),)),
        profile(device="cuda", where=(at("x = pack(x, lengths.cpu())", 0.1, "sync", phase=Phase.FORWARD),)),
        profile(other_ms=12, where=(at("rows = labels.tolist()", 0.1, "sync"),)),
    )
    silent_on = (
        profile(),
        profile(other_ms=12, where=(at("return action.item()", 0.1, "sync"),)),
        profile(device="cuda", other_ms=12, where=(at("running += loss.item()", 0.01, "sync"),)),
        profile(other_ms=12, where=(at("print(loss.item())", 0.1, "log", "sync"),)),
    )

    def lines(self, profile: Profile) -> tuple[SourceLine, ...]:
        lines = super().lines(profile)
        if profile.run.device == "cpu":
            return tuple(line for line in lines if OF_EACH in line.text)
        return lines

    def cure(self, line: SourceLine) -> tuple[str, str]:
        """See `LineRule.cure`. The model needs a value in each step."""
        if line.phase is not Phase.FORWARD:
            return self.fix, self.code
        return (
            "Keep what the model needs on the host there from the start, as a tensor of the CPU that the"
            " loader hands over; else compute it with tensor operations.",
            "",
        )
