"""The last words of `diagnose run`: at most twelve lines that fit any terminal."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping

from diagnose.core.phases import Phase
from diagnose.core.profile import Overhead, Profile, SourceLine
from diagnose.core.units import format_part, format_share
from diagnose.report._end_findings import finding_lines, one_line
from diagnose.report._end_tuning import tuning_lines
from diagnose.report._terminal import PLAIN, Terminal, display_width
from diagnose.report._wording import (
    coverage,
    failure,
    figures_line,
    likely_reason,
    most_expensive,
    nothing_measured,
    overhead,
    percent,
    place,
    plural,
    printable,
    too_few,
    what_to_do_without_steps,
)

TAG = "diagnose: "
MAX_LINES = 12
NUM_CLOSING_LINES = 2
LEDGER_NEEDS = 4  # lines below which the ledger says less than the first note would
LEAST_LEDGER = 3  # lines that findings leave to the ledger
NUM_SOURCE_LINES = 3
FOLD_BELOW_SHARE = 0.005  # under half a percent of the step a phase gets no line of its own
READABLE_CELLS = 8  # a function's name cut shorter than this says nothing
OF_WHAT_CELLS = len("of the workers")
LABEL_CELLS = max(len(phase.label) for phase in Phase)


def end_block(profile: Profile, terminal: Terminal = PLAIN, *, command: str | None = None) -> str:
    """Sums up a run in at most twelve lines.

    Args:
        profile: The run.
        terminal: Where they are printed.
        command: The next command to paste; without it, the one that writes this run's HTML report.

    Returns:
        The lines, each with its newline.
    """
    notes = [_note(profile, terminal)] if profile.notes else []
    if profile.steps.measured <= 0 or not profile.step_time_ns:
        closing = _closing(profile, terminal, command, notes)
        if profile.overhead == Overhead():
            del closing[-NUM_CLOSING_LINES]  # it would say that nothing was measured, once more
        lines = [*_nothing_measured(profile, terminal), *closing]
        return "".join(f"{line}\n" for line in lines)
    opening = _opening(profile, terminal)
    room = MAX_LINES - len(opening) - NUM_CLOSING_LINES
    tuning = tuning_lines(profile, terminal)
    room -= len(tuning)
    findings, num_shown = finding_lines(profile, room - LEAST_LEDGER, terminal)
    room -= len(findings)
    # Findings name lines of their own; of the others, those that leave the ledger readable.
    source_lines = _source_lines(profile, terminal)
    if findings:
        source_lines = source_lines[: max(0, room - LEDGER_NEEDS)]
    room -= len(source_lines)
    if room - len(notes) < LEDGER_NEEDS:
        notes = []
    ledger = _ledger(profile, terminal, room - len(notes))
    closing = _closing(profile, terminal, command, notes, len(profile.findings) - num_shown)
    return "".join(f"{line}\n" for line in [*opening, *tuning, *findings, *ledger, *source_lines, *closing])


def _nothing_measured(profile: Profile, terminal: Terminal) -> list[str]:
    """Returns what was seen of a run without figures, and what to do about it."""
    failed = _failed(profile, terminal)
    if failed and not profile.steps.count:
        return failed
    lines = failed or [_tagged(nothing_measured(profile), terminal)]
    advice, code = what_to_do_without_steps(profile)
    lines += ["  " + line for line in textwrap.wrap(advice, terminal.width - 2)]
    if code:
        lines.append("      " + terminal.paint(code, "place"))
    return lines


def _opening(profile: Profile, terminal: Terminal) -> list[str]:
    """Returns the run's figures, below what the reader must know of them first."""
    covered = coverage(profile)
    lines = _failed(profile, terminal, after=f"; {covered}")
    told = not lines or covered in lines[0]
    doubt = too_few(profile)
    if doubt and not lines:
        lines = [_tagged(doubt, terminal)]
    if not lines:
        return [_tagged(figures_line(profile, [], terminal.width - len(TAG)), terminal, "bold")]
    return [*lines, "  " + figures_line(profile, [] if told else [covered], terminal.width - 2)]


def _failed(profile: Profile, terminal: Terminal, after: str = "") -> list[str]:
    """Returns how a script failed, with `after` where it fits, and the likely reason; nothing otherwise."""
    failed = failure(profile)
    if failed is None:
        return []
    if len(TAG) + len(failed + after) <= terminal.width:
        failed += after
    lines = [_tagged(failed, terminal, "alarm")]
    reason = likely_reason(profile.run)
    if reason:
        lines.append("  " + _fitted(reason, terminal.width - 2, terminal))
    return lines


def _tagged(text: str, terminal: Terminal, style: str | None = None) -> str:
    """Returns the first line of the block, which says whose words these are."""
    text = _fitted(text, terminal.width - len(TAG), terminal)
    return terminal.paint(TAG.rstrip(), "bold") + " " + (terminal.paint(text, style) if style else text)


def folded(phase_time_ns: Mapping[Phase, float], room: int) -> tuple[list[Phase], list[Phase]]:
    """Divides the phases into those that get a line and those that share the last one.

    Returns:
        The phases with a line, at most `room` together with the shared line, and the others, both in
        the order of a step. A phase that took no time is in neither.
    """
    total_ns = sum(phase_time_ns.values())
    spent = [phase for phase in Phase if phase_time_ns.get(phase, 0) > 0]
    by_time = sorted(spent, key=lambda phase: -phase_time_ns[phase])
    shown = [phase for phase in by_time if phase_time_ns[phase] >= FOLD_BELOW_SHARE * total_ns]
    if len(shown) + (len(shown) < len(spent)) > room:
        shown = shown[: room - 1]
    if len(spent) - len(shown) == 1 and len(spent) <= room:
        shown = spent
    return [phase for phase in spent if phase in shown], [phase for phase in spent if phase not in shown]


