"""A search for the slow commit as text and as JSON."""

from __future__ import annotations

import math
from typing import Any

from diagnose.core.units import format_duration
from diagnose.gate import words
from diagnose.gate.bisection import Bisection, Commit, Ending
from diagnose.gate.judging import drop_of
from diagnose.gate.result import Judgement
from diagnose.gate.statistics import hodges_lehmann
from diagnose.gate.words import wrapped
from diagnose.report import Terminal
from diagnose.report._json import finite
from diagnose.report._wording import printable

SCHEMA = 1
MOST_COMMITS = 5
MIN_ODDS = 0.01
"""Commits with odds below one in a hundred are not worth a line."""

MOST_REASONS = 8
NS_PER_S = 1e9


def bisect_text(found: Bisection, terminal: Terminal) -> str:
    """Returns the text: the commit first, then what it rests on."""
    style = "alarm" if found.ending is Ending.FOUND else "bold"
    lines = [terminal.paint(line, style) for line in wrapped(headline(found), terminal, hanging="  ")]
    if found.ends is not None and not math.isnan(found.ends.drop):
        lines += wrapped(f"last against first: {words.change(found.ends)}", terminal, "  ")
    if found.ending is Ending.FOUND and found.parent is not None:
        part = _part_of_loss(found)
        share = f", {part:.0%} of all that was lost" if part is not None else ""
        lines += wrapped(f"against its parent: {words.change(found.parent)}{share}", terminal, "  ")
    rest = [line for line in found.reason.splitlines() if found.ending is Ending.FAILED][1:]
    lines += [f"    {printable(line)}" for line in rest]
    if found.odds is not None:
        lines += ["", "  odds   pairs  commit"]
        ranked = sorted(range(len(found.commits)), key=lambda index: -found.odds.of[index])  # type: ignore[union-attr]
        for index in ranked[:MOST_COMMITS]:
            if found.odds.of[index] >= MIN_ODDS or index in found.suspects:
                pairs = len(found.odds.pairs.get(index, ()))
                row = f"  {found.odds.of[index]:5.1%}  {pairs:5d}  {_named(found.commits[index])}"
                lines.append(terminal.shortened(row, terminal.width))
        skipped = [found.commits[index].hash[:9] for index in sorted(found.odds.skipped)]
        if skipped:
            lines += wrapped(f"not measured, because they do not run: {', '.join(skipped)}", terminal, "  ")
    for note in found.notes:
        lines += wrapped(f"note: {note}", terminal, "  ")
    if found.why:
        lines += ["", terminal.paint("Where it was lost", "bold")]
        for reason in found.why[:MOST_REASONS]:
            lines += wrapped(reason.place + reason.text, terminal, "  - ")
    lines += ["", *(f"  {line}" for line in next_steps(found))]
    return terminal.encoded("\n".join(lines)) + "\n"


def headline(found: Bisection) -> str:
    """Returns what the search came to in one sentence."""
    if found.ending is Ending.FAILED:
        return f"THE TRAINING COMMAND FAILED: {found.reason.splitlines()[0]}"
    if found.ending is Ending.NO_LOSS:
        return f"NO LOSS TO SEARCH FOR: {found.reason}"
    if found.ending is Ending.CANNOT_TELL:
        return f"CANNOT TELL: {found.reason}"
    names = [_named(found.commits[index]) for index in found.suspects]
    odds = f"odds {found.certainty:.1%}"
    if len(names) == 1:
        return f"FOUND: {names[0]} lost the speed ({odds})"
    return (
        f"FOUND: one of {len(names)} commits, from {names[0]} to {names[-1]}, lost the speed ({odds}); "
        "the others of them do not run, so they cannot be told apart"
    )


def next_steps(found: Bisection) -> list[str]:
    """Returns what to paste next."""
    if found.ending is not Ending.FOUND:
        took = format_duration(found.wall_s * NS_PER_S)
        return [f"The runs are in {found.folder}; it took {took}."]
    commit = found.commits[found.suspects[-1]]
    steps = [f"Look at it: git show {commit.hash[:12]}"]
    if commit.is_merge:
        name = commit.hash[:12]
        since = f"$(git rev-list --first-parent {name}^2 --not {name}^ | tail -n 1)^..{name}^2"
        steps.append(f'It is a merge. Search what it merged: diagnose bisect "{since}" -- ...')
    return steps


def to_json(found: Bisection) -> dict[str, Any]:
    """Returns the search as the JSON object of schema 1; `null` is what was not measured."""
    odds = found.odds
    return {
        "schema": SCHEMA,
        "verdict": found.ending.value,
        "exit_code": found.ending.exit_code,
        "reason": found.reason,
        "notes": list(found.notes),
        "odds": found.certainty if odds is not None else None,
        "suspects": [found.commits[index].hash for index in found.suspects],
        "good": found.good.hash,
        "bad": found.commits[-1].hash,
        "ends": _judgement(found.ends),
        "parent": _judgement(found.parent),
        "commits": [
            {
                "commit": commit.hash,
                "subject": commit.subject,
                "odds": odds.of[index] if odds is not None else None,
                "pairs": len(odds.pairs.get(index, ())) if odds is not None else 0,
                "drop": _drop(found, index),
                "runs": odds is None or index not in odds.skipped,
            }
            for index, commit in enumerate(found.commits)
        ],
        "why": [
            {
                "kind": reason.kind,
                "text": reason.text,
                "file": reason.file,
                "line": reason.line,
                "lost_share": reason.lost_share,
            }
            for reason in found.why
        ],
        "wall_s": found.wall_s,
    }


def _judgement(judgement: Judgement | None) -> dict[str, Any] | None:
    if judgement is None or math.isnan(judgement.drop):
        return None
    return {
        "metric": judgement.metric.value,
        "verdict": judgement.verdict.value,
        "drop": judgement.drop,
        "drop_ci95": finite([judgement.low, judgement.high]),
        "pairs": judgement.pairs,
    }


def _drop(found: Bisection, index: int) -> float | None:
    """Returns by what part a commit is worse than the good one."""
    logs = found.odds.pairs.get(index) if found.odds is not None else None
    return drop_of(hodges_lehmann(logs), found.ends.metric) if logs and found.ends is not None else None


def _part_of_loss(found: Bisection) -> float | None:
    if found.ends is None or found.parent is None or not found.ends.drop > 0:
        return None
    return found.parent.drop / found.ends.drop


def _named(commit: Commit) -> str:
    return f"{commit.hash[:9]} {printable(commit.subject)}".rstrip()
