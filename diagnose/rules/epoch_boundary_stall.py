"""Each epoch begins with a long wait"""

from __future__ import annotations

import re

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_duration, format_share
from diagnose.rules._lines import at, named
from diagnose.rules._supply import KEEP_ITERATOR, WELL_FED, begins_anew, fed_by, main_loader
from diagnose.rules.base import Rule

MIN_SHARE = 0.02
"""Of the mean step; below it nobody would notice."""

READ_WHOLE = re.compile(r"\blist\(\s*[\w.]*(loader|dl)\w*\s*\)", re.IGNORECASE)
"""A line that reads all batches of a loader at once trains on none of them."""

MIN_EPOCHS = 2
"""Beginnings to have seen: a single one may have been slow for another reason."""

EMPTIED = (
    "Now each step begins an epoch: the workers finish what they were asked for, all of it is thrown away,"
    " and the loop waits for a first batch."
)


class EpochBoundaryStall(Rule):
    """
    ## What it means
    The first batch of each epoch comes much later than the others, although no workers are started for
    it: the sampler draws or sorts its order, the dataset opens its files anew, or workers that were
    idle have to fill their queues again.

    ## What to do
    Make epochs longer (`RepeatedSampler`, several passes per iteration), draw the order once, and open
    files once. If the workers only have to fill up, begin the next iteration before the epoch's last
    steps. Where a line reads the whole loader without training on it, such as `len(list(loader))`, let it
    not: `len(loader)` counts its batches. And `next(iter(loader))` in each step begins an epoch in each:
    keep the iterator.

    ## When it is wrong
    Epochs of a few steps in a test run, which a real run does not have.
    """

    needs = ("input.epoch_start_ns",)
    fires_on = (
        fed_by(
            data_wait_ms=12,
            fetch_ms=20,
            stats={"epoch_starts": 20, "epoch_start_ns": 10e6, "steady_wait_ns": 2e6},
        ),
        fed_by(
            data_wait_ms=12,
            fetch_ms=20,
            stats={"epoch_starts": 20, "epoch_start_ns": 10e6, "steady_wait_ns": 2e6},
            where=(at("return losses / len(list(train_dl))", 0.1, phase=Phase.DATA_WAIT),),
        ),
        fed_by(
            data_wait_ms=60,
            fetch_ms=20,
            loader={"epochs": 501},
            stats={"epoch_starts": 500, "epoch_start_ns": 60e6, "steady_wait_ns": 0.0},
        ),
    )
    silent_on = (
        WELL_FED,
        fed_by(
            data_wait_ms=12,
            fetch_ms=20,
            loader={"persistent_workers": False},
            stats={"epoch_starts": 20, "epoch_start_ns": 10e6, "steady_wait_ns": 2e6},
        ),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        loader = main_loader(profile)
        return loader is not None and (loader.persistent_workers or not loader.num_workers)

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        stats, loader = profile.input, main_loader(profile)
        assert loader is not None and stats.epoch_start_ns is not None
        lost_ns = min(stats.epoch_start_ns, profile.phase_time_ns.get(Phase.DATA_WAIT, 0.0))
        if stats.epoch_starts < MIN_EPOCHS or lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        waits = [line for line in profile.where if line.phase is Phase.DATA_WAIT and not line.in_worker]
        read = next((line for line in waits[:1] if READ_WHOLE.search(line.text)), None)
        per_epoch = stats.epoch_start_ns * profile.steps.measured / stats.epoch_starts
        fix = "Make epochs longer, or what the sampler and the dataset do at their beginning cheaper."
        if read:
            fix = "Do not read the whole loader there: len(loader) counts its batches."
        elif loader.num_workers and begins_anew(profile, loader):
            fix = f"{KEEP_ITERATOR}. {EMPTIED}"
        return Finding(
            rule=self.name,
            summary=(
                f"The beginning of each epoch costs {format_share(lost_ns / profile.step_time_ns)} of the"
                " time."
            ),
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=lost_ns,
            assumption="an epoch begins as fast as it goes on",
            evidence=(
                f"{stats.epoch_starts} epochs began; each made the loop wait"
                f" {format_duration(per_epoch)} longer than usual.",
                f"Most of it passes in {named(read)}, which reads the loader without training on it."
                if read
                else f"iter(loader) alone took {format_duration(loader.construct_ns)};"
                f" the sampler is a {loader.sampler or 'custom one'}.",
            ),
            fix=fix,
            file=read.file if read else loader.file,
            line=read.line if read else loader.line,
        )
