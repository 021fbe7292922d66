"""What tuning came to so far: the report's words suppose that the script has ended."""

from __future__ import annotations

from dataclasses import replace

from diagnose.dashboards._snapshot import Snapshot

from diagnose.core.liveness import State
from diagnose.core.trial import Tuning
from diagnose.report._tuning_words import MEASURED, verdict

SO_FAR = {
    "observing": "tuning observes the run; nothing is changed yet",
    "trying": "tuning is trying fixes",
    "waiting": "tuning has nothing to try now; it looks again later",
    "confirming": "tuning is confirming what it kept, all on against all off",
}


def is_running(snap: Snapshot) -> bool:
    """Whether the script may still take steps."""
    return snap.liveness.state is State.RUNNING


def tuning_of(snap: Snapshot) -> Tuning | None:
    """Returns what tuning did, as new as it is known."""
    analysed = snap.profile.tuning if snap.profile is not None else None
    if snap.tuning is None or not is_running(snap):
        return analysed or snap.tuning
    return replace(snap.tuning, tuned_phase_time_ns=analysed.tuned_phase_time_ns if analysed else {})


def tuning_words(snap: Snapshot, tuning: Tuning) -> str:
    """Says what tuning came to, of a running job without speaking of its end."""
    settled = tuning.confirmation or tuning.errors or tuning.frozen or tuning.undone
    if not is_running(snap) or settled:
        return verdict(tuning)
    tried = sum(trial.outcome in MEASURED for trial in tuning.trials)
    words = SO_FAR.get(tuning.state, "tuning goes on")
    if not tried:
        return words
    return f"{words}; measured so far: {tried}, kept: {len(tuning.kept)}"
