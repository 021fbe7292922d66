"""Words for trials that several reports share."""

from __future__ import annotations

from diagnose.core.trial import IN_PLACE, Measured, Outcome, Trial, Tuning
from diagnose.core.units import format_gain, format_speedup

TOLD = {
    Outcome.KEPT: "kept",
    Outcome.REVERTED: "no faster, undone",
    Outcome.HARMED: "harmful, undone",
    Outcome.CANNOT_TELL: "cannot tell, undone",
    Outcome.REFUSED: "refused",
    Outcome.NOT_ALLOWED: "not allowed",
    Outcome.NOT_TRIED: "not tried",
}
MEASURED = (Outcome.KEPT, Outcome.REVERTED, Outcome.HARMED, Outcome.CANNOT_TELL)


def verdict(tuning: Tuning) -> str:
    """Returns what tuning came to, in one sentence without its full stop."""
    if tuning.frozen:
        return f"tuning stopped with {', '.join(tuning.in_force) or 'nothing'} in force: {tuning.frozen}"
    if tuning.errors:
        return "tuning failed in a bug of ours; everything was undone, and training went on"
    if tuning.undone:
        return f"nothing kept: {tuning.undone}"
    if tuning.kept:
        fixes = _fixes(len(tuning.kept))
        together = tuning.rechecks[-1] if tuning.confirmation is None and tuning.rechecks else None
        confirmed = tuning.confirmation or together
        earlier = tuning.earlier
        if confirmed is None and earlier is not None and earlier.low > 1:
            since = len(tuning.kept) - tuning.num_earlier
            return f"{confirmed_with(earlier, tuning.num_earlier)}; {since} more kept since"
        if confirmed is None:
            confirmed_as = "it was confirmed" if len(tuning.kept) == 1 else "they were confirmed together"
            return f"{fixes} kept; the script ended before {confirmed_as}"
        if confirmed.low <= 1:
            return f"{fixes} kept; together {gain(confirmed)}: cannot tell from noise"
        return confirmed_with(confirmed, len(tuning.kept))
    tried = sum(trial.outcome in MEASURED for trial in tuning.trials)
    harmful = [trial.action for trial in tuning.trials if trial.outcome is Outcome.HARMED]
    if harmful:
        return f"nothing kept: {_fixes(tried)} tried; harmful, and undone: {', '.join(harmful)}"
    if tuning.dropped:
        return f"nothing kept to the end; kept at first and undone later: {', '.join(tuning.dropped)}"
    if tried:
        return f"nothing kept: {_fixes(tried)} tried, none measurably faster"
    if tuning.trials:
        return "nothing tried: " + "; ".join(
            dict.fromkeys(f"{trial.action} {TOLD[trial.outcome]}" for trial in tuning.trials)
        )
    if not tuning.diagnosed:
        return "nothing tried: the script ended while it was still being observed"
    return "nothing tried: no finding names a fix that can be applied to a running job"


def confirmed_with(measured: Measured, count: int) -> str:
    """Returns how much faster so many fixes were found to be together."""
    return f"tuned to {gain(measured)} of its speed with {_fixes(count)}, confirmed on against off"


def _fixes(count: int) -> str:
    return "1 fix" if count == 1 else f"{count} fixes"


def named(trial: Trial) -> str:
    """Returns `loader-workers=2`."""
    return trial.action if trial.value is None else f"{trial.action}={trial.value}"


def gain(measured: Measured) -> str:
    """Returns `1.4x (1.2 to 1.6)`."""
    return format_gain(measured.speedup, measured.low, measured.high)


def outcome(trial: Trial) -> str:
    """Returns what became of a trial, with the reason where there is one to give."""
    told = TOLD[trial.outcome]
    if trial.outcome is Outcome.NOT_ALLOWED:
        return trial.reason
    if trial.outcome is Outcome.CANNOT_TELL and trial.measured is not None:
        told += f" (it takes {format_speedup(trial.measured.detectable)} to be seen)"
    hidden = trial.outcome in (Outcome.KEPT, Outcome.REVERTED, Outcome.NOT_TRIED)
    hidden = hidden and not trial.reason.startswith(IN_PLACE)
    return told if hidden or not trial.reason else f"{told}: {trial.reason}"


def measured(trial: Trial) -> str:
    """Returns what was measured, or a dash."""
    return gain(trial.measured) if trial.measured is not None else "-"


def predicted(trial: Trial) -> str:
    """Returns what was expected, or a dash."""
    return format_speedup(trial.predicted.speedup) if trial.predicted is not None else "-"
