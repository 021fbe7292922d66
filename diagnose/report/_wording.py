"""Sentences that several reports share: how a run ended, where a line is, what may be printed."""

from __future__ import annotations

import os
import re
import signal

from diagnose.core.deep_window import Sync
from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RunInfo, SourceLine, Status
from diagnose.core.program import Loader
from diagnose.core.units import NS_PER_S, format_duration, format_rate, format_share

LIKELY_REASON = {
    "SIGKILL": "most likely the out-of-memory killer (see dmesg) or the job scheduler",
    "SIGSEGV": "a crash in native code; python -X faulthandler names the line",
    "SIGABRT": "native code gave up; its last words on stderr say why",
    "SIGBUS": "often a full /dev/shm: in a container, raise --shm-size",
    "SIGTERM": "someone asked it to stop: a scheduler, a timeout, a person",
    "SIGINT": "Ctrl-C",
}

LABEL_SHARE = 0.11
FIGURE_SHARE = 0.05
"""A narrower part of a step's bar has no room for its phase's name, and none for its percentage."""


def printable(text: str) -> str:
    """Returns `text` safe for a terminal: control characters and lone surrogates become escapes."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


def spans(text: str) -> list[tuple[str, bool]]:
    """Divides a sentence at its backticks; returns each piece, and whether it is code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # one of them stands for itself
        return [(text, False)]
    return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]


def plural(count: int, noun: str) -> str:
    """Returns `1 step`, `1,412 steps`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def percent(share: float) -> str:
    """Returns the share as a percentage; what rounds to nothing, but is not, as `<0.1 %`."""
    return "<0.1 %" if 0 < share < 0.0005 else format_share(share)


def bar_label(phase: Phase, share: float) -> str:
    """Returns what a part of a step's bar has room for: phase and percentage, the latter, or nothing."""
    if share < FIGURE_SHARE:
        return ""
    figure = format_share(share)
    return f"{phase.label} {figure}" if share >= LABEL_SHARE + len(phase.label) / 200 else figure


