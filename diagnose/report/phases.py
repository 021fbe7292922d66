"""The ledger: every phase of the step, and that they add up to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_part
from diagnose.report._charts import Mark, PhaseAreas, StepBins, StepLine
from diagnose.report._tuning_words import named
from diagnose.report._wording import percent
from diagnose.report.base import Block, Column, Paragraph, PhaseBar, Row, Section, Table

BY_HOST = (
    "By the host's clock, as the device's was not heard: a host that runs ahead of its device waits for it"
    " in phases that did not make the work, such as the wait for data."
)


class Phases(Section):
    """Mean time per step of each phase. What was not measured is named, not shown as zero."""

    order = 30
    title = "Where the step goes"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        step_ns = profile.step_time_ns
        if not step_ns:
            return []
        measured = [phase for phase in Phase if phase in profile.phase_time_ns]
        shares = {phase: profile.phase_time_ns[phase] / step_ns for phase in measured}
        rows = [
            Row(
                cells=(phase.label, format_part(profile.phase_time_ns[phase], step_ns), percent(share)),
                phase=phase,
                share=share,
            )
            for phase, share in shares.items()
        ]
        rows.append(Row(cells=("step", format_part(step_ns, step_ns), "100 %")))
        blocks: list[Block] = [
            PhaseBar(shares=shares, title="The mean step, divided into its phases"),
            Table(
                caption="Mean time per measured step. The phases add up to the step.",
                columns=(
                    Column(title="phase"),
                    Column(title="per step", number=True),
                    Column(title="share", number=True),
                ),
                rows=tuple(rows),
            ),
        ]
        blocks[1:1] = over_the_steps(profile)
        if profile.device_clock_share is not None:
            blocks.append(Paragraph(text=clocks(profile.device_clock_share)))
        elif profile.run.device != "cpu":
            blocks.append(Paragraph(text=BY_HOST))
        missing = ", ".join(phase.label for phase in Phase if phase not in profile.phase_time_ns)
        if missing:
            blocks.append(Paragraph(text=f"Not measured in this run: {missing}."))
        return blocks


def clocks(device_share: float) -> str:
    """Says whose time the phases are, where the host runs ahead of a device."""
    covered = percent(device_share) if device_share < 1 else "all"
    rest = "; the others are by the host's" if device_share < 1 else ""
    return (
        f"By the device's clock in {covered} of the steps{rest}: work counts where it was launched,"
        " idleness for what the host did meanwhile."
    )


def over_the_steps(profile: Profile) -> list[Block]:
    """Returns the charts of the whole run: the ledger step by step, and the throughput."""
    history = profile.history
    if history is None or not history.phase_ms:
        return []
    steps = StepBins(width=history.width, marks=changes(profile), end=profile.steps.count)
    blocks: list[Block] = [
        PhaseAreas(
            title="Time per step over the whole run, divided into its phases",
            steps=steps,
            phase_ms={phase: np.array(times) for phase, times in history.phase_ms.items()},
        )
    ]
    if history.samples_per_s:
        line = StepLine(
            title="Samples per second over the whole run, on the first rank",
            unit="samples/s",
            steps=steps,
            values=np.array(history.samples_per_s),
        )
        blocks.append(line)
    return blocks


def changes(profile: Profile) -> tuple[Mark, ...]:
    """Returns where tuning tried a fix, and where everything kept went into force."""
    tuning = profile.tuning
    if tuning is None:
        return ()
    tried = [
        Mark(step=trial.first_step, label=f"{named(trial)} tried", strong=False)
        for trial in tuning.trials
        if trial.measured is not None
    ]
    if tuning.tuned is not None and tuning.kept:
        in_force = ", ".join(map(named, tuning.kept))
        tried.append(Mark(step=tuning.tuned[0], label=f"{in_force} in force", strong=True))
    return tuple(tried)
