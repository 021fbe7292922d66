"""The gate's result for a terminal: one screen, the verdict first."""

from __future__ import annotations

import shlex
import textwrap

from diagnose.gate import words
from diagnose.gate.result import GateResult, Verdict
from diagnose.report import Terminal
from diagnose.report._wording import printable

MOST_REASONS = 8


def gate_text(result: GateResult, terminal: Terminal) -> str:
    """Returns the text."""
    style = "bold" if result.verdict is Verdict.PASS else "alarm"
    lines = [terminal.paint(line, style) for line in _wrapped(words.headline(result), terminal, "")]
    judgement = result.judgement
    rows = [("versions", words.version_words(result))]
    if judgement is not None and judgement.pairs:
        rows.append((judgement.metric.label, words.figures(judgement)))
        rows.append(("certainty", words.sensitivity(judgement)))
    rows += [("beside", words.judged_beside(each)) for each in result.beside if each.pairs]
    rows += [("because", cause) for cause in result.causes if cause not in words.headline(result)]
    rows += [("to do", result.advice)] if result.advice else []
    rows += [("note", note) for note in result.notes]
    for name, text in rows:
        lines += _wrapped(text, terminal, f"  {name + ':':<11} ")
    if result.failure is not None:
        lines += ["", "  The end of its stderr:"]
        lines += [f"    {printable(line.expandtabs())}" for line in result.failure.last_lines]
    if result.why:
        lines += ["", terminal.paint("Where it was lost", "bold")]
        for reason in result.why[:MOST_REASONS]:
            place = f"{reason.file}:{reason.line}: " if reason.file else ""
            lines += _wrapped(place + reason.text, terminal, "  - ")
        if len(result.why) > MOST_REASONS:
            lines.append(f"  ... and {len(result.why) - MOST_REASONS} more in the JSON report")
    if result.folder is not None and result.runs:
        place = printable(shlex.quote(str(result.folder)))
        last = [run.name for run in result.runs[-2:]]
        verb = "compare" if len(last) > 1 else "report"
        lines += ["", f"  Look at the runs: diagnose {verb} --run-dir {place} {' '.join(last)}"]
    return terminal.encoded("\n".join(lines)) + "\n"


def _wrapped(text: str, terminal: Terminal, first: str) -> list[str]:
    return textwrap.wrap(
        printable(" ".join(text.split())),
        width=terminal.width,
        initial_indent=first,
        subsequent_indent=" " * len(first) if first.strip() else "    ",
        break_on_hyphens=False,
        break_long_words=False,
    ) or [first.rstrip()]
