"""The loop waits while its model acts and the environment answers"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.program import Calls, Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import at, bounds, lost_of, named, part_of, seen_in, share_of
from diagnose.rules.base import Rule

MIN_SHARE = 0.10
"""Experience has to come from somewhere; below this it is nobody's fault."""

WON = 0.5
"""The part that the fix is said to win: two environments at once halve the wait for them. More win more,
where there are CPUs for them."""

AT_ONCE = 8
MIN_TOGETHER = 0.15
"""Where the model acts for so many environments in one call, or more, it has what stepping several wins:
only the time of the environments themselves counts then, from more on."""

MAX_LINES = 3
VECTORIZED = "envs = gymnasium.vector.SyncVectorEnv([make_env] * 8)"
VECTORS = "gymnasium/vector/"
"""Where the time is, in a script that steps several at once."""

TOGETHER = (
    "Step {more} environments at once, and let the model choose for all of them in one call. In one process"
    " where a step takes less than a millisecond, as SyncVectorEnv does: telling another process takes a"
    " fifth of one. Else in processes of their own, as AsyncVectorEnv does."
)
WRITE = (
    "Write for several steps in one call, and keep what attention needs of earlier words, a cache of keys"
    " and values, so that each new word is computed once."
)
ENVIRONMENT, MODEL = "the environment", "choosing what to do"