def _ledger(profile: Profile, terminal: Terminal, room: int) -> list[str]:
    """Returns one line per phase, and one for those too small for a line.

    Where tuning kept something, a phase has its time before and after, and a bar for what is left; a step
    from before is as long as the bars could be.
    """
    before_ns, step_ns = profile.phase_time_ns, profile.step_time_ns
    after_ns = (
        profile.tuning.tuned_phase_time_ns if profile.tuning is not None and profile.tuning.kept else {}
    )
    most_ns = {phase: max(before_ns.get(phase, 0.0), after_ns.get(phase, 0.0)) for phase in Phase}
    shown, rest = folded(most_ns, max(room, 2))
    lines = []
    for phases in [*([phase] for phase in shown), rest]:
        if not phases:
            continue
        then_ns = sum(before_ns.get(phase, 0.0) for phase in phases)
        now_ns = sum(after_ns.get(phase, 0.0) for phase in phases) if after_ns else None
        figures = _figures("the rest" if phases is rest else phases[0].label, then_ns, now_ns, step_ns)
        room = terminal.width - len(figures)
        if phases is rest:
            right = terminal.paint(_names([phase.label for phase in rest], room, terminal), "dim")
        else:
            bar = terminal.bar((then_ns if now_ns is None else now_ns) / step_ns, room)
            right = terminal.paint(bar, "bar")
        lines.append((figures + right).rstrip())
    return lines


def _names(names: list[str], room: int, terminal: Terminal) -> str:
    """Returns as many of the names as fit, none of them cut."""
    gap = terminal.encoded("…")
    for count in range(len(names), 0, -1):
        text = ", ".join(names[:count] + [gap] * (count < len(names)))
        if len(text) <= room:
            return text
    return ""


def _figures(label: str, then_ns: float, now_ns: float | None, step_ns: float) -> str:
    """Returns the left half of a line of the ledger: label, milliseconds per step, share of the step; or
    milliseconds before tuning and after."""
    beside = (
        f"{percent(then_ns / step_ns):>7}" if now_ns is None else f"-> {format_part(now_ns, step_ns):>9}"
    )
    return f"  {label:<{LABEL_CELLS}} {format_part(then_ns, step_ns):>10} {beside}  "


def _source_lines(profile: Profile, terminal: Terminal) -> list[str]:
    """Returns the lines of the user's code that cost most, in table form: place, function, share."""
    return [_source_line(line, terminal) for line in most_expensive(profile, NUM_SOURCE_LINES)]


def _source_line(line: SourceLine, terminal: Terminal) -> str:
    of_what = "of the workers" if line.in_worker else line.phase.label
    right = f" {format_share(line.share):>6}  {of_what:<{OF_WHAT_CELLS}}".rstrip()
    room = terminal.width - 2 - len(f" {'':>6}  ") - OF_WHAT_CELLS
    where = terminal.clean(place(line))
    function = terminal.clean(line.function)
    # A place without its end is useless, a function's name is a courtesy: the place goes first.
    where = terminal.shortened(where, room)
    left_over = room - display_width(where) - 1
    function = " " + terminal.shortened(function, left_over) if left_over >= READABLE_CELLS else ""
    blanks = " " * (room - display_width(where + function))
    return f"  {terminal.paint(where, 'place')}{function}{blanks}{right}"


def _note(profile: Profile, terminal: Terminal) -> str:
    """Returns the first note, and how many more the report has."""
    more = f" (+{len(profile.notes) - 1} more in the report)" if len(profile.notes) > 1 else ""
    return "  " + _fitted(f"note: {profile.notes[0]}", terminal.width - 2 - len(more), terminal) + more


def _closing(
    profile: Profile, terminal: Terminal, command: str | None, notes: list[str], more_findings: int = 0
) -> list[str]:
    """Returns the notes, what measuring cost, and the next command to paste, which is never cut."""
    cost = f"measuring cost {overhead(profile)}"
    share = profile.device_clock_share
    if share is not None or profile.run.device != "cpu":
        heard = f"device clock on {percent(share)} of steps" if share is not None else "no device clock"
        clock = f"; {heard}"
        if len(cost + clock) > terminal.width - 2:
            cost = cost.partition(", ")[0]
        cost += clock
    kept_back = [plural(more_findings, "more finding")] if more_findings else []
    kept_back += [plural(len(profile.notes), "note")] if profile.notes and not notes else []
    if kept_back:
        told, where = f"; {', '.join(kept_back)}", " in the report"
        if len(cost + told + where) > terminal.width - 2:
            cost = cost.partition(", ")[0]  # without what starting up cost
        if len(cost + told + where) > terminal.width - 2:
            where = ""  # the next line says where
        cost += told + where
    if command is None:
        command = f"diagnose report {shlex.quote(printable(profile.run.id))} --html report.html"
        if len(command) + len("  next: ") > terminal.width or not command.isascii():
            command = "diagnose report --html report.html"
    cost = terminal.paint(one_line(cost, terminal.width - 2, terminal), "dim")
    return [*notes, f"  {cost}", f"  next: {terminal.paint(command, 'place')}"]


def _fitted(text: str, room: int, terminal: Terminal) -> str:
    """Returns foreign words on one line of the terminal."""
    return terminal.shortened(terminal.clean(text), room)
