"""Each epoch begins with a long wait"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from diagnose.core.finding import Finding
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_duration, format_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import at, named
from diagnose.rules._loader_calls import KEEP_ITERATOR
from diagnose.rules._own_batches import between_epochs
from diagnose.rules._supply import (
    MIN_EPOCHS,
    begins_anew,
    drawn_at_starts_ns,
    draws_at_starts,
    main_loader,
)
from diagnose.rules._worker_examples import EPOCHS, WELL_FED, fed_by
from diagnose.rules.base import WORTH_SHARE, Rule
from diagnose.rules.slow_batch_building import BEGUN_SHORTLY, SERIAL

READ_WHOLE = re.compile(r"\blist\(\s*[\w.]*(loader|dl)\w*\s*\)", re.IGNORECASE)
"""A line that reads all batches of a loader at once trains on none of them."""

EMPTIED = (
    "Now each step begins an epoch: the workers finish what they were asked for, all of it is thrown away,"
    " and the loop waits for a first batch."
)

MADE: dict[str, Any] = {
    "epoch_starts": 20,
    "epoch_start_ns": 0.0,
    "epoch_start_gap_ns": 12e6,
    "steady_wait_ns": 1e6,
    "steady_gap_ns": 0.5e6,
}
WINDOWS = replace(at("dataset = Windows(files)", 0.13, phase=Phase.DATA_WAIT), between=0.13)
MIXED = at("mixed = overlay(images)", 0.13, phase=Phase.DATA_WAIT)
EPOCHS_LINES = tuple(
    at(text, share, phase=Phase.DATA_WAIT)
    for text, share in (("rows = draw()", 0.04), ("rows.sort()", 0.03), ("shuffle(rows)", 0.03))
)


class EpochBoundaryStall(Rule):
    """
    ## What it means
    The first batch of each epoch comes much later than the others, although no workers are started for
    it, or their start is the smaller part: the sampler draws or sorts its order, the dataset opens its
    files anew, or workers that were idle have to fill their queues again. Or the loop itself makes the
    epoch ready: it shuffles files, cuts windows, builds a dataset anew. Where no loader tells when an epoch
    begins, steps that come regularly do, if they are as much longer as the lines that make batches take;
    what makes them so may be a part of the data that is read every so many steps.

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
        fed_by(data_wait_ms=12, fetch_ms=20, stats=EPOCHS),
        fed_by(
            data_wait_ms=12,
            fetch_ms=20,
            stats=EPOCHS,
            where=(at("return losses / len(list(train_dl))", 0.1, phase=Phase.DATA_WAIT),),
        ),
        fed_by(
            data_wait_ms=12,
            fetch_ms=20,
            loader={"persistent_workers": False},
            stats={**EPOCHS, "epoch_drawing_ns": 9e6},
        ),
        fed_by(
            data_wait_ms=60,
            fetch_ms=20,
            loader={"epochs": 501},
            stats={"epoch_starts": 500, "epoch_start_ns": 60e6, "steady_wait_ns": 0.0},
        ),
        fed_by(data_wait_ms=15, fetch_ms=20, stats=MADE, where=(WINDOWS,)),
        profile(data_wait_ms=15, program=SERIAL, input=InputStats(**MADE), where=(WINDOWS,)),
        # A loss of the script's own takes long in each step, between the same calls.
        fed_by(data_wait_ms=15, fetch_ms=20, stats={**MADE, "steady_gap_ns": 12.5e6}, where=(WINDOWS,)),
        profile(data_wait_ms=15, input=InputStats(**MADE), where=(MIXED,)),
        profile(
            data_wait_ms=20,
            forward_ms=79,
            input=InputStats(**MADE),
            where=(MIXED, at("x = mixed[rows]", 0.06, phase=Phase.DATA_WAIT)),
        ),
    )
    silent_on = (
        BEGUN_SHORTLY,
        # The largest of the lines may be what each step slices.
        profile(
            data_wait_ms=18,
            input=InputStats(**{**MADE, "epoch_start_gap_ns": 10e6}),
            where=(at("x = mixed[rows]", 0.075, phase=Phase.DATA_WAIT), *EPOCHS_LINES),
        ),
        profile(
            data_wait_ms=40,
            input=InputStats(**{**MADE, "epoch_start_gap_ns": 20.5e6}),
            where=(at("x = make(step)", 0.2, phase=Phase.DATA_WAIT), replace(MIXED, share=0.2)),
        ),
        fed_by(data_wait_ms=15, fetch_ms=20, stats={**MADE, "epoch_start_gap_ns": 0.0}, where=(WINDOWS,)),
        fed_by(
            data_wait_ms=15,
            other_ms=12,
            fetch_ms=20,
            stats={**MADE, "steady_gap_ns": 14e6},
            where=(WINDOWS,),
        ),
        profile(
            data_wait_ms=20,
            other_ms=10,
            input=InputStats(**MADE),
            where=(MIXED, at("x = mixed[rows]", 0.06, phase=Phase.DATA_WAIT)),
        ),
        profile(data_wait_ms=15, input=InputStats(**{**MADE, "epoch_start_gap_ns": 4e6}), where=(MIXED,)),
        profile(data_wait_ms=15, input=InputStats(**{**MADE, "epoch_start_gap_ns": 40e6}), where=(MIXED,)),
        WELL_FED,
        fed_by(data_wait_ms=12, fetch_ms=20, loader={"persistent_workers": False}, stats=EPOCHS),
    )

    def applies(self, profile: Profile) -> bool:
        return main_loader(profile) is not None or profile.input.epoch_starts > 0

    def check(self, profile: Profile) -> Finding | None:
        stats, loader = profile.input, main_loader(profile)
        assert stats.epoch_start_ns is not None
        making_ns, making = between_epochs(profile)
        draws, wait_ns = draws_at_starts(profile), stats.epoch_start_ns
        if draws:
            wait_ns = drawn_at_starts_ns(profile)
        elif loader is not None and loader.num_workers and not loader.persistent_workers:
            wait_ns = 0.0  # what workers that are started take is another rule's
        lost_ns = min(wait_ns + making_ns, profile.spent_ns(Phase.DATA_WAIT))
        if stats.epoch_starts < MIN_EPOCHS or lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        waits = [line for line in profile.where if line.phase is Phase.DATA_WAIT and not line.in_worker]
        seen = next((line for line in waits[:1] if READ_WHOLE.search(line.text)), None)
        why = ""
        if loader is not None:
            why = f"iter(loader) alone took {format_duration(loader.construct_ns)};"
            why += f" the sampler is a {loader.sampler or 'custom one'}."
        fix = "Make epochs longer, or what the sampler and the dataset do at their beginning cheaper."
        if seen:
            why = f"Most of it passes in {named(seen)}, which reads the loader without training on it."
            fix = "Do not read the whole loader there: len(loader) counts its batches."
        elif making_ns > wait_ns:
            seen = max(making, key=lambda line: line.share)
            why = f"Most of it passes in {named(seen)}, before the step has its batch."
            fix = "Do what is the same for each epoch once before the first, and what is not in workers."
            if loader is None:
                fix = "Do once, before the loop, what is the same each time, and the rest in workers."
        elif draws:
            why = "The training thread draws the order of the samples, for"
            why += f" {format_share(wait_ns / stats.epoch_start_ns)} of that."
            fix = (
                "Let the sampler draw the order of an epoch faster, or several epochs' at once: keep what"
                " is the same in each, and index arrays instead of looping in Python."
            )
        elif loader is not None and loader.num_workers and begins_anew(profile, loader):
            fix = f"{KEEP_ITERATOR}. {EMPTIED}"
        starts = "The beginning of each epoch" if loader is not None else "A long wait every so many steps"
        began = "epochs began" if loader is not None else "such steps were seen"
        return Finding(
            rule=self.name,
            summary=f"{starts} costs {format_share(lost_ns / profile.step_time_ns)} of the time.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=lost_ns,
            assumption="an epoch begins as fast as it goes on",
            evidence=(
                f"{stats.epoch_starts} {began}; each made the loop wait"
                f" {format_duration(lost_ns * profile.steps.measured / stats.epoch_starts)} longer than"
                " usual.",
                why,
            ),
            fix=fix,
            file=seen.file if seen else loader.file if loader is not None else "",
            line=seen.line if seen else loader.line if loader is not None else 0,
        )
