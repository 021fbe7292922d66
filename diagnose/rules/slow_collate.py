"""Making a batch of samples takes as long as fetching them, or longer"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diagnose.core.finding import Finding
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Loader, Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._crowding import crowded_by_ns
from diagnose.rules._examples import profile
from diagnose.rules._phases import shared
from diagnose.rules._supply import (
    HANDOVER_NS,
    MIN_HANDOVERS,
    MIN_SHARE,
    main_loader,
    supply_of,
)
from diagnose.rules._worker_examples import BESIDE_A_TEAM, CROWDED, WELL_FED, fed_by
from diagnose.rules.base import Rule

DOMINATES = 0.5
"""Collating that takes at least as long as fetching is the part to cut first."""

COUNTS = 0.35
"""Where a batch takes so little time that workers would win nothing, collating is what is left to cut: it
need take only this part."""

TORCHS_OWN = "default_collate"

MIN_COLLATE_NS = 1_000_000
"""Per batch, of torch's own function: it stacks a hundred small samples in a fraction of it, and where it
takes longer, someone else's can be quicker; of a worker's, which may have to wait for a CPU, its CPU time.
The user's function is the user's to change, however short."""

MOST = 1.2
"""Python that runs between two steps also empties the caches that they use."""

WAITING = 0.5
"""A function that is on a CPU for less than this part of the time that it wants none waits for storage or a
network: to work on whole batches makes it no faster."""

SOME = 0.01
"""Of the time, to divide by: who has no CPU for nearly all of it may compute or not."""

NO_WORKER = Program(loaders=(Loader(num_workers=0, collate="pad", file="/home/me/train.py", line=31),))
OF_TORCH = Program(loaders=(Loader(num_workers=0, collate=TORCHS_OWN, file="/home/me/train.py", line=31),))
COLLATES = InputStats(fetch_ns=5e6, collate_ns=35e6, steady_wait_ns=40e6, batches_per_step=1.0)
BEING_SENT = {"ready_batches": 1.1, "idle_share": 0.03}
FETCHED = replace(COLLATES, collate_cpu_share=0.1)
QUICK = InputStats(fetch_ns=1e5, collate_ns=3e5, steady_wait_ns=4e5, batches_per_step=1.0)
HALF = InputStats(fetch_ns=7e5, collate_ns=6e5, steady_wait_ns=13e5, batches_per_step=1.0)


OFTEN: dict[str, Any] = {
    "num_workers": 1,
    "loader": {"collate": TORCHS_OWN},
    "workers": {"cpu_share": 0.4, "delay_share": 0.6},
    "stats": {"batches_per_step": 40.0},
}
"""A worker that wants a CPU for most of the time that it needs for small batches."""


class SlowCollate(Rule):
    """
    ## What it means
    Putting the samples of a batch together, in `collate_fn`, takes as long as fetching them or longer, and
    the loop waits for it; or workers keep up, and the model waits for the CPU that it takes them.
    Usually it loops over samples in Python, pads one by one, or converts types.

    ## What to do
    Write it in whole-batch operations: `torch.stack`, `pad_sequence`, one allocation filled in place. Or
    prepare in the dataset what does not depend on the other samples of the batch.

    ## When it is wrong
    A dataset that only hands out references, with a collate function that does all the loading. Where that
    waits for storage or a network most of its time it is not named, but the fault of the loader is.
    """

    explains = ("serial-loading", "slow-storage", "slow-transform", "too-few-workers", "worker-transfer")
    fires_on = (
        profile(data_wait_ms=40, program=NO_WORKER, input=COLLATES),
        fed_by(data_wait_ms=40, fetch_ms=10, collate_ms=90, num_workers=1),
        fed_by(data_wait_ms=18, fetch_ms=4, collate_ms=93, num_workers=1, cpus=2, workers=BEING_SENT),
        fed_by(data_wait_ms=10, fetch_ms=40, collate_ms=70, **CROWDED),
        fed_by(data_wait_ms=6, fetch_ms=1, collate_ms=51, **BESIDE_A_TEAM),
        profile(step_ms=1, data_wait_ms=0.4, program=NO_WORKER, input=QUICK),
        profile(step_ms=8, data_wait_ms=1.3, program=NO_WORKER, input=HALF),
    )
    silent_on = (
        WELL_FED,
        profile(data_wait_ms=40, program=NO_WORKER, input=FETCHED),
        fed_by(data_wait_ms=40, fetch_ms=10, collate_ms=90, num_workers=1, workers={"cpu_share": 0.1}),
        profile(data_wait_ms=40, program=NO_WORKER, input=replace(COLLATES, fetch_ns=35e6, collate_ns=5e6)),
        fed_by(data_wait_ms=40, fetch_ms=90, collate_ms=10, num_workers=1),
        fed_by(data_wait_ms=1, fetch_ms=10, collate_ms=50, num_workers=1),
        fed_by(data_wait_ms=10, fetch_ms=70, collate_ms=40, **CROWDED),
        fed_by(data_wait_ms=6, fetch_ms=1, collate_ms=12, **BESIDE_A_TEAM),
        fed_by(data_wait_ms=6, fetch_ms=5, collate_ms=8, send_ms=25, **BESIDE_A_TEAM),
        profile(step_ms=1, data_wait_ms=0.4, program=OF_TORCH, input=QUICK),
        profile(step_ms=8, data_wait_ms=1.3, program=OF_TORCH, input=HALF),
        fed_by(data_wait_ms=40, fetch_ms=0.5, collate_ms=2, **OFTEN),
    )

    def applies(self, profile: Profile) -> bool:
        return main_loader(profile) is not None

    def check(self, profile: Profile) -> Finding | None:
        loader = main_loader(profile)
        assert loader is not None
        stats, crowded = profile.input, 0.0
        computing: float | None = None
        if loader.num_workers:
            supply = supply_of(profile)
            if supply is None:
                return None
            if supply.needs_cpu:
                crowded = crowded_by_ns(profile, supply, supply.collating_cpu_ns)
            if not (supply.behind or crowded):
                return None
            fetch_ns, collate_ns = supply.workers.fetch_ns, supply.workers.collate_ns
            lost_ns = crowded or supply.won_ns(busy_ns=supply.busy_ns - collate_ns * supply.batches)
            who, own_ns = "a worker", collate_ns * supply.workers.cpu_share
            # Were all of the workers' CPU time spent in it, this part of it would compute.
            on_cpu = supply.workers.cpu_share / max(SOME, 1 - supply.delay_share)
            computing = on_cpu * (fetch_ns + collate_ns) / max(1.0, collate_ns)
        elif stats.fetch_ns is not None and stats.collate_ns is not None:
            fetch_ns, collate_ns = stats.fetch_ns, stats.collate_ns
            lost_ns = min(collate_ns * (stats.batches_per_step or 1.0), profile.spent_ns(Phase.DATA_WAIT))
            who, own_ns = "the training thread", collate_ns
            if stats.collate_cpu_share is not None and collate_ns >= MIN_COLLATE_NS:  # else it is chance
                wanting = profile.host.runnable_share or 0.0
                computing = stats.collate_cpu_share / max(SOME, 1 - wanting)
        else:
            return None
        if computing is not None and computing < WAITING:
            return None
        share = collate_ns / max(1.0, fetch_ns + collate_ns)
        name = loader.collate or "collate_fn"
        file, line = _place(profile, loader)
        by_workers = loader.num_workers or fetch_ns + collate_ns >= MIN_HANDOVERS * HANDOVER_NS
        least = DOMINATES if by_workers else COUNTS
        if share < least or (name == TORCHS_OWN and own_ns < MIN_COLLATE_NS):
            return None
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Making batches of samples costs {format_share(lost_ns / profile.step_time_ns)} of"
            f" each step: {name} takes {'longer than' if share >= DOMINATES else 'about as long as'} the"
            " dataset.",
            lost_ns=shared(profile, lost_ns) if crowded else {Phase.DATA_WAIT: lost_ns},
            low_ns=0.6 * lost_ns,
            high_ns=MOST * lost_ns,
            assumption=f"{name} becomes as good as free",
            evidence=(
                f"A batch takes {who} {format_ms(collate_ns)} to collate"
                f" and {format_ms(fetch_ns)} to fetch.",
                f"The loop waits {format_ms(profile.spent_ns(Phase.DATA_WAIT))} of each step.",
                *(
                    [f"It waits for a CPU {format_ms(crowded)} of it, as collating has them."]
                    if crowded
                    else []
                ),
            ),
            fix="Give the loader a collate_fn that fills one tensor, or let the dataset hand out whole"
            " batches by __getitems__."
            if name == TORCHS_OWN
            else f"Make {name} work on whole batches instead of sample by sample.",
            file=file,
            line=line,
        )


def _place(profile: Profile, loader: Loader) -> tuple[str, int]:
    """Returns the line to change: where the script's own function was seen most, else where it begins, else
    where the loader is made."""
    if not loader.collate_file:
        return loader.file, loader.line
    name = loader.collate  # Python 3.10 tells of a frame only the last part of it
    names = (name, name.rpartition(".")[2], f"{name}.__call__")
    seen = [line for line in profile.where if line.file == loader.collate_file and line.function in names]
    most = max(seen, key=lambda line: line.share, default=None)
    return loader.collate_file, most.line if most is not None else loader.collate_line