def signal_name(number: int) -> str:
    """Returns `SIGKILL` for 9; `signal 77` for a number without a name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_it_ended(run: RunInfo) -> str | None:
    """Says how a script that did not simply succeed ended, as the end of `the script ...`."""
    if run.signal is not None:
        return f"ended by {signal_name(run.signal)}"
    if run.error:
        return f"failed with {run.error}"
    if run.exit_code:
        return f"exited with code {run.exit_code}"
    return None


def outcome(run: RunInfo) -> str:
    """Says in a word or two how a run ended: `ok`, `exit 3`, `SIGKILL`, `ValueError`, `detached`."""
    if run.signal is not None:
        return signal_name(run.signal)
    if run.error:
        return run.error
    if run.exit_code is None:
        return "no end seen" if run.duration_s is None else "detached"
    return f"exit {run.exit_code}" if run.exit_code else "ok"


def started(run: RunInfo) -> str:
    """Returns `2026-11-20 14:15:02 +01:00`, in the time zone of the run."""
    return re.sub(r"T([0-9:]+)(?:\.\d+)?(?=[+-])", r" \1 ", run.started)


def failure(profile: Profile) -> str | None:
    """Says how a failed script ended; `None` for success."""
    ended = how_it_ended(profile.run)
    if ended is None:
        return None
    if not profile.steps.count:
        why = profile.run.lost
        return f"script {ended}; {why}" if why else f"script {ended} before any step was recorded"
    return f"script {ended} after {plural(profile.steps.count, 'step')}"


def coverage(profile: Profile) -> str:
    """Says which steps, counted from 1, the figures are made of."""
    steps = profile.steps
    if steps.left_out:
        return f"report covers {max(0, steps.measured):,} of {steps.count:,} steps"
    return f"report covers steps {steps.warmup + 1:,}-{steps.count:,}"


def likely_reason(run: RunInfo) -> str | None:
    """Returns what most often ends a script with this signal."""
    return None if run.signal is None else LIKELY_REASON.get(signal_name(run.signal))


def nothing_measured(profile: Profile) -> str:
    """Says what was seen of a run without steps to measure."""
    run, steps = profile.run, profile.steps
    if steps.left_out:
        return f"{plural(steps.count, 'step')} ended, {steps.left_out:,} left out: nothing was measured"
    if steps.count:
        return f"{plural(steps.count, 'step')} ended, all within the warm-up: nothing was measured"
    if run.lost:
        return run.lost
    seen = "no optimizer step was seen"
    if run.duration_s is not None:
        seen += f" in {format_duration(run.duration_s * NS_PER_S)}"
    return f"{seen}; torch was {'imported' if run.torch else 'not imported'}"


def what_to_do_without_steps(profile: Profile) -> tuple[str, str]:
    """Returns advice for a run without steps, and the code to paste, which may be empty."""
    if profile.steps.left_out:
        return "Let it train longer, or ask for an earlier part of it.", ""
    if profile.steps.count:
        return "Let it train longer, or shorten the warm-up:", "diagnose run --warmup 0 ..."
    if profile.run.lost:
        return "If the disk is full, keep runs where there is room:", "diagnose run --run-dir FOLDER ..."
    if profile.run.torch is None:
        return "Is this the script that trains, run by the Python that has torch?", ""
    return (
        "If torch.optim does not drive the steps, mark where each one ends:",
        "import diagnose; diagnose.step()",
    )


def too_few(profile: Profile) -> str | None:
    """Says that the figures cannot carry a verdict, where they cannot."""
    if profile.status is not Status.TOO_FEW_STEPS:
        return None
    after = f" after {profile.steps.warmup:,} of warm-up" if profile.steps.warmup else ""
    return f"only {plural(profile.steps.measured, 'step')}{after}: too few for a verdict, figures only"


def samples_rate(profile: Profile) -> str | None:
    """Returns `776 samples/s (770-781)`, without the interval where there is none."""
    throughput = profile.throughput
    if throughput.samples_per_s is None:
        return None
    text = f"{format_rate(throughput.samples_per_s)} samples/s"
    if throughput.samples_per_s_ci95 is not None:
        low, high = throughput.samples_per_s_ci95
        text += f" ({format_rate(low)}-{format_rate(high)})"
    return text


UNEVEN = 0.05
"""A mean that is further from the median, as a part of it, is told beside it."""


def figures_line(profile: Profile, figures: list[str], room: int) -> str:
    """Returns the run's figures after those given, as many as fit `room`, the most telling first.

    Where tuning kept something they are those before and after, or only the former, and say so.
    """
    steps, throughput = profile.steps, profile.throughput
    figures = figures or [plural(steps.count, "step")]
    tuned = profile.tuning if profile.tuning is not None and profile.tuning.kept else None
    after_ns = tuned.tuned_median_ns if tuned else None
    after_per_s = tuned.tuned_samples_per_s if tuned else None
    if steps.median_ns is not None:
        only_before = "before tuning " if tuned and after_ns is None else ""
        after = "" if after_ns is None else f" -> {format_duration(after_ns)}"
        text = f"{only_before}median {format_duration(steps.median_ns)}{after}"
        if after_ns is None and abs(profile.step_time_ns - steps.median_ns) > UNEVEN * steps.median_ns:
            # The phases below sum to the mean.
            mean = format_duration(profile.step_time_ns)
            text = f"{only_before}mean {mean} (median {format_duration(steps.median_ns)})"
        figures.append(text)
    samples = samples_rate(profile)
    if throughput.samples_per_s is not None and after_per_s is not None:
        figures.append(f"{format_rate(throughput.samples_per_s)} -> {format_rate(after_per_s)} samples/s")
    elif samples:
        figures.append(samples)
    if throughput.tokens_per_s is not None:
        figures.append(f"{format_rate(throughput.tokens_per_s)} tokens/s")
    if samples is None and throughput.steps_per_s is not None:
        figures.append(f"{format_rate(throughput.steps_per_s)} steps/s")
    while len(figures) > 1 and len(", ".join(figures)) > room:
        figures.pop()
    return ", ".join(figures)


def overhead(profile: Profile) -> str:
    """Says what measuring cost: `38 us per step (0.1 %), 0.31 s at start`."""
    cost, step_us = profile.overhead, profile.step_time_ns / 1000
    parts = []
    if cost.us_per_step is not None:
        share = f" ({percent(cost.us_per_step / step_us)})" if step_us else ""
        parts.append(f"{cost.us_per_step:,.0f} us per step{share}")
    if cost.startup_s is not None:
        parts.append(f"{cost.startup_s:.2f} s at start")
    return ", ".join(parts) or "not measured"


def short_path(file: str) -> str:
    """Returns the path as a person in the working directory would type it."""
    if file.startswith("<"):
        return file
    cwd, home = os.getcwd(), os.path.expanduser("~")
    if file.startswith(cwd.rstrip(os.sep) + os.sep):
        return file[len(cwd.rstrip(os.sep)) + 1 :]
    if len(home) > 1 and file.startswith(home + os.sep):
        return "~" + file[len(home) :]
    return file


def place(of: Finding | Loader | SourceLine | Sync) -> str:
    """Returns `train.py:41`; nothing where no line is to blame."""
    return f"{short_path(of.file)}:{of.line}" if of.file else ""


def explained_share(line: SourceLine, profile: Profile) -> float:
    """Returns the part of the step that a line accounts for.

    A worker's line costs the step only as far as the loop waited for data: busy workers that keep up cost
    nothing. Its share of the workers' time is therefore weighed by the step's share of waiting.
    """
    if not line.in_worker:
        return line.share
    return line.share * (profile.share(Phase.DATA_WAIT) or 0.0)


def most_expensive(profile: Profile, count: int) -> list[SourceLine]:
    """Returns the lines that account for most of the step, the training thread's and the workers'."""
    costly = [line for line in profile.where if explained_share(line, profile) > 0]
    return sorted(costly, key=lambda line: -explained_share(line, profile))[:count]
