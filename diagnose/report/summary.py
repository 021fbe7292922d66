"""The figures that the reader came for, below what must be known of them first."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_US, format_duration, format_rate
from diagnose.report._tuning_words import gain
from diagnose.report._wording import (
    coverage,
    failure,
    likely_reason,
    nothing_measured,
    percent,
    too_few,
    what_to_do_without_steps,
)
from diagnose.report.base import Block, Fact, Facts, Paragraph, Section


class Summary(Section):
    """How the run ended, step time, throughput, and what measuring cost."""

    order = 10
    title = ""

    def blocks(self, profile: Profile) -> Sequence[Block]:
        paragraphs: list[Block] = []
        failed = failure(profile)
        if failed:
            covered = f"; {coverage(profile)}" if profile.steps.measured > 0 else ""
            reason = likely_reason(profile.run)
            paragraphs.append(Paragraph(text=f"The {failed}{covered}.", alarm=True))
            if reason:
                paragraphs.append(Paragraph(text=sentence(reason)))
        doubt = too_few(profile)
        if profile.steps.measured <= 0:
            advice, code = what_to_do_without_steps(profile)
            paragraphs.append(Paragraph(text=f"{sentence(nothing_measured(profile))} {advice}", code=code))
        elif doubt:
            paragraphs.append(Paragraph(text=sentence(doubt), alarm=True))
        return [*paragraphs, Facts(items=tuple(measured(profile)), headline=True)]


def sentence(text: str) -> str:
    """Returns `text` as a sentence of its own."""
    return f"{text[0].upper()}{text[1:]}."


def measured(profile: Profile) -> list[Fact]:
    """Returns what tuning won, the measured figures, and what measuring cost, each where it is known."""
    return [*_won(profile), *_figures(profile), *_cost(profile)]


def _won(profile: Profile) -> list[Fact]:
    if profile.tuning is None or profile.tuning.confirmed is None:
        return []
    confirmed, of = profile.tuning.confirmed
    speedup, _, interval = gain(confirmed).partition(" (")
    detail = f"{interval.rstrip(')')}; confirmed on against off{'' if of == 'all' else f', {of}'}"
    return [Fact(label="tuned to", value=speedup, detail=detail)]


def _figures(profile: Profile) -> list[Fact]:
    """Where tuning kept something they are those before it did, and say so, with those after."""
    steps, throughput = profile.steps, profile.throughput
    tuned = profile.tuning if profile.tuning is not None and profile.tuning.kept else None

    def told(details: Sequence[str], after: str = "") -> str:
        before = [f"before tuning; after it {after}" if after else "before tuning"] if tuned else []
        return ", ".join([*details, *before])

    facts = []
    if throughput.samples_per_s is not None:
        after_per_s = tuned.tuned_samples_per_s if tuned else None
        interval = throughput.samples_per_s_ci95
        within = (
            [f"95 % interval {format_rate(interval[0])}-{format_rate(interval[1])}"] if interval else []
        )
        detail = told(within, "" if after_per_s is None else format_rate(after_per_s))
        facts.append(Fact(label="samples/s", value=format_rate(throughput.samples_per_s), detail=detail))
    if throughput.tokens_per_s is not None:
        facts.append(Fact(label="tokens/s", value=format_rate(throughput.tokens_per_s), detail=told([])))
    if steps.median_ns is not None:
        after_ns = tuned.tuned_median_ns if tuned else None
        tails = (("mean", steps.mean_ns), ("p95", steps.p95_ns), ("p99", steps.p99_ns))
        also = [f"{name} {format_duration(value)}" for name, value in tails if value is not None]
        detail = told(also, "" if after_ns is None else format_duration(after_ns))
        facts.append(Fact(label="step time, median", value=format_duration(steps.median_ns), detail=detail))
    if throughput.steps_per_s is not None:
        facts.append(Fact(label="steps/s", value=format_rate(throughput.steps_per_s), detail=told([])))
    if steps.count:
        first = "the first" if steps.warmup == 1 else f"the first {steps.warmup:,}"
        detail = f"{first} left out as warm-up" if steps.warmup else "all measured"
        if steps.left_out:
            detail = f"{max(0, steps.measured):,} measured; {steps.left_out:,} and the warm-up left out"
        facts.append(Fact(label="steps", value=f"{steps.count:,}", detail=detail))
    return facts


def _cost(profile: Profile) -> list[Fact]:
    spent = profile.overhead
    start = "" if spent.startup_s is None else f"{spent.startup_s:.2f} s at start"
    if spent.us_per_step is None:
        return [Fact(label="measuring cost", value=start)] if start else []
    share = "per step"
    if profile.step_time_ns:
        share += f", {percent(spent.us_per_step * NS_PER_US / profile.step_time_ns)} of it"
    detail = "; ".join(part for part in (share, start) if part)
    return [Fact(label="measuring cost", value=f"{spent.us_per_step:,.0f} us", detail=detail)]
