"""The loop logs, prints or writes files in each step"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.phases import Phase
from diagnose.core.profile import SourceLine
from diagnose.rules._examples import profile
from diagnose.rules._lines import STRAGGLER, LineRule, at

BARS = ("set_postfix", "set_description")
"""Calls that draw a progress bar anew."""

REFRESHED = replace(at("bar.update(1)", 0.1, "log"), via="tqdm/std.py:1325 tqdm.refresh")


class LoggingIo(LineRule):
    """
    ## What it means
    Printing, logging or writing takes part of every step: formatting text, flushing, syncing to the
    disk, or talking to a server, while the model waits.

    ## What to do
    Log every N steps, keep the values until then, and leave flushing to the end or to a background
    thread. On a GPU, logging a tensor also waits for the device. A progress bar is drawn anew by each
    `set_postfix`: call it every N steps, or with `refresh=False`.

    ## When it is wrong
    Output that another program acts upon step by step.
    """

    explains = (STRAGGLER,)
    idiom = "log"
    beside = ("save", "wait")
    what = "Logging"
    assumption = "the loop logs rarely enough for its cost to vanish"
    fix = (
        "Log more rarely, every 100 steps or so, without flush or fsync, or hand the values to a "
        "background thread."
    )
    code = "if step % 100 == 0: ..."
    fix_beside = "Or leave out flush and fsync, or hand the values to a background thread."
    fires_on = (
        profile(other_ms=12, where=(at("print(step, loss)", 0.1, "log"),)),
        profile(other_ms=12, where=(at("file.write(row)", 0.03, "log", "metric"),)),
        profile(other_ms=12, where=(at("pbar.set_postfix(loss=loss.item())", 0.1, "log", "sync"),)),
        profile(other_ms=12, where=(REFRESHED,)),
    )
    silent_on = (
        profile(),
        profile(other_ms=12, where=(at("print(step)", 0.01, "log"),)),
        profile(other_ms=12, where=(at("loss.item()", 0.1, "sync"),)),
        profile(evaluation_ms=10, where=(at("log(row)", 0.1, "log", phase=Phase.EVALUATION),)),
    )

    def cure(self, line: SourceLine) -> tuple[str, str]:
        """See `LineRule.cure`. A progress bar can be drawn more rarely."""
        if any(call in line.text for call in BARS) and not line.every:
            return (
                "Set the bar's text every 100 steps, with refresh=False, and read values only then.",
                "if step % 100 == 0: bar.set_postfix(loss=loss.item(), refresh=False)",
            )
        if line.via.startswith(("tqdm/", "rich/")):
            return (
                "Draw the progress bar more rarely: give it mininterval=5, or update it every 100 steps.",
                "",
            )
        return super().cure(line)
