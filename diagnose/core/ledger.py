"""The columns of one recorded step: which slot of the recorder's ledger means what.

The recorder charges every nanosecond of the training thread to exactly one slot. Ten slots are the
phases that a hook can see. Time between two hooks is a *gap*; it is kept apart by the phase that ended
before it, because the analysis divides each gap between the batch the loop builds, the loss it computes
and its other code, from the source lines that the sampler saw there.
"""

from __future__ import annotations

from typing import Final

from diagnose.core.phases import Phase

RECORDER: Final = 3
"""Which recorder wrote a run. Raised when the same program gets other phase times than before: 1, which did
not yet say so, took what DDP waits on a CPU for other ranks' gradients for backward; 2 took what it waits
for buffers for forward."""

HOOKED: Final[tuple[Phase, ...]] = tuple(phase for phase in Phase if phase is not Phase.OTHER)

SLOTS: Final[tuple[str, ...]] = (
    *(phase.value for phase in HOOKED),
    "gap_after_data_wait",
    "gap_after_copy",
    "gap_after_forward",
    "gap_after_backward",
    "gap_after_optimizer",
    "gap_after_evaluation",
    "gap_after_rest",
)

SLOT_OF: Final[dict[str, int]] = {name: index for index, name in enumerate(SLOTS)}
FIRST_GAP: Final[int] = len(HOOKED)

DATA_WAIT: Final = SLOT_OF["data_wait"]
COPY: Final = SLOT_OF["copy"]
FORWARD: Final = SLOT_OF["forward"]
BACKWARD: Final = SLOT_OF["backward"]
COMMUNICATION: Final = SLOT_OF["communication"]
OPTIMIZER: Final = SLOT_OF["optimizer"]
EVALUATION: Final = SLOT_OF["evaluation"]
CHECKPOINT: Final = SLOT_OF["checkpoint"]
COMPILE: Final = SLOT_OF["compile"]
GC: Final = SLOT_OF["gc"]
GAP_AFTER_EVALUATION: Final = SLOT_OF["gap_after_evaluation"]
GAP_AFTER_REST: Final = SLOT_OF["gap_after_rest"]

GAP_AFTER: Final[tuple[int, ...]] = tuple(
    SLOT_OF.get(f"gap_after_{name}", SLOT_OF["gap_after_rest"]) for name in SLOTS
)
"""For each slot, the gap that follows when it ends and no hook is left open."""

COUNTS: Final[tuple[str, ...]] = ("end_ns", "samples", "tokens", "backward_passes", "spans")
"""What a step's row holds before its slots: when it ended (`time.perf_counter_ns`), and four counts."""

COLUMNS: Final[tuple[str, ...]] = (*COUNTS, *SLOTS)
"""The columns of one stored step, all int64: counts first, then nanoseconds per slot."""

DEVICE_COLUMNS: Final[tuple[str, ...]] = ("holes", *SLOTS, *(f"dry_{name}" for name in SLOTS))
"""The columns of one step by the device's clock, all int64: moments without an event, and if there are any
the step is the host's; nanoseconds per slot; and of those the part in which the device may have had nothing
to do, at most."""
