"""The loop waits for a tensor's value in each step"""

from __future__ import annotations

from diagnose.rules._examples import profile
from diagnose.rules._lines import LineRule, at


class HostSync(LineRule):
    """
    ## What it means
    `.item()`, `.cpu()`, `float(tensor)`, a condition on a tensor: Python needs a value, so the host
    waits until the device has computed it, and then has to fill the device's queue anew. On a CPU there
    is nothing to wait for, and such a line costs only its own work.

    ## What to do
    Keep values as tensors and read them every N steps; accumulate the loss with `running +=
    loss.detach()`.

    ## When it is wrong
    A loop whose next step depends on the value. On a device whose host is always far ahead, the wait is
    where the device's time shows, and nothing is won by moving it.
    """

    idiom = "sync"
    beside = ("log", "metric", "clip", "ema")
    what = "Reading tensors back"
    assumption = "what the lines were sampled in is not needed in each step"
    fix = "Accumulate on the device, and read the value every 100 steps."
    code = "running += loss.detach()"
    fires_on = (
        profile(other_ms=12, where=(at("running += loss.item()", 0.1, "sync"),)),
        profile(other_ms=12, where=(at("values = out.cpu().numpy()", 0.04, "sync"),)),
    )
    silent_on = (
        profile(),
        profile(other_ms=12, where=(at("running += loss.item()", 0.01, "sync"),)),
        profile(other_ms=12, where=(at("print(loss.item())", 0.1, "log", "sync"),)),
    )
