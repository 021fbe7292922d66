"""The loop synchronizes the device or empties its cache"""

from __future__ import annotations

from diagnose.rules._examples import profile
from diagnose.rules._lines import LineRule, at


class NeedlessSynchronize(LineRule):
    """
    ## What it means
    `torch.cuda.synchronize()` stops the host until the device is idle, so it starts the next kernels
    late; `empty_cache()` gives memory back that the next step has to ask for again.

    ## What to do
    Remove the calls. To time a step, use events; to lower the memory's peak, lower what is kept.

    ## When it is wrong
    A loop that shares the device's memory with another process.
    """

    idiom = "synchronize"
    what = "Synchronizing the device"
    assumption = "the calls are not needed"
    fix = "Remove synchronize() and empty_cache() from the loop."
    fires_on = (
        profile(other_ms=12, where=(at("torch.cuda.synchronize()", 0.1, "synchronize"),)),
        profile(other_ms=12, where=(at("torch.cuda.empty_cache()", 0.03, "synchronize"),)),
    )
    silent_on = (
        profile(),
        profile(other_ms=12, where=(at("torch.cuda.synchronize()", 0.01, "synchronize"),)),
    )
