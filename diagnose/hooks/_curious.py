"""What is due after some steps only: looks at live objects, and whether the hooks look around next."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diagnose.hooks._recorder import Recorder

INSPECT_AFTER = 10
"""Steps after which the live objects of the loop have all been seen, and are looked at once."""

CURIOUS_UNTIL = 64
"""The hooks look around in each of so many first steps: for the lines that call, and for modules of new
classes. A loss or a second model appears early."""

CURIOUS_EVERY = 512
"""Afterwards they do in one step of so many."""

SEARCH_UNTIL = 8
"""Of the steps in which the hooks look around, modules of new classes are looked for in so many first ones,
in those whose number is a power of two, and in all later ones. The search replaces a method of the class
that all modules come from, so that Python forgets what it knew of each: 1 ms and more in a step."""


def settle(recorder: Recorder) -> None:
    """Decides whether the hooks may look at nothing but the time from the next batch on."""
    looks_on = recorder.curious or recorder.listening or recorder.stop_after
    is_asked = recorder.on_boundary is not None and recorder.boundary_due <= recorder.steps + 1
    recorder.calm_when_told = 0 if looks_on or is_asked else recorder.thread


def take_care(recorder: Recorder, steps: int) -> int:
    """Does what is due between two steps.

    Args:
        recorder: Its functions are called, and it is told what to do in the next step.
        steps: Number of finished steps.

    Returns:
        After how many steps something is due again.
    """
    looks = recorder.looks
    if steps == INSPECT_AFTER:
        for inspect in looks.inspections:
            recorder.guarded(inspect)
    if steps == recorder.max_steps:
        recorder.switch_off()
    for care in looks.cared:
        recorder.guarded(care)
    recorder.calm = 0
    curious = recorder.curious = steps < CURIOUS_UNTIL or not steps % CURIOUS_EVERY
    due = steps < SEARCH_UNTIL or not steps & (steps - 1) or steps > CURIOUS_UNTIL
    recorder.searching = curious and due
    settle(recorder)
    # After curiosity one more step with open eyes, in which the search for modules ends.
    if curious or recorder.listening:
        return steps + 1
    later = steps + CURIOUS_EVERY - steps % CURIOUS_EVERY
    return min(later, recorder.max_steps) if steps < recorder.max_steps else later
