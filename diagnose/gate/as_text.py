"""The gate's result for a terminal: one screen, the verdict first."""

from __future__ import annotations

import shlex

from diagnose.gate import words
from diagnose.gate.result import GateResult, Verdict
from diagnose.gate.words import wrapped
from diagnose.report import Terminal
from diagnose.report._wording import printable

MOST_REASONS = 8


def gate_text(result: GateResult, terminal: Terminal) -> str:
    """Returns the text."""
    style = "bold" if result.verdict is Verdict.PASS else "alarm"
    lines = [terminal.paint(line, style) for line in wrapped(words.headline(result), terminal)]
    for name, text in words.rows(result):
        lines += wrapped(text, terminal, f"  {name.partition(':')[0] + ':':<11} ")
    if result.failure is not None:
        lines += ["", "  The end of its stderr:"]
        lines += [f"    {printable(line.expandtabs())}" for line in result.failure.last_lines]
    if result.why:
        lines += ["", terminal.paint("Where it was lost", "bold")]
        for reason in result.why[:MOST_REASONS]:
            lines += wrapped(reason.place + reason.text, terminal, "  - ")
        if len(result.why) > MOST_REASONS:
            lines.append(f"  ... and {len(result.why) - MOST_REASONS} more in the JSON report")
    if result.folder is not None and result.runs:
        place = printable(shlex.quote(str(result.folder)))
        last = [run.name for run in result.runs[-2:]]
        verb = "compare" if len(last) > 1 else "report"
        lines += ["", f"  Look at the runs: diagnose {verb} --run-dir {place} {' '.join(last)}"]
    return terminal.encoded("\n".join(lines)) + "\n"
