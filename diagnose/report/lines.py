"""The user's own source lines that the time was spent on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from diagnose.core.profile import Profile, SourceLine
from diagnose.core.units import format_part, format_share
from diagnose.report._wording import place
from diagnose.report.base import Block, Column, Row, Section, Table

MAX_LINES = 15
MIN_OUTSIDE = 0.02  # less may be lines too short to be listed
Z_95 = 1.96  # normal quantile of a two-sided 95 % interval


class Lines(Section):
    """Sampled source lines of the training thread and of the DataLoader workers, most expensive first."""

    order = 40
    title = "Source lines"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        by_share = sorted(profile.where, key=lambda line: -line.share)
        own = [line for line in by_share if not line.in_worker][:MAX_LINES]
        workers = [line for line in by_share if line.in_worker][:MAX_LINES]
        blocks: list[Block] = []
        if own:
            blocks.append(
                Table(
                    caption="Sampled on the training thread. Share is of the step, with its 95 % interval.",
                    columns=(
                        Column(title="per step", number=True),
                        Column(title="share", number=True),
                        Column(title="phase"),
                        Column(title="line", code=True),
                        Column(title="function", code=True),
                    ),
                    rows=tuple(own_row(line, profile) for line in own),
                )
            )
        if workers:
            blocks.append(
                Table(
                    caption=(
                        "Sampled in the DataLoader workers. Share is of the time that they were busy."
                        + outside(profile)
                    ),
                    columns=(
                        Column(title="share", number=True),
                        Column(title="line", code=True),
                        Column(title="function", code=True),
                    ),
                    rows=tuple(
                        Row(
                            cells=(share(line), place(line), line.function),
                            phase=line.phase,
                            source=line.text,
                        )
                        for line in workers
                    ),
                )
            )
        return blocks


def outside(profile: Profile) -> str:
    """Returns a sentence, after a blank, on the workers' time outside the script; empty if it is little."""
    rest = 1 - sum(line.share for line in profile.where if line.in_worker)
    return (
        f" Another {format_share(rest)} passed in torch and other packages, fetching and collating."
        if rest >= MIN_OUTSIDE
        else ""
    )


def own_row(line: SourceLine, profile: Profile) -> Row:
    """Returns the row of a line on the training thread."""
    step_ns = profile.step_time_ns
    time = format_part(line.share * step_ns, step_ns)
    return Row(
        cells=(time, share(line), line.phase.label, place(line), line.function),
        phase=line.phase,
        source=line.text,
    )


def share(line: SourceLine) -> str:
    """Returns `34 % ±4`: the share, and how far off the number of samples lets it be."""
    text = format_share(line.share)
    if line.num_samples < 1:
        return text
    margin = Z_95 * line.share * math.sqrt(max(0.0, 1 - line.share) / line.num_samples)
    return f"{text} ±{100 * margin:.0f}" if margin >= 0.0095 else f"{text} ±{100 * margin:.1f}"
