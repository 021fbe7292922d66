"""The gate's result in sentences and figures, as every output that people read has them."""

from __future__ import annotations

import math
import textwrap

from diagnose.core.units import format_bytes, format_rate
from diagnose.gate.result import GateResult, Judgement, Metric, Verdict
from diagnose.gate.statistics import MIN_PAIRS
from diagnose.report import Terminal
from diagnose.report._wording import printable


def headline(result: GateResult) -> str:
    """Returns the verdict with the figure it rests on, in one sentence."""
    judgement = result.judgement
    if result.failure is not None:
        return f"{result.verdict.label}: {result.failure.reason}"
    if judgement is None or math.isnan(judgement.drop):
        cause = result.causes[0] if result.causes else "nothing was measured"
        return f"{result.verdict.label}: {cause}"
    return f"{result.verdict.label}: {change(judgement)}; allowed: {format_percent(judgement.max_drop)}"


def rows(result: GateResult) -> list[tuple[str, str]]:
    """Returns the rest of what is to be said, a name and a text each. Names may have a colon."""
    judgement = result.judgement
    found = [("versions", version_words(result))]
    if judgement is not None and judgement.pairs:
        found.append((judgement.metric.label, figures(judgement)))
        found.append(("certainty", sensitivity(judgement)))
    for each in result.beside:
        if each.pairs:
            found.append((f"beside: {each.metric.label}", f"{change(each)}: {within(each)}"))
    found += [("because", cause) for cause in result.causes if cause not in headline(result)]
    found += [("to do", result.advice)] if result.advice else []
    return found + [("note", note) for note in result.notes]


def change(judgement: Judgement) -> str:
    """Returns `samples/s is 4.1 % lower (3.2 to 5.0)`; no interval where too little was measured."""
    drop, low, high = judgement.drop, judgement.low, judgement.high
    worse = drop >= 0
    down = worse == judgement.metric.more_is_better
    if not worse:
        drop, low, high = -drop, -high, -low
    interval = "" if math.isnan(low) else f" ({100 * low:.1f} to {100 * high:.1f})"
    return f"{judgement.metric.label} is {format_percent(drop)} {'lower' if down else 'higher'}{interval}"


def figures(judgement: Judgement) -> str:
    """Returns `412 before, 395 now`."""
    return (
        f"{amount(judgement.base, judgement.metric)} before, {amount(judgement.head, judgement.metric)} now"
    )


def amount(value: float, metric: Metric) -> str:
    """Returns a metric's value with its unit."""
    if math.isnan(value):
        return "?"
    if metric.more_is_better:
        return f"{format_rate(value)}/s"
    if metric in (Metric.STEP_MS, Metric.CPU_MS):
        return f"{format_rate(value)} ms"
    if metric in (Metric.PEAK_MEMORY, Metric.PEAK_DEVICE_MEMORY):
        return format_bytes(value)
    if metric is Metric.STARTUP:
        return f"{value:.1f} s"
    return f"{value:.4g}"


def sensitivity(judgement: Judgement) -> str:
    """Says how sure a loss is; where none was found, which one would have been."""
    of_pairs = not math.isnan(judgement.p)
    number = f"{judgement.pairs} {'pair' if of_pairs else 'job'}{'' if judgement.pairs == 1 else 's'}"
    number += "" if of_pairs else " in the baseline"
    if judgement.verdict is Verdict.REGRESSION and of_pairs and judgement.pairs < MIN_PAIRS:
        return f"{number}, each with more than twice the cost that is allowed"
    if judgement.verdict is Verdict.REGRESSION and of_pairs:
        chance = f"{100 * judgement.p:.2g} %" if judgement.p >= 1e-4 else "less than 0.01 %"
        return f"{number}; equal versions would look like this in {chance} of cases"
    if math.isnan(judgement.detectable):
        return f"{number}: too few to say which drop would be found"
    return f"{number}; a drop of {format_percent(judgement.detectable)} would be found in 95 of 100 cases"


def within(judgement: Judgement) -> str:
    """Returns a metric's own verdict, of which the gate's may be another."""
    words = {Verdict.PASS: "within the limit", Verdict.REGRESSION: "beyond the limit"}
    return words.get(judgement.verdict, "cannot tell")


def format_percent(share: float) -> str:
    """Returns a share in percent with one decimal, signed only below 0: `4.1 %`."""
    return f"{100 * share:.1f} %"


def version_words(result: GateResult) -> str:
    """Returns which versions were compared: `main (1a2b3c4d) and HEAD (5e6f7a8b)`."""
    names = [f"{side.name} ({side.commit[:8]})" if side.commit else side.name for side in result.sides]
    return " and ".join(names)


def wrapped(text: str, terminal: Terminal, first: str = "", *, hanging: str = "    ") -> list[str]:
    """Returns the lines of a text, harmless in a terminal.

    Args:
        text: The text.
        terminal: Where it goes.
        first: What the first line begins with; the others begin as far to the right.
        hanging: What the others begin with where the first begins with nothing.
    """
    return textwrap.wrap(
        printable(" ".join(text.split())),
        width=terminal.width,
        initial_indent=first,
        subsequent_indent=" " * len(first) or hanging,
        break_on_hyphens=False,
        break_long_words=False,
    ) or [first.rstrip()]
