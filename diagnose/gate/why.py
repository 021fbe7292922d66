"""Why a gate's head is slower: Profiles to sentences, each with its place and its part of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diagnose.analysis.profile import load_profile, load_series, profile_of, read_logs
from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_MS, format_ms, format_share
from diagnose.gate.attribution import Runs, attribute
from diagnose.gate.cause import Growth, Kind, LineGrowth, NewFinding, PhaseGrowth, Why
from diagnose.gate.rank_to_blame import rank_to_blame
from diagnose.gate.result import GateResult, MeasuredRun, Metric, Pair, Reason, Side
from diagnose.gate.steps import usual_phases
from diagnose.gate.worktrees import renamed_files
from diagnose.rules import diagnosed
from diagnose.store.runs import read_manifest

OF_STEPS = {
    Metric.SAMPLES_PER_S,
    Metric.MEAN_SAMPLES_PER_S,
    Metric.TOKENS_PER_S,
    Metric.STEP_MS,
    Metric.CPU_MS,
    Metric.INSTRUCTIONS,
}
"""Metrics whose loss is in the steps, so that the phases of a step can explain it."""


def explain(result: GateResult) -> tuple[Reason, ...]:
    """Attributes a gate's loss. The sources of both sides must still be there.

    Returns:
        What explains the loss, the most telling first. Where nothing does, one reason says so.
    """
    rank = None
    if any(len(run.ranks) > 1 for pair in result.pairs for run in (pair.base, pair.head)):
        sides = _sides(result.pairs)
        rank = rank_to_blame(*([load_profile(run.folder) for run in side] for side in sides))
    found = reasons(why_of(result.pairs, result.metric, rank, _renamed(result.sides)), result.metric)
    if rank is None:
        return tuple(found)
    return tuple(
        replace(each, text=f"on rank {rank}, {each.text}") if each.kind in ("phase", "line") else each
        for each in found
    )


def why_of(
    pairs: tuple[Pair, ...],
    metric: Metric,
    rank: int | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Why:
    """Reads the runs of the pairs and attributes the difference, as the first rank, or another, saw it.

    Args:
        pairs: Their runs' sources must still be there.
        metric: What was judged.
        rank: Whose records to read; `None` for the first.
        renamed: Paths of the second version by those of the first, where they differ.
    """
    before, after = _sides(pairs)
    head = replace(_runs(after, metric, rank), renamed=renamed or {})
    return attribute(_runs(before, metric, rank), head, metric)


def _renamed(sides: Sequence[Side]) -> dict[str, str]:
    if len(sides) < 2 or not all(side.commit for side in sides):
        return {}
    return renamed_files(sides[1].root, sides[0].commit, sides[1].commit)


def _sides(pairs: tuple[Pair, ...]) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    return [pair.base for pair in pairs], [pair.head for pair in pairs]


def _runs(runs: list[MeasuredRun], metric: Metric, rank: int | None) -> Runs:
    root = _top(runs[0].root) if runs else Path()
    return Runs(root=root, profiles=tuple(_as_judged(run.folder, metric, rank) for run in runs))


def _as_judged(run: Path, metric: Metric, rank: int | None) -> Profile:
    """Reads a run. Its phases take what they usually take, as the step that was judged, stalls left out."""
    profile = diagnosed(load_profile(run) if rank is None else _as_seen_by(rank, run))
    usual = {} if metric is Metric.MEAN_SAMPLES_PER_S else usual_phases(load_series(run, rank))
    return replace(profile, phase_time_ns=usual) if usual else profile


def _as_seen_by(rank: int, run: Path) -> Profile:
    logs, notes = read_logs(run)
    first = sorted(logs, key=lambda log: log.meta.get("rank") != rank)
    return profile_of(read_manifest(run), first, notes)


def _top(folder: Path) -> Path:
    """Returns the top folder of the working copy that a folder lies in; itself where there is none."""
    absolute = folder.absolute()
    return next((each for each in (absolute, *absolute.parents) if (each / ".git").exists()), absolute)


def reasons(why: Why, metric: Metric) -> Iterator[Reason]:
    """Puts an attribution into sentences."""
    if metric in OF_STEPS:
        yield from _of_phases(why)
        yield from (_of_line(line, why) for line in why.lines)
    else:
        yield Reason(kind="phase", text=f"{metric.label} is not time of the steps: no phase can explain it")
        why = replace(why, hot_diff=())
    yield from map(_of_finding, why.findings)
    for fact in why.facts:
        yield Reason(kind="event", text=f"{fact.name}: {fact.before} before, {fact.after} now")
    named = {(line.file, line.line) for line in why.lines}
    for line in (*why.new_waits, *why.hot_diff):
        if (line.file, line.line) not in named:
            named.add((line.file, line.line))
            yield _of_hot_line(line, why)


def _of_phases(why: Why) -> Iterator[Reason]:
    if why.kind is Kind.CANNOT_TELL:
        yield Reason(kind="phase", text=f"cannot tell which phase lost the time: {why.reason}")
        return
    if why.kind is Kind.EVENLY:
        parts = [each.growth.ns / each.growth.before_ns for each in why.phases]
        yield Reason(
            kind="phase",
            text=(
                f"every phase of weight took {format_share(min(parts))} to "
                f"{format_share(max(parts))} longer: "
                "not one part of the code but the process as a whole, such as its threads, its "
                "libraries, a tracer, or the size of the work"
            ),
            lost_share=sum(each.part for each in why.phases),
        )
        return
    for each in (*why.phases, *why.shrank):
        yield Reason(kind="phase", text=phase_words(each, why.work or "step"), lost_share=each.part)


def phase_words(each: PhaseGrowth, unit: str = "step") -> str:
    """Returns `forward took 1.92 ms (1.80 to 2.05) longer per step, 96 % of the loss`."""
    if each.growth.ns < 0:
        less = replace(
            each.growth, ns=-each.growth.ns, low_ns=-each.growth.high_ns, high_ns=-each.growth.low_ns
        )
        return f"{each.phase.label} took {interval(less)} less per {unit}"
    before = f" (it took {format_ms(each.growth.before_ns)})" if each.growth.before_ns else " (it is new)"
    return (
        f"{each.phase.label} took {interval(each.growth)} longer per {unit}{before}, "
        f"{format_share(each.part)} of the loss"
    )


def interval(growth: Growth) -> str:
    """Returns `1.92 ms (1.80 to 2.05)`."""
    digits = 3 if growth.ns < NS_PER_MS else 2
    low, high = (f"{ns / NS_PER_MS:.{digits}f}" for ns in (growth.low_ns, growth.high_ns))
    return f"{growth.ns / NS_PER_MS:.{digits}f} ms ({low} to {high})"


def _of_line(line: LineGrowth, why: Why) -> Reason:
    origin = "new or changed here" if line.in_diff else "not changed itself"
    unit = why.work or "step"
    per = "per batch, in the loader's workers" if line.in_worker else f"per {unit}, in {line.phase.label}"
    return Reason(
        kind="line",
        text=f"{_code(line)}took {interval(line.growth)} longer {per}; {origin}{_purpose(line)}",
        **_at(line),
        lost_share=None if line.in_worker else line.growth.ns / why.step.ns,
    )


def _of_hot_line(line: LineGrowth, why: Why) -> Reason:
    """Says of a line that it is where it may matter, not that it is to blame."""
    takes = format_ms(line.after_ns)
    share = format_share(line.after_ns / (why.step.before_ns + why.step.ns))
    where = f"{takes} per batch, in the workers" if line.in_worker else f"{takes} per step ({share})"
    what = "changed here, in the hot path" if line.in_diff else "new in the hot path"
    return Reason(
        kind="diff" if line.in_diff else "event",
        text=f"{_code(line)}{what}: takes {where}{_purpose(line)}",
        **_at(line),
    )


def _of_finding(finding: NewFinding) -> Reason:
    (before, asked_before), (after, asked_after) = finding.before, finding.after
    counts = f"in {after} of {asked_after} runs, before in {before} of {asked_before}"
    return Reason(
        kind="finding",
        text=f"new fault {finding.rule}: {finding.summary} ({counts})",
        **_at(finding),
    )


def _code(line: LineGrowth) -> str:
    """Returns the line's source, so that the sentence makes sense without the file."""
    place = "" if _is_inside(line.file) else f"{line.file}:{line.line} "
    return f"{place}`{line.text}` in {line.function} " if line.text else f"{place}{line.function} "


def _at(what: LineGrowth | NewFinding) -> dict[str, Any]:
    """Returns the place of a reason; none outside of the repository, where no annotation can point."""
    return {"file": what.file, "line": what.line} if _is_inside(what.file) else {}


def _is_inside(file: str) -> bool:
    return file != "" and not Path(file).is_absolute() and not file.startswith("<")


def _purpose(line: LineGrowth) -> str:
    words = {
        "sync": "it waits for the device",
        "synchronize": "it waits for the device",
        "log": "it logs",
        "wait": "it sleeps or waits for a process",
        "save": "it saves",
        "collect": "it collects garbage",
    }
    found = next((words[idiom] for idiom in line.idiom if idiom in words), "")
    if not found and line.phase.value == "communication":
        found = "it waits for other ranks"
    return f" ({found})" if found else ""
