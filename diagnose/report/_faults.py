"""Words for findings that several reports share."""

from __future__ import annotations

from diagnose.core.deep_window import TOLD
from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.core.units import format_gain, format_ms, format_share, format_speedup
from diagnose.report._tuning_words import named
from diagnose.report._wording import plural
from diagnose.rules import WORTH_SHARE


def gain(finding: Finding, profile: Profile) -> str:
    """Returns `1.4x (1.2 to 1.6)`: how much faster training would be with the fix."""
    gained = finding.gain_of_fix(profile.step_time_ns)
    return format_gain(gained.speedup, gained.low, gained.high)


def short_gain(finding: Finding, profile: Profile) -> str:
    """Returns `1.4x`."""
    return format_speedup(finding.gain_of_fix(profile.step_time_ns).speedup)


def gain_in_words(finding: Finding, profile: Profile) -> str:
    """Returns what the gain is of: the fault's end, or a fix that wins only a part of it."""
    if finding.fix_won_ns is None:
        return "faster without it"
    whole = format_speedup(finding.gain(profile.step_time_ns).speedup)
    return f"faster with this fix; {whole} without the fault"


def lost(finding: Finding) -> str:
    """Returns `20.5 ms`: what the fault costs per step."""
    return format_ms(finding.lost_ns_per_step)


def lost_share(finding: Finding, profile: Profile) -> str:
    """Returns `50 %`: the part of the step that the fault costs."""
    return format_share(finding.lost_ns_per_step / profile.step_time_ns)


def headline(finding: Finding) -> str:
    """Returns the summary as a heading has it, without its full stop."""
    return finding.summary.removesuffix(".")


def ranks(finding: Finding) -> str:
    """Returns `rank 3` or `ranks 0, 3`; nothing where all have the fault."""
    numbers = ", ".join(map(str, finding.ranks))
    return numbers and f"rank{'s' if len(finding.ranks) > 1 else ''} {numbers}"


def in_force(finding: Finding, profile: Profile) -> tuple[str, ...]:
    """Returns what tuning has kept in force against a fault, such as `loader-workers=2`."""
    kept = profile.tuning.kept if profile.tuning is not None else ()
    against = (t for t in kept if t.rule == finding.rule or t.action in finding.actions)
    return tuple(named(trial) for trial in against)


def is_gone(finding: Finding, profile: Profile) -> bool:
    """Whether a fault that has fixes was not found any more with what tuning has kept."""
    tuning = profile.tuning
    if tuning is None or not tuning.kept or tuning.left is None:
        return False
    return bool(finding.actions) and finding.rule not in tuning.left


def unheard(profile: Profile) -> str:
    """Says how many rules a deep window would let answer; empty where none, or not on a device."""
    would = sum(abstention.missing in TOLD for abstention in profile.abstained)
    if not would or profile.run.device == "cpu":
        return ""
    return f"{plural(would, 'more rule')} could answer with --deep-window auto"


def no_fault(profile: Profile, cells: int | None = None) -> str | None:
    """Says that the rules found nothing; `None` where they found something, or were not asked.

    Args:
        profile: The run.
        cells: Columns to say it in; a shorter sentence is used where the long one does not fit.
    """
    if profile.findings or profile.num_rules is None:
        return None
    worth = f"{100 * WORTH_SHARE:.0f} %"
    asked = plural(profile.num_rules, "rule") + " asked"
    asked += f", {len(profile.abstained)} abstained" if profile.abstained else ""
    text = f"no fault found that costs {worth} of the step or more; {asked}"
    if cells is None or len(text) <= cells:
        return text
    text = f"no fault of {worth} or more found; {asked}"
    return text if len(text) <= cells else f"no fault of {worth} or more found"
