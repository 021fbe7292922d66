"""Evaluation takes much of the time"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.program import Calls, Evaluating, Loader, Program
from diagnose.core.series import Series
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import at, named, rhythm
from diagnose.rules.base import Rule
from diagnose.rules.slow_rollout import is_rollout, rollout_share
from diagnose.rules.worker_startup import starting_ns

MIN_SHARE = 0.05
"""From here on an evaluation within an epoch is worth doing more rarely."""

EPOCH_SHARE = 0.25
"""One evaluation an epoch is what is usual: a tenth to a fifth as many samples, without a backward pass,
take less than this of the time."""

UNKNOWN_SHARE = 0.10
"""A loop without epochs has no usual rhythm; this much is much in any."""

OFTEN = 16
"""Steps after which hardly anybody's epoch is over: there an evaluation comes within it, whatever an epoch
has."""

WITHIN_EPOCH = 0.75
"""Evaluation comes within the epoch if its period is a smaller part of it."""

EACH_STEP = 0.5
"""Calls per step from which on a usual step has one: a penalty in every 16th has an optimizer step of its
own, without. Of what only evaluation calls a usual step has none."""

MOST = 1.1
"""The first steps after an evaluation find none of their data in the caches."""

LINE_SHARE = 0.01
"""A line that takes less of the time is not where the evaluation is."""

LEAST = 0.5
"""Evaluating half as often is always possible."""

EVERY_20 = Series(
    spike_ns={Phase.EVALUATION: 8e6}, spike_share={Phase.EVALUATION: 0.05}, period={Phase.EVALUATION: 20}
)
TWO_RHYTHMS = Series(spike_ns={Phase.EVALUATION: 8e6}, spike_share={Phase.EVALUATION: 0.07})
ONCE_AN_EPOCH = Series(spike_ns={Phase.EVALUATION: 8e6}, spike_share={Phase.EVALUATION: 0.01})
HUNDRED_STEPS = Program(loaders=(Loader(num_workers=0, batch_size=10, dataset_length=1000, epochs=5),))
TEACHER = Program(calls=Calls(num_steps=5, untrained=1.0))
GENERATES = at("print(model.generate(prompt))", 0.5, phase=Phase.EVALUATION)


def in_each_step(evaluation_ms: float, forward_ms: float) -> Series:
    """What a usual step spends."""
    return Series(median_ns={Phase.EVALUATION: evaluation_ms * 1e6, Phase.FORWARD: forward_ms * 1e6})


class FrequentEvaluation(Rule):
    """
    ## What it means
    The loop stops every so many steps to evaluate the model, and that takes a considerable part of the
    time.

    ## What to do
    Evaluate less often, on fewer samples, with larger batches (nothing is kept for a backward pass) and
    with workers of its own. Or evaluate checkpoints in another process.

    ## When it is wrong
    Runs in which the evaluation is the point: a search that stops trainings early, for example. A call
    without gradients in each step, of a model that was not switched by `eval()`, counts as training: an
    evaluation in every step that leaves the model in training mode is not named.
    """

    fires_on = (
        profile(evaluation_ms=50, where=(GENERATES,)),
        profile(evaluation_ms=50, series=in_each_step(3, 50), where=(replace(GENERATES, share=0.45),)),
        profile(evaluation_ms=8, series=EVERY_20, program=HUNDRED_STEPS),
        profile(evaluation_ms=8, series=TWO_RHYTHMS, program=HUNDRED_STEPS),
        profile(evaluation_ms=12),
        profile(evaluation_ms=8, series=replace(EVERY_20, period={Phase.EVALUATION: 8})),
        profile(evaluation_ms=30, program=HUNDRED_STEPS),
    )
    silent_on = (
        profile(),
        profile(evaluation_ms=20, program=TEACHER, series=in_each_step(20, 80)),
        profile(
            evaluation_ms=20,
            program=Program(calls=Calls(num_steps=5, free=0.8)),
            series=in_each_step(20, 80),
        ),
        profile(
            evaluation_ms=70,
            where=(
                at("obs, reward, done, info = env.step(a)", 0.4, "environment", phase=Phase.EVALUATION),
                at("a = policy(obs).sample()", 0.28, "rollout", phase=Phase.EVALUATION),
            ),
        ),
        profile(
            evaluation_ms=50,
            series=in_each_step(50, 50),
            where=(replace(GENERATES, text="ids = model.generate(prompts)"),),
        ),
        profile(
            evaluation_ms=40,
            program=TEACHER,
            series=replace(in_each_step(20, 60), spike_ns={Phase.EVALUATION: 18e6}),
            where=(at("o2, r, d, _ = env.step(a)", 0.18, "environment", phase=Phase.EVALUATION),),
        ),
        profile(evaluation_ms=9),
        profile(evaluation_ms=8, series=EVERY_20),
        profile(evaluation_ms=20, series=ONCE_AN_EPOCH, program=HUNDRED_STEPS),
        profile(evaluation_ms=20, program=HUNDRED_STEPS),
        profile(
            evaluation_ms=30,
            program=replace(
                HUNDRED_STEPS,
                evaluating=(Evaluating(loader=Loader(num_workers=2, epochs=20), starts=20, start_ns=12e6),),
            ),
        ),
        profile(checkpoint_ms=20),
    )

    def check(self, profile: Profile) -> Finding | None:
        if Phase.EVALUATION not in profile.phase_time_ns:
            return None
        acting_ns = rollout_share(profile, Phase.EVALUATION) * profile.step_time_ns
        made_ns = acting_ns + generating_ns(profile)
        teaching = teaching_ns(profile)
        # Rollouts that come in bursts are beyond what every step has.
        burst_ns = min(made_ns, profile.series.spike_ns.get(Phase.EVALUATION, 0.0))
        explained_ns = max(teaching + burst_ns, made_ns)
        lost_ns = profile.phase_time_ns[Phase.EVALUATION] - explained_ns - starting_ns(profile)
        share = lost_ns / profile.step_time_ns
        if share < least_share(profile):
            return None
        lines = evaluating_lines(profile)
        dearest = max(lines, key=lambda line: line.share, default=None)
        shown = dict.fromkeys(filter(None, (*lines[:1], dearest)))
        often = rhythm(profile, Phase.EVALUATION)
        period = profile.series.period.get(Phase.EVALUATION)
        then = _rarer(period, epoch_steps(profile)) if period else None
        return Finding(
            rule=self.name,
            summary=f"Evaluation takes {format_share(share)} of the time{often}",
            lost_ns={Phase.EVALUATION: lost_ns},
            low_ns=LEAST * lost_ns,
            high_ns=MOST * lost_ns,
            assumption="evaluation becomes rare enough for its cost to vanish",
            evidence=(
                f"{format_ms(lost_ns)} of each step, on average, pass in evaluation{often}.",
                *(
                    f"{format_share(line.share)} of the time in {named(line)}, {line.function}."
                    for line in shown
                ),
            ),
            fix="Evaluate "
            + (f"every {then} steps instead of every {period}" if then else "less often")
            + ", or on fewer samples.",
            fix_won_ns=lost_ns * (1 - period / then) if period and then else None,
            file=lines[0].file if lines else "",
            line=lines[0].line if lines else 0,
        )


def evaluating_lines(profile: Profile) -> list[SourceLine]:
    """Returns the lines of the evaluation, first those of functions that do little else: the model's own,
    which the training runs through, too, name no evaluation."""
    ours = [line for line in profile.where if not line.in_worker]
    of_model = {(line.file, line.function) for line in ours if line.phase is Phase.FORWARD}
    evaluating: defaultdict[tuple[str, str], float] = defaultdict(float)
    for line in ours:
        share = line.share if line.phase is Phase.EVALUATION else -line.share
        evaluating[line.file, line.function] += share
    lines = [line for line in ours if line.phase is Phase.EVALUATION and not is_rollout(line)]

    def says_little(line: SourceLine) -> bool:
        function = line.file, line.function
        return function in of_model or evaluating[function] <= 0 or line.share < LINE_SHARE

    return sorted(lines, key=says_little)


def _rarer(period: int, epoch: float | None) -> int:
    """Returns after how many steps to evaluate instead: ten times as many, but at least once an epoch where
    it is more often now."""
    within = epoch is not None and 2 * period <= epoch
    return min(10 * period, round(epoch)) if within and epoch else 10 * period


def teaching_ns(profile: Profile) -> float:
    """Returns nanoseconds of each step in which models compute without gradients what the training uses:
    others than the trained one, such as a teacher, or that itself in training mode, as for pseudo-labels or
    for the pictures that a generator makes for its judge."""
    calls = profile.program.calls
    if calls is None or (calls.untrained or 0.0) + (calls.free or 0.0) < EACH_STEP:
        return 0.0
    spent_ns = profile.phase_time_ns.get(Phase.EVALUATION, 0.0)
    each_ns = each_step_ns(profile)
    return spent_ns if each_ns is None else min(spent_ns, each_ns)


def each_step_ns(profile: Profile) -> float | None:
    """Returns nanoseconds that a usual step spends in evaluation; `None` where none was measured."""
    usual = profile.series.median_ns
    whole_ns = sum(usual.values())
    return usual.get(Phase.EVALUATION, 0.0) * profile.step_time_ns / whole_ns if whole_ns else None


def generating_ns(profile: Profile) -> float:
    """Returns nanoseconds of each step in which a model writes what the training then learns from: what it
    generates now and then is a sample for the reader, and what it does in every step is not."""
    each_ns = each_step_ns(profile)
    if not each_ns:
        return 0.0
    lines = [line for line in profile.where if line.phase is Phase.EVALUATION and not line.in_worker]
    generating = [
        line
        for line in lines
        if ".generate(" in line.text or line.function.rpartition(".")[2] == "generate"
    ]
    spent_ns = sum(line.share for line in generating if not is_rollout(line)) * profile.step_time_ns
    return min(spent_ns, each_ns)


def least_share(profile: Profile) -> float:
    """Returns the part of the time from which on evaluation is much, by how it lies to the epochs."""
    period = profile.series.period.get(Phase.EVALUATION)
    epoch = epoch_steps(profile)
    if epoch is None:
        return MIN_SHARE if period and period <= OFTEN else UNKNOWN_SHARE
    if period is None:  # of two rhythms in one epoch, say: then how often it comes is counted
        often = profile.series.spike_share.get(Phase.EVALUATION, 0.0)
        return MIN_SHARE if often * epoch > 1 / WITHIN_EPOCH else EPOCH_SHARE
    return MIN_SHARE if period < WITHIN_EPOCH * epoch else EPOCH_SHARE


def epoch_steps(profile: Profile) -> float | None:
    """Returns the steps of an epoch, as near as a loader tells; `None` where there are no epochs."""
    for loader in profile.program.loaders:
        if loader.epochs > 1:
            return profile.steps.count / loader.epochs
        if loader.dataset_length and loader.batch_size:
            return loader.dataset_length / loader.batch_size
    return None
