"""A snapshot composed of what the readers of all ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diagnose.dashboards._bins import Bins
from diagnose.dashboards._device_steps import Seen
from diagnose.dashboards._lateness import lateness_of
from diagnose.dashboards._marks import marks_of, tuning_so_far
from diagnose.dashboards._series import GapParts, steps_of
from diagnose.dashboards._snapshot import RankState, Snapshot, Steps
from diagnose.dashboards._tailing import RECENT_STEPS, RankTail
from diagnose.dashboards._throughput import newest_end, overall, recent
from diagnose.dashboards._waits import LateBins

from diagnose.analysis.history import loss_of
from diagnose.analysis.readings import vitals_of
from diagnose.analysis.run_info import why_lost
from diagnose.core.deep_window import KIND as DEEP
from diagnose.core.liveness import Liveness, State
from diagnose.core.profile import RunInfo
from diagnose.report._status import in_words
from diagnose.store.runs import read_lost

TAKES_COMMANDS = "takes_commands"
"""What a rank says of itself when it looks for commands (`launch.control`)."""


def composed(
    version: int,
    folder: Path,
    manifest: Mapping[str, Any],
    liveness: Liveness,
    tails: Sequence[RankTail],
    parts: Mapping[str, GapParts],
    met: LateBins | None,
) -> Snapshot:
    """Returns what is known of a run, without what the rules say of it.

    Args:
        version: Of the snapshot.
        folder: The run's.
        manifest: What `run.json` says.
        liveness: Whether it goes on.
        tails: The readers of its ranks, in order.
        parts: By the name of a rank's file, how its gaps divide among the phases.
        met: What the ranks wait for each other, where that is measured in each step.
    """
    trained = [tail for tail in tails if tail.num_steps]
    meta = trained[0].meta if trained else {}
    lost = read_lost(folder)
    return Snapshot(
        version=version,
        id=folder.name,
        script=str(manifest.get("script", "")),
        argv=tuple(map(str, manifest.get("argv") or ())),
        started=str(manifest.get("started", "")),
        liveness=liveness,
        words=words(folder.name, manifest, liveness, meta),
        notes=_notes(manifest, lost, liveness, tails),
        lost=why_lost({**manifest, "lost": lost}),
        world_size=max(1, len(trained)),
        ranks=tuple(
            RankState(number=tail.number, num_steps=tail.num_steps, words=_damage(tail, liveness))
            for tail in tails
        ),
        refuses=_refuses(liveness, meta),
        **(_of_steps(trained, parts, met, liveness) if trained else {}),
    )


def _of_steps(
    trained: Sequence[RankTail], parts: Mapping[str, GapParts], met: LateBins | None, liveness: Liveness
) -> dict[str, Any]:
    """Returns what is known of a run that has steps."""
    first = trained[0]
    own = [parts.get(tail.path.name, {}) for tail in trained]
    end = max(tail.num_steps for tail in trained)
    for tail in trained:
        tail.bins.make_room(end)
    seen = first.seen(end, over=liveness.state is not State.RUNNING)
    nvml = (first.meta.get("facts") or {}).get("nvml") or {}
    return {
        "num_steps": first.num_steps,
        "device_share": seen.device_share,
        "overview": steps_of(seen.bins, overall(trained, seen), own[0]),
        "recent": _recent(trained, seen, own[0]),
        "lateness": lateness_of(trained, own, met),
        "vitals": vitals_of(first.vitals, first.begun_ns or 0, nvml),
        "tuning": tuning_so_far(first.events, first.num_steps),
        "loss": loss_of(first.meta),
        "marks": marks_of(first.events),
    }


def doing(tails: Iterable[RankTail]) -> str:
    """Returns what tuning does now, and how many deep windows there were: with either the rules have
    something new to say."""
    first = next(iter(tails), None)
    events = first.events if first is not None else []
    tuning = next((str(e.detail.get("state", "")) for e in reversed(events) if e.kind == "tuning"), "")
    windows = sum(event.kind == DEEP and event.detail.get("state") != "begun" for event in events)
    return f"{tuning}/{windows}"


def words(name: str, manifest: Mapping[str, Any], liveness: Liveness, meta: Mapping[str, Any]) -> str:
    """Says how a run stands: `running, last record 0.4 s ago`."""
    exit_code, signal = manifest.get("exit_code"), manifest.get("signal")
    run = RunInfo(
        id=name,
        script=str(manifest.get("script", "")),
        exit_code=exit_code if isinstance(exit_code, int) else None,
        signal=signal if isinstance(signal, int) else None,
        error=str(meta["error"]) if meta.get("error") else None,
    )
    return in_words(run, liveness)


def _recent(trained: Sequence[RankTail], seen: Seen, parts: GapParts) -> Steps:
    """Returns the first rank's newest steps one by one, with the throughput of all ranks."""
    end = newest_end(trained, seen)
    begin = max(0, end - RECENT_STEPS)
    bins = Bins(begin)
    rows_from = seen.num_steps - len(seen.recent)
    rows = seen.recent[max(0, begin - rows_from) : max(0, end - rows_from)]
    bins.add_rows(max(begin, rows_from), rows)
    return steps_of(bins, recent(trained, seen, begin, end), parts)


def _damage(tail: RankTail, liveness: Liveness) -> str:
    """Says what is wrong with a rank's file, if anything is."""
    if not tail.has_begun and liveness.state in (State.ENDED, State.GONE):
        return f"{tail.path.name} holds nothing: its process ended before it had written anything"
    return tail.words


def _notes(
    manifest: Mapping[str, Any], lost: str, liveness: Liveness, tails: Sequence[RankTail]
) -> tuple[str, ...]:
    notes: list[str] = []
    if not manifest:
        notes.append("run.json cannot be read; what it says of the run is missing.")
    if lost:
        notes.append(lost)
    notes += [str(note) for note in manifest.get("notes") or ()]
    for tail in tails:
        damage = _damage(tail, liveness)
        if damage:
            notes.append(f"{damage}.")
        who = f"rank {tail.number}: " if len(tails) > 1 else ""
        notes += [f"{who}{note}" for note in tail.meta.get("notes") or ()]
    return tuple(dict.fromkeys(notes))


def _refuses(liveness: Liveness, meta: Mapping[str, Any]) -> str:
    """Says why the job takes no commands; nothing where it does."""
    if liveness.state is not State.RUNNING:
        return "The run has ended." if liveness.state is State.ENDED else "The run is not seen to go on."
    if not meta.get(TAKES_COMMANDS):
        return "This run takes no commands: no step of it has been recorded yet."
    return ""
