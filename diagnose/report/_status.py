"""How a run stands, in a few lines: for a look from another terminal while it trains."""

from __future__ import annotations

from typing import Any

from diagnose.core.liveness import Liveness, State
from diagnose.core.profile import Profile, RunInfo, Status
from diagnose.core.units import NS_PER_S, format_duration
from diagnose.report._end_findings import finding_lines
from diagnose.report._json import to_json
from diagnose.report._terminal import Terminal
from diagnose.report._wording import figures_line, nothing_measured, outcome, plural

MAX_FINDING_LINES = 9
KEYS = ("schema", "run", "status", "throughput", "steps", "findings", "abstained", "num_rules", "notes")


def status_text(profile: Profile, liveness: Liveness, terminal: Terminal) -> str:
    """Prints how a run stands: whether it goes on, its figures, and the most costly findings."""
    state = f"run {profile.run.id}: {in_words(profile.run, liveness)}"
    lines = [terminal.paint(terminal.clean(state), "bold")]
    if profile.steps.measured <= 0:
        waits = liveness.state is State.RUNNING and not profile.run.lost
        text = "no step has ended yet" if waits else nothing_measured(profile)
        return "".join(f"{line}\n" for line in [*lines, f"  {text}"])
    lines.append(f"  {figures_line(profile, [], terminal.width - 2)}")
    if profile.status is Status.TOO_FEW_STEPS:
        lines.append(f"  {plural(profile.steps.measured, 'step')} measured: too few for a verdict yet")
    lines += finding_lines(profile, MAX_FINDING_LINES, terminal)[0]
    return "".join(f"{line}\n" for line in lines)


def status_json(profile: Profile, liveness: Liveness) -> dict[str, Any]:
    """Returns how a run stands as JSON: a summary of its report, and under `live` whether it goes on."""
    report = to_json(profile)
    return {
        **{key: report[key] for key in KEYS},
        "live": {
            "state": liveness.state.value,
            "host": liveness.host,
            "pid": liveness.pid,
            "last_record_s": liveness.last_record_s,
        },
    }


def in_words(run: RunInfo, liveness: Liveness) -> str:
    """Says whether the run goes on, and when it last left a record."""
    ago = "no record yet"
    if liveness.last_record_s is not None:
        ago = f"last record {format_duration(liveness.last_record_s * NS_PER_S)} ago"
    if liveness.state is State.RUNNING:
        return f"running, {ago}"
    if liveness.state is State.GONE:
        return f"no longer running, not closed; {ago}"
    if liveness.state is State.CANNOT_TELL:
        where = f" on {liveness.host}" if liveness.host else ""
        return f"not closed{where}, {ago}"
    ended = outcome(run)
    return "ended" if ended == "no end seen" else f"ended ({ended})"
