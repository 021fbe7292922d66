"""What tuning did, as the end block has room for it."""

from __future__ import annotations

from diagnose.core.profile import Profile
from diagnose.core.trial import Outcome
from diagnose.report._end_findings import one_line
from diagnose.report._terminal import Terminal
from diagnose.report._tuning_words import measured, named, outcome, predicted, verdict

MARK = {Outcome.KEPT: "+", Outcome.HARMED: "-", Outcome.REVERTED: "-", Outcome.CANNOT_TELL: "-"}
NAME_CELLS = 20
MAX_LINES = 4  # the verdict on tuning, and the most telling trials


def tuning_lines(profile: Profile, terminal: Terminal) -> list[str]:
    """Returns a few lines: the verdict, then the trials, those that were measured first."""
    if profile.tuning is None:
        return []
    lines = [terminal.paint("  " + one_line(verdict(profile.tuning), terminal.width - 2, terminal), "bold")]
    trials = sorted(
        profile.tuning.trials,
        key=lambda trial: list(MARK).index(trial.outcome) if trial.outcome in MARK else len(MARK),
    )
    for trial in trials[: MAX_LINES - 1]:
        name = f"{MARK.get(trial.outcome, ' ')} {named(trial)}"
        told = outcome(trial)
        if trial.measured is not None:
            told = f"{measured(trial)}, predicted {predicted(trial)}"
            told += "" if trial.outcome is Outcome.KEPT else f"; {outcome(trial)}"
        lines.append("  " + one_line(f"{name:<{NAME_CELLS}} {told}", terminal.width - 2, terminal))
    return lines