class SlowRollout(Rule):
    """
    ## What it means
    A reinforcement learner gets its data by acting: the model chooses an action, without gradients, and the
    environment's `step` answers. That happens on the training thread, one step after the other, and the
    learning waits for it. It is no evaluation, and no data that could be prepared once. So it is where a
    language model writes, word by word, the texts that it is then trained on.

    ## What to do
    Step many environments at once and give the model their observations as one batch:
    `gymnasium.vector.SyncVectorEnv` steps them in turn, which is best where a step takes less than a
    millisecond; `AsyncVectorEnv` steps each in a process of its own, and telling that takes 0.2 ms. Write
    the environment in tensor or array operations on all copies, or use one that is. Or let actors collect
    while the learner learns. A model that writes texts needs a cache of keys and values, and many texts in
    one call.

    ## When it is wrong
    An environment that cannot be copied, such as a robot; an algorithm that must learn after each step.
    Where the model acts for eight environments or more in one call, only the environment's own time counts.
    """

    is_limit = True  # somebody has to act
    fires_on = (
        profile(
            evaluation_ms=60,
            where=(
                at("obs, reward, done, info = env.step(a)", 0.4, "environment", phase=Phase.EVALUATION),
                at("a = policy(obs).sample()", 0.2, "rollout", phase=Phase.EVALUATION),
            ),
        ),
        profile(
            data_wait_ms=50, where=(at("obs = env.step(a)", 0.5, "environment", phase=Phase.DATA_WAIT),)
        ),
        profile(other_ms=30, where=(at("obs = env.step(a)", 0.3, "environment"),)),
        profile(
            evaluation_ms=30,
            program=Program(calls=Calls(num_steps=5, free=2.0, free_rows=64)),
            where=(at("logits = model(rows)[:, -1]", 0.3, "rollout", phase=Phase.EVALUATION),),
        ),
        profile(
            evaluation_ms=60,
            where=(
                replace(at("return self.layers(x)", 0.5, phase=Phase.EVALUATION), acting=0.2),
                at("yield obs, *env.step(a)", 0.1, "environment", phase=Phase.EVALUATION),
            ),
        ),
    )
    silent_on = (
        profile(),
        profile(other_ms=8, where=(at("obs = env.step(a)", 0.08, "environment"),)),
        profile(evaluation_ms=30, where=(at("out = model(x)", 0.3, phase=Phase.EVALUATION),)),
        profile(other_ms=30, where=(at("optimizer.step()", 0.3),)),
        profile(
            evaluation_ms=30,
            program=Program(calls=Calls(num_steps=5, free=2.0, free_rows=64)),
            where=(
                at("reward = envs.step(a)", 0.12, "environment", phase=Phase.EVALUATION),
                at("a = policy(obs).sample()", 0.2, "rollout", phase=Phase.EVALUATION),
            ),
        ),
    )

    def applies(self, profile: Profile) -> bool:
        return any(rollouts(profile))

    def check(self, profile: Profile) -> Finding | None:
        lines = rollouts(profile)
        stepping = tuple(line for line in lines if "environment" in line.idiom)
        calls = profile.program.calls
        together = stepping and calls is not None and (calls.free_rows or 0) >= AT_ONCE
        if together:
            lines = stepping
        share = share_of(lines)
        if share < (MIN_TOGETHER if together else MIN_SHARE):
            return None
        if not stepping:
            return self._writing(profile, lines, share)
        lost = lost_of(profile, lines)
        _, high = bounds(lost, lines)
        whole = sum(lost.values())
        part = sum(line.share for line in stepping)
        by_gymnasium = any(line.via.startswith("gymnasium/") for line in stepping)
        vectors = any(line.via.startswith(VECTORS) for line in stepping)
        return Finding(
            rule=self.name,
            summary=f"Collecting experience takes {format_share(share)} of each step, {format_ms(whole)}:"
            f" the environment {format_share(part)}, in {named(stepping[0])}",
            lost_ns=lost,
            low_ns=0.0,
            high_ns=max(high, whole),
            assumption="the loop waits for no experience; the fix steps two environments at once, and more"
            " win more, where there are CPUs for them",
            evidence=tuple(
                f"{seen_in(line)}: {ENVIRONMENT if line in stepping else MODEL}."
                for line in lines[:MAX_LINES]
            ),
            fix_won_ns=WON * whole,
            fix=TOGETHER.format(more="more" if vectors else "several"),
            code=VECTORIZED if not vectors and by_gymnasium else "",
            file=stepping[0].file,
            line=stepping[0].line,
        )

    def _writing(self, profile: Profile, lines: Sequence[SourceLine], share: float) -> Finding:
        """Returns the finding about a model that writes what it is trained on: nobody answers it."""
        lost = lost_of(profile, lines)
        whole = sum(lost.values())
        return Finding(
            rule=self.name,
            summary=f"Writing what is trained on takes the model {format_share(share)} of each step,"
            f" {format_ms(whole)}, in {named(lines[0])}",
            lost_ns=lost,
            low_ns=0.0,
            high_ns=max(bounds(lost, lines)[1], whole),
            assumption="the loop waits for no text; twice as many in one call take hardly longer",
            evidence=tuple(f"{seen_in(line)}: {MODEL}." for line in lines[:MAX_LINES]),
            fix_won_ns=WON * whole,
            fix=WRITE,
            file=lines[0].file,
            line=lines[0].line,
        )


def is_rollout(line: SourceLine) -> bool:
    """Whether a line steps an environment, or lets the model act in one."""
    return not line.in_worker and not {"environment", "rollout"}.isdisjoint(line.idiom)


def rollouts(profile: Profile) -> tuple[SourceLine, ...]:
    """Returns what such lines take, the most expensive first: of lines that also do something else, as
    those of a model that acts and is taught, only the part in which they act."""
    found = [
        part_of(line, part)
        for line in profile.where
        for part in (line.acting or (line.share if is_rollout(line) else 0.0),)
        if part and not line.in_worker
    ]
    return tuple(sorted(found, key=lambda line: -line.share))


def beside_acting(lines: Iterable[SourceLine]) -> tuple[SourceLine, ...]:
    """Returns what lines take beside acting, the most expensive first: an environment may call a helper of
    the loop, too."""
    found = [
        replace(part_of(line, line.share - line.acting), acting=0.0)
        for line in lines
        if line.share > line.acting
    ]
    return tuple(sorted(found, key=lambda line: -line.share))


def rollout_share(profile: Profile, phase: Phase) -> float:
    """Returns the part of the measured time that such lines take of a phase."""
    return sum(line.share for line in rollouts(profile) if line.phase is phase)
