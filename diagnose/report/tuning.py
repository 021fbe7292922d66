"""What was tried on the running job, what it was expected to win, and what it won."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.trial import Tuning
from diagnose.core.units import format_part
from diagnose.report._charts import GainRow, Gains, Waterfall
from diagnose.report._tuning_words import TOLD, measured, named, outcome, predicted, verdict
from diagnose.report._wording import printable
from diagnose.report.base import Block, Column, Paragraph, Row, Section, Table
from diagnose.report.summary import sentence


class TuningSection(Section):
    """Every trial, predicted beside measured, and the mean step before and after."""

    order = 15
    title = "What tuning did"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        tuning = profile.tuning
        if tuning is None:
            return []
        permanent = [
            _written(key, value)
            for trial in tuning.kept
            for key, value in trial.settings.items()
            if key != "note"
        ]
        alarm = bool(tuning.errors or tuning.frozen)
        blocks: list[Block] = [Paragraph(text=sentence(verdict(tuning)), alarm=alarm)]
        if permanent:
            code = "\n".join(dict.fromkeys(permanent))
            blocks.append(Paragraph(text="To make it permanent, set in the script:", code=code))
        blocks += [
            Paragraph(text=sentence(f"{named(trial)}: {trial.settings['note']}"))
            for trial in tuning.kept
            if "note" in trial.settings
        ]
        rows = gain_rows(tuning)
        if rows:
            blocks.append(Gains(title="Speedup of each fix", rows=rows))
        if tuning.trials:
            blocks.append(_trials(tuning))
        if tuning.tuned_phase_time_ns:
            blocks += [
                Waterfall(
                    title="From the mean step before anything was changed to that with all kept fixes",
                    before_ns=profile.phase_time_ns,
                    after_ns=tuning.tuned_phase_time_ns,
                ),
                _before_and_after(profile),
                Paragraph(
                    text="What slows it down with them:",
                    code=f"diagnose report {shlex.quote(printable(profile.run.id))} --since tuning",
                ),
            ]
        blocks += [
            Paragraph(text=sentence(f"{action} was kept at first and dropped later: {reason}"))
            for action, reason in tuning.dropped.items()
        ]
        blocks += [Paragraph(text="An error of ours:", code=error) for error in tuning.errors]
        return blocks


def _trials(tuning: Tuning) -> Table:
    return Table(
        caption=(
            "Each fix was switched on and off in turn while training went on; its gain is that of"
            " neighbouring windows of steps, with the interval of the test."
        ),
        columns=(
            Column(title="fix", code=True),
            Column(title="numbers"),
            Column(title="predicted", number=True),
            Column(title="measured", number=True),
            Column(title="steps", number=True),
            Column(title="outcome"),
        ),
        rows=tuple(
            Row(
                cells=(
                    named(trial),
                    trial.safety.value,
                    predicted(trial),
                    measured(trial),
                    f"{trial.steps_spent:,}",
                    outcome(trial),
                )
            )
            for trial in tuning.trials
        ),
    )


def _written(key: str, value: object) -> str:
    """Returns a setting as the script would have it."""
    return str(value) if key in ("statement", "advice") else f"{key} = {value}"


def gain_rows(tuning: Tuning) -> tuple[GainRow, ...]:
    """Returns each trial that was measured, and the confirmation of all that was kept, if it still is."""
    rows = [
        GainRow(
            label=named(trial),
            outcome=TOLD[trial.outcome],
            predicted=trial.predicted.speedup if trial.predicted else None,
            speedup=trial.measured.speedup,
            interval=(trial.measured.low, trial.measured.high),
            kept=trial in tuning.kept,
        )
        for trial in tuning.trials
        if trial.measured is not None
    ]
    if tuning.confirmed is not None:
        confirmed, of = tuning.confirmed
        together = GainRow(
            label=f"{of.removeprefix('the ')} together",
            outcome="confirmed",
            speedup=confirmed.speedup,
            interval=(confirmed.low, confirmed.high),
            kept=True,
        )
        rows.append(together)
    return tuple(rows)


def _before_and_after(profile: Profile) -> Table:
    assert profile.tuning is not None
    before, after = profile.phase_time_ns, profile.tuning.tuned_phase_time_ns
    whole = max(sum(before.values()), sum(after.values()))
    rows = [
        Row(
            cells=(
                phase.label,
                format_part(before.get(phase, 0.0), whole),
                format_part(after.get(phase, 0.0), whole),
            ),
            phase=phase,
        )
        for phase in Phase
        if before.get(phase, 0.0) or after.get(phase, 0.0)
    ]
    total = (format_part(sum(before.values()), whole), format_part(sum(after.values()), whole))
    rows.append(Row(cells=("step", *total)))
    return Table(
        caption=(
            "The mean step before anything was changed and with all kept fixes in force. These are"
            " different stretches of the run: the gains above, not these columns, say what tuning won."
        ),
        columns=(
            Column(title="phase"),
            Column(title="before", number=True),
            Column(title="after", number=True),
        ),
        rows=tuple(rows),
    )
