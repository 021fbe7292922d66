"""Workers are started anew for each epoch"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Evaluating, Loader, Program
from diagnose.core.units import NS_PER_MS, format_duration, format_share
from diagnose.rules._examples import profile as profile_of
from diagnose.rules._lines import under_trainer
from diagnose.rules._loader_calls import KEEP_ITERATOR, applicable, with_loader_arguments
from diagnose.rules._phases import STEP, shared
from diagnose.rules._supply import (
    MIN_EPOCHS,
    begins_anew,
    drawn_at_starts_ns,
    draws_at_starts,
    supply_of,
)
from diagnose.rules._worker_examples import EPOCHS, WELL_FED, fed_by
from diagnose.rules.base import WORTH_SHARE, Rule

TOLD_SHARE = 0.02
"""Of what it costs: where the steps after it are slower by less, that is not told."""

EVALUATION_SHARE = 0.05
"""What starting workers for the evaluations may take: a few are started for each epoch in most scripts."""

BUILD_ONCE = (
    "Build the DataLoader once, before the first epoch, with persistent_workers=True. What changes from"
    " epoch to epoch must then be its sampler: kept workers do not see a dataset that is changed later."
)

BUILD_FOR_EVALUATION = (
    "Build the DataLoader once, before the first evaluation, with persistent_workers=True."
)


def _evaluating(start_ms: float, starts: int = 20, num_objects: int = 1) -> Profile:
    loader = Loader(num_workers=2, epochs=starts, num_objects=num_objects)
    found = Evaluating(loader=loader, starts=starts, start_ns=start_ms * NS_PER_MS)
    return profile_of(evaluation_ms=8, program=Program(evaluating=(found,)))


class WorkerStartup(Rule):
    """
    ## What it means
    The loader's workers end with each epoch and are started again for the next. Until they have come up,
    with their copies of the dataset, and made a first batch, the loop stands still. Or those of a loader
    that evaluates do so with each evaluation.

    ## What to do
    Set `persistent_workers=True`: the same workers then serve all epochs. That takes a `DataLoader` that
    serves them all: one that is made anew for each epoch starts its own workers, whatever it is told.

    ## When it is wrong
    Workers that must see what changed in the dataset object between epochs: persistent ones keep their
    copies as they were at the start. Where most of the wait is the sampler's, which draws the order of the
    epoch on the training thread, it is `epoch-boundary-stall`.
    """

    needs = ("input.workers", "input.epoch_start_ns")
    actions = ("persistent-workers",)
    explains = ("epoch-boundary-stall",)
    fires_on = (
        fed_by(
            data_wait_ms=12,
            fetch_ms=20,
            loader={"persistent_workers": False, "construct_ns": 80e6},
            stats=EPOCHS,
        ),
        fed_by(
            data_wait_ms=12,
            fetch_ms=20,
            loader={"num_objects": 20, "epochs": 20, "construct_ns": 80e6},
            stats=EPOCHS,
        ),
        _evaluating(start_ms=6),
        _evaluating(start_ms=6, num_objects=20),
    )
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=12, fetch_ms=20, stats=EPOCHS),
        _evaluating(start_ms=4),
        _evaluating(start_ms=6, starts=1),
        fed_by(
            data_wait_ms=1,
            fetch_ms=20,
            loader={"persistent_workers": False},
            stats={"epoch_starts": 1, "epoch_start_ns": 0.5e6, "steady_wait_ns": 0.5e6},
        ),
        fed_by(
            data_wait_ms=12,
            fetch_ms=20,
            loader={"persistent_workers": False, "construct_ns": 440e6},
            stats={**EPOCHS, "epoch_drawing_ns": 9e6},
        ),
    )

    def applies(self, profile: Profile) -> bool:
        return bool(profile.program.evaluating) or _may_start(profile)

    def needed(self, profile: Profile) -> tuple[str, ...]:
        return () if profile.program.evaluating else self.needs

    def check(self, profile: Profile) -> Finding | None:
        training = self._in_training(profile) if _may_start(profile) else None
        evaluation = self._in_evaluations(profile)
        found = (finding for finding in (training, evaluation) if finding is not None)
        return max(found, key=lambda finding: finding.lost_ns_per_step, default=None)

    def _in_evaluations(self, profile: Profile) -> Finding | None:
        lost_ns = starting_ns(profile)
        if not lost_ns:
            return None
        found = profile.program.evaluating[0]
        loader = found.loader
        anew = loader.made_anew and not under_trainer(profile)  # which keeps one with workers that persist
        each_ns = found.start_ns * profile.steps.measured / found.starts
        return Finding(
            rule=self.name,
            summary=(
                f"Starting {loader.num_workers} workers anew for each evaluation costs"
                f" {format_share(lost_ns / profile.step_time_ns)} of the time."
            ),
            lost_ns={Phase.EVALUATION: lost_ns},
            low_ns=0.6 * lost_ns,
            high_ns=lost_ns,
            assumption="workers that persist begin an evaluation as fast as they make a batch",
            evidence=(
                f"{found.starts} evaluations began with new workers; each waited {format_duration(each_ns)}"
                " for its first batch, without the time that making it takes.",
                *(
                    (f"A DataLoader was made for each of {loader.epochs} evaluations.",)
                    if loader.made_anew
                    else ()
                ),
            ),
            fix=BUILD_FOR_EVALUATION if anew else "Keep the workers between evaluations.",
            code="" if anew else with_loader_arguments(profile, loader, persistent_workers=True),
            file=loader.file,
            line=loader.line,
        )

    def _in_training(self, profile: Profile) -> Finding | None:
        supply, stats = supply_of(profile), profile.input
        if supply is None or stats.epoch_start_ns is None or stats.epoch_starts < MIN_EPOCHS:
            return None
        if draws_at_starts(profile):
            return None
        # The first batch of an epoch has to be made with persistent workers too.
        per_step = stats.epoch_starts / max(1, profile.steps.measured)
        made_ns = supply.busy_ns / supply.batches * per_step
        lost_ns = stats.epoch_start_ns - drawn_at_starts_ns(profile) - made_ns
        lost_ns = min(lost_ns, profile.spent_ns(Phase.DATA_WAIT))
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        slower_ns = stats.epoch_start_compute_ns or 0.0
        lost = {Phase.DATA_WAIT: lost_ns}
        if slower_ns:
            # New processes take CPUs, and memory that they share is copied when it is next written.
            lost |= shared(profile, slower_ns, STEP)
        total_ns = sum(lost.values())
        loader = supply.loader
        fix, alone = "Keep the workers from epoch to epoch.", False
        if loader.made_anew:
            fix, alone = BUILD_ONCE, True
        elif begins_anew(profile, loader):
            fix, alone = f"{KEEP_ITERATOR}: workers that are kept would be emptied in each step.", True
        return Finding(
            rule=self.name,
            summary=f"Starting {loader.num_workers} workers anew for each epoch costs"
            f" {format_share(total_ns / profile.step_time_ns)} of the time.",
            lost_ns=lost,
            low_ns=0.6 * lost_ns,
            high_ns=stats.epoch_start_ns + slower_ns,
            assumption="workers that persist begin an epoch as fast as they make a batch",
            evidence=(
                f"{stats.epoch_starts} epochs began; each made the loop wait"
                f" {format_duration(stats.epoch_start_ns / per_step)} longer than usual.",
                f"iter(loader) alone took {format_duration(loader.construct_ns)}.",
                *(
                    (f"A DataLoader was made for each of {loader.epochs} epochs.",)
                    if loader.made_anew
                    else ()
                ),
                *_slower(slower_ns / per_step if slower_ns > TOLD_SHARE * total_ns else 0.0),
            ),
            fix=fix,
            code="" if alone else with_loader_arguments(profile, loader, persistent_workers=True),
            file=loader.file,
            line=loader.line,
            actions=() if alone else applicable(self.actions, loader),
        )


def _may_start(profile: Profile) -> bool:
    """Whether workers may be started for each epoch of the training."""
    return any(
        loader.num_workers and (not loader.persistent_workers or loader.made_anew)
        for loader in profile.program.loaders[:1]
    )


def starting_ns(profile: Profile) -> float:
    """Returns what of each step goes to starting the workers of evaluations; 0 where that is usual."""
    found = profile.program.evaluating[:1]
    if not found or found[0].starts < MIN_EPOCHS:
        return 0.0
    start_ns = min(found[0].start_ns, profile.spent_ns(Phase.EVALUATION))
    return start_ns if start_ns >= EVALUATION_SHARE * profile.step_time_ns else 0.0


def _slower(each_ns: float) -> list[str]:
    if not each_ns:
        return []
    return [
        f"The step after it computed {format_duration(each_ns)} longer than others: new processes take"
        " CPUs, and memory that they share is copied when it is next written."
    ]
