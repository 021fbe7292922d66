"""The model is called a second time on a batch it has just seen"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Calls, Program
from diagnose.core.series import Series
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import at
from diagnose.rules.base import WORTH_SHARE, Rule
from diagnose.rules.slow_rollout import rollout_share

MIN_REPEATS = 0.75
"""Repeats per step: a call that comes now and then may be an evaluation."""

MIN_WASTED = 0.2
"""Part of the graph that no backward pass uses. Less may be a metric."""

LOW = 0.85
"""A result at hand must still be looked at."""

LOW_OF_DROPOUT = 0.0
"""In evaluation mode the model computes without dropout, and that may be what the call is for."""

FREE = Program(calls=Calls(num_steps=4, repeated=1.0, file="/home/me/train.py", line=40))
SWITCHED = Program(calls=Calls(num_steps=4, repeated=0.0, judged=1.0))
FIRST = Program(calls=Calls(num_steps=4, repeated=0.0, repeated_before=1.0))
BESIDE_A_TEACHER = Program(calls=Calls(num_steps=4, repeated=1.0, repeated_share=0.05))
TWICE = Program(
    calls=Calls(num_steps=4, repeated_with_grad=1.0, repeated=0.0),
    graph=Graph(num_nodes=100, wasted_share=0.5),
)
BOTH_USED = replace(TWICE, graph=Graph(num_nodes=100, wasted_share=0.0))


def judged(wasted: float) -> Program:
    """Calls after `eval()`, which switches no gradients off; a pass uses all of the graph but this part."""
    calls = Calls(num_steps=4, judged_with_grad=1.0, repeated=0.0)
    return Program(calls=calls, graph=Graph(num_nodes=100, wasted_share=wasted))


EACH_STEP = Series(median_ns={Phase.EVALUATION: 20e6, Phase.FORWARD: 80e6})


class ExtraForward(Rule):
    """
    ## What it means
    In each step the model computes a batch for training and then, or just before, once more for a metric or
    a log: without gradients, or with such that no backward pass uses, as after `eval()` alone. That result
    could have been had from the training's.

    ## What to do
    Keep the output of the training forward, and compute the metric from `output.detach()`.

    ## When it is wrong
    The second call is meant to differ: by dropout, by evaluation mode, or by weights that have been updated
    in between.
    """

    needs = ("program.calls.repeated",)
    explains = ("frequent-evaluation", "slow-metrics")
    fires_on = (
        profile(evaluation_ms=20, program=FREE, series=EACH_STEP),
        profile(evaluation_ms=20, program=SWITCHED, series=EACH_STEP),
        profile(evaluation_ms=20, program=FIRST, series=EACH_STEP),
        profile(program=TWICE),
        profile(evaluation_ms=20, program=judged(wasted=0.5), series=EACH_STEP),
    )
    silent_on = (
        profile(
            evaluation_ms=20, series=EACH_STEP, program=Program(calls=Calls(num_steps=4, repeated=0.0))
        ),
        profile(evaluation_ms=20, program=BESIDE_A_TEACHER, series=EACH_STEP),
        profile(
            evaluation_ms=20,
            program=FIRST,
            series=EACH_STEP,
            where=(at("a = policy(obs).sample()", 0.2, "rollout", phase=Phase.EVALUATION),),
        ),
        profile(program=BOTH_USED),
        profile(evaluation_ms=20, program=judged(wasted=0.0), series=EACH_STEP),
    )

    def applies(self, profile: Profile) -> bool:
        return profile.program.calls is not None

    def check(self, profile: Profile) -> Finding | None:
        calls, graph = profile.program.calls, profile.program.graph
        assert calls is not None and calls.repeated is not None
        wasted = (graph.wasted_share or 0.0) if graph is not None else 0.0
        num_free, share, low = _without_gradients(profile, calls)
        if num_free >= MIN_REPEATS:
            phase, lost_ns = Phase.EVALUATION, _evaluation_ns(profile, share)
            proof = f"{num_free:.0f} calls per step without gradients get what is trained on."
        elif (calls.repeated_with_grad or 0.0) >= MIN_REPEATS and wasted >= MIN_WASTED:
            phase, low = Phase.FORWARD, LOW
            lost_ns = wasted * profile.spent_ns(Phase.FORWARD)
            proof = f"{format_share(wasted)} of the graph is never used by a backward pass."
        elif (judged := calls.judged_with_grad or 0.0) >= MIN_REPEATS and wasted >= MIN_WASTED:
            phase, low = Phase.EVALUATION, _low_of_switched(profile)
            # No longer than the training call, whose loss is in this, too: something else may be evaluated.
            lost_ns = min(judged * profile.spent_ns(Phase.FORWARD), _evaluation_ns(profile, 1.0))
            proof = f"{format_share(wasted)} of the graph is never used by a backward pass."
        else:
            return None
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary="The model computes each batch a second time.",
            lost_ns={phase: lost_ns},
            low_ns=low * lost_ns,
            high_ns=lost_ns,
            assumption="what the second call is for can be had from the first one's output",
            evidence=(
                f"In {calls.num_steps} steps looked at, the same samples were given to the model again.",
                proof,
                f"The second call takes {format_ms(lost_ns)} of each step.",
            ),
            fix="Use the output of the training forward, detached, instead of calling the model again.",
            code="accuracy = (output.detach().argmax(1) == labels).float().mean()",
            file=calls.file,
            line=calls.line,
        )


def _evaluation_ns(profile: Profile, share: float) -> float:
    """Returns nanoseconds of each step that a part of a usual evaluation takes, none of it acting."""
    evaluation_ns = profile.spent_ns(Phase.EVALUATION)
    usual_ns = profile.series.median_ns.get(Phase.EVALUATION, evaluation_ns)
    usual_step_ns = sum(profile.series.median_ns.values()) or profile.step_time_ns
    # Scaled, because a disturbed step is longer in all of its phases.
    scaled_ns = usual_ns * profile.step_time_ns / usual_step_ns
    acting_ns = rollout_share(profile, Phase.EVALUATION) * profile.step_time_ns
    return min(share * scaled_ns, max(0.0, evaluation_ns - acting_ns))


def _low_of_switched(profile: Profile) -> float:
    """Returns the part that is won at least of a call in evaluation mode."""
    graph = profile.program.graph
    return LOW_OF_DROPOUT if graph is not None and graph.has_dropout else LOW


def _without_gradients(profile: Profile, calls: Calls) -> tuple[float, float, float]:
    """Returns how many calls per step are for nothing, which part of the gradient-free computing they are,
    and which part of their time is won at least."""
    num_calls = (calls.repeated or 0.0) + (calls.judged or 0.0)
    share = 1.0 if calls.repeated_share is None else calls.repeated_share
    # An agent must have acted before it can learn of that.
    if calls.repeated_before and not rollout_share(profile, Phase.EVALUATION):
        share = (share if num_calls else 0.0) + (1.0 if calls.before_share is None else calls.before_share)
        num_calls += calls.repeated_before
    return num_calls, min(1.0, share), _low_of_switched(profile) if calls.judged else LOW
