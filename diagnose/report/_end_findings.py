"""The findings as the end block has room for them: two lines each, the first one more where it fits."""

from __future__ import annotations

import textwrap

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.report._faults import gain, headline, in_force, is_gone, lost, no_fault, short_gain, unheard
from diagnose.report._terminal import Terminal, display_width
from diagnose.report._wording import place

MAX_FINDINGS = 3
LINES_EACH = 2  # what it costs and wins, and what to do
MAX_WRAPPED = 2  # lines of a summary or a fix
INDENT = "    "
FIX = "fix: "


def finding_lines(profile: Profile, room: int, terminal: Terminal) -> tuple[list[str], int]:
    """Returns at most `room` lines on the most costly findings, and how many findings they are about.

    Where the rules found nothing, a line says so, and another how many a deep window would help. Those that
    tuning has dealt with share one line.
    """
    nothing = no_fault(profile, terminal.width - 2)
    if nothing:
        more = one_line(unheard(profile), terminal.width - len(INDENT), terminal)
        return [f"  {nothing}", *([f"{INDENT}{more}"] if more and room > 1 else [])], 0
    dealt_with = [
        finding for finding in profile.findings if in_force(finding, profile) or is_gone(finding, profile)
    ]
    room -= bool(dealt_with)
    others = [finding for finding in profile.findings if finding not in dealt_with]
    shown = others[: max(0, min(MAX_FINDINGS, room // LINES_EACH))]
    lines: list[str] = []
    for number, finding in enumerate(shown, start=1):
        later = LINES_EACH * (len(shown) - number)
        lines += _lines(finding, profile, room - len(lines) - later, terminal)
    if dealt_with:
        costs = ", ".join(f"{finding.rule} ({lost(finding)} lost before)" for finding in dealt_with)
        lines.append(f"  {one_line(f'dealt with: {costs}', terminal.width - 2, terminal)}")
    return lines, len(shown) + len(dealt_with)


def _lines(finding: Finding, profile: Profile, room: int, terminal: Terminal) -> list[str]:
    """Returns at least two lines: what it costs, and its fix. With more room its summary, and code."""
    spare = room - LINES_EACH
    cells = terminal.width - len(INDENT)
    summary = [INDENT + line for line in _wrapped(headline(finding), cells, MAX_WRAPPED, terminal)]
    fix = _fix(finding, MAX_WRAPPED, terminal)
    if spare < len(summary) + len(fix) - 1 + bool(finding.code):
        # One line each comes before two of one, and code to paste before the end of a long sentence.
        summary = [INDENT + one_line(headline(finding), cells, terminal)]
        fix = _fix(finding, MAX_WRAPPED if spare > 1 + bool(finding.code) else 1, terminal)
    lines = [_header(finding, profile, terminal), *(summary if spare else []), *fix]
    code = terminal.clean(finding.code)
    width = len(INDENT) + len(FIX) + display_width(code)
    if code and "\n" not in finding.code and len(lines) < room and width <= terminal.width:
        lines.append(INDENT + " " * len(FIX) + terminal.paint(code, "place"))
    return lines


def _header(finding: Finding, profile: Profile, terminal: Terminal) -> str:
    """Returns the rule and the place to look at, and on the right what the fault costs."""
    rule = terminal.clean(finding.rule)
    whole = terminal.clean(place(finding))
    name = whole.rpartition("/")[2]
    # What does not fit gives way in this order: the folder, the interval, the middle of the names.
    gains = (gain(finding, profile), short_gain(finding, profile))
    for gained, where in ((gains[0], whole), (gains[0], name), (gains[1], whole), (gains[1], name)):
        right = f"{lost(finding)} lost, gain {gained}"
        room = terminal.width - len("  ") - len("  ") - len(right)
        if room >= display_width(rule) + 1 + display_width(where):
            break
    rule = terminal.shortened(rule, room)
    left_over = room - display_width(rule) - 1
    where = terminal.shortened(where, left_over) if left_over > len("...") else ""
    where = " " + where if where else ""
    blanks = " " * (room - display_width(rule + where))
    return f"  {terminal.paint(rule, 'alarm')}{where}{blanks}  {right}"


def _fix(finding: Finding, max_lines: int, terminal: Terminal) -> list[str]:
    lines = _wrapped(finding.fix, terminal.width - len(INDENT) - len(FIX), max_lines, terminal)
    blank = " " * len(FIX)
    return [f"{INDENT}{blank if number else FIX}{line}" for number, line in enumerate(lines)]


def _wrapped(text: str, cells: int, max_lines: int, terminal: Terminal) -> list[str]:
    """Fills lines with a sentence; what does not fit into the last is cut."""
    text = terminal.clean(text)
    lines = textwrap.wrap(text, cells, break_on_hyphens=False) or [""]
    if len(lines) > max_lines:
        lines[max_lines - 1 :] = [" ".join(lines[max_lines - 1 :])]
    return [one_line(line, cells, terminal) for line in lines]


def one_line(text: str, cells: int, terminal: Terminal) -> str:
    """Returns as many words of a sentence as fit; a path is cut in its middle, a sentence at its end."""
    text = terminal.clean(text)
    if display_width(text) <= cells:
        return text
    gap = "\N{HORIZONTAL ELLIPSIS}" if terminal.unicode else "..."
    words = text.split(" ")
    while words and display_width(" ".join(words)) > cells - len(gap) - 1:
        words.pop()
    return f"{' '.join(words)} {gap}" if words else terminal.shortened(text, cells)
