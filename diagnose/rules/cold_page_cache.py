"""The first reading of the data came from a cold disk"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._supply import main_loader
from diagnose.rules._worker_examples import WELL_FED, fed_by
from diagnose.rules.base import Rule

READS_FELL = 3.0
"""Bytes read per step in the run's first quarter, relative to its last."""

WAITS_FELL = 2.0
"""Likewise the wait."""

MIN_READ_BYTES = 256 * 1024
"""Per step; a few pages of code are read at the beginning of any run."""

MIN_SHARE = 0.04
"""Of the mean step."""


def cooled(**stats: float) -> Profile:
    """A run that waited for a cold disk at first, but for these."""
    cold = {"early_wait_ns": 70e6, "late_wait_ns": 2e6, "early_read_bytes": 9e6, "late_read_bytes": 1e4}
    return fed_by(data_wait_ms=20, fetch_ms=100, stats={**cold, **stats})


class ColdPageCache(Rule):
    """
    ## What it means
    At the beginning of the run the loop waited for data that came from the disk; later the same data came
    from the operating system's page cache, and the wait is gone. A short run is mostly its slow beginning.

    ## What to do
    Ignore the beginning when you judge the speed of training, or read the files once before: `vmtouch -t`,
    or `cat data/* > /dev/null`.

    ## When it is wrong
    A data set that does not fit into memory: it would stay slow, and that is `cache-thrash`.
    """

    needs = ("input.early_read_bytes", "input.late_read_bytes", "input.early_wait_ns")
    explains = ("serial-loading", "slow-storage", "too-few-workers")
    fires_on = (cooled(),)
    silent_on = (
        WELL_FED,
        cooled(early_read_bytes=1e4, late_read_bytes=0),
        cooled(early_wait_ns=21e6, late_wait_ns=20e6, late_read_bytes=8e6),
    )

    def applies(self, profile: Profile) -> bool:
        return main_loader(profile) is not None

    def check(self, profile: Profile) -> Finding | None:
        stats, loader = profile.input, main_loader(profile)
        early, late = stats.early_read_bytes, stats.late_read_bytes
        assert loader is not None and early is not None and late is not None
        if stats.early_wait_ns is None or stats.late_wait_ns is None or stats.steady_wait_ns is None:
            return None
        lost_ns = stats.steady_wait_ns - stats.late_wait_ns
        if lost_ns < MIN_SHARE * profile.step_time_ns or early < max(MIN_READ_BYTES, READS_FELL * late):
            return None
        if stats.early_wait_ns < WAITS_FELL * stats.late_wait_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"The loop waited {format_ms(stats.early_wait_ns)} a step while the data came from a"
            f" cold disk, and {format_ms(stats.late_wait_ns)} once it was cached.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=stats.steady_wait_ns,
            assumption="the data is in the page cache from the first step on",
            evidence=(
                f"A step read {format_bytes(early)} from the disk in the first quarter of the run and"
                f" {format_bytes(late)} in the last.",
                f"The wait fell from {format_ms(stats.early_wait_ns)} to {format_ms(stats.late_wait_ns)}.",
            ),
            fix="Read the files once before training, or leave the beginning out when you compare speeds.",
            file=loader.file,
            line=loader.line,
        )
