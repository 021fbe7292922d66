"""What a page reads of a run: plain data, made by the run's reader, never changed afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from diagnose.analysis.readings import Vitals
from diagnose.core.history import Loss
from diagnose.core.liveness import Liveness
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.trial import Tuning
from diagnose.report._charts import Mark

Vector = npt.NDArray[np.float64]


def _none() -> Vector:
    return np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Steps in bins that follow each other without gaps; each array has one entry per bin.

    Attributes:
        first: The step at which the first bin begins, from 0.
        width: Steps per bin, a power of two.
        counts: Steps of each bin that have been read; fewer than `width` at both ends, 0 where records are
            damaged or not yet read. All else is NaN there.
        step_ms: Mean wall time of a step.
        phase_ms: Mean time of each phase in a step's order; they sum to `step_ms`. A phase that took no
            time anywhere is absent.
        samples_per_s: Of all ranks together; NaN where no batch size is known.
    """

    first: int = 0
    width: int = 1
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    step_ms: Vector = field(default_factory=_none)
    phase_ms: Mapping[Phase, Vector] = field(default_factory=dict)
    samples_per_s: Vector = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankBins:
    """One figure of every rank, in bins as of `Steps`.

    Attributes:
        first: The step at which the first bin begins.
        width: Steps per bin.
        values_ms: Milliseconds per step, shape `(ranks, bins)`; NaN where nothing was read.
    """

    first: int
    width: int
    values_ms: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class LateNow:
    """The rank that is late in the newest steps.

    Attributes:
        rank: Its number.
        late_ns: By how much, per step.
        num_steps: Of how many steps.
    """

    rank: int
    late_ns: float
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lateness:
    """How the ranks differ.

    Attributes:
        ranks: Their numbers, one per row.
        late: How long the others wait for a rank, see `analysis.lateness`.
        communication: Exposed communication.
        by_meetings: Whether `late` compares waits that were measured in each step.
        now: Which rank is late in the newest steps; `None` where none is.
    """

    ranks: tuple[int, ...]
    late: RankBins
    communication: RankBins
    by_meetings: bool = False
    now: LateNow | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankState:
    """One rank's file.

    Attributes:
        number: The rank.
        num_steps: Steps that it has recorded.
        words: Why it cannot be read, or what of it is damaged; empty where all is well.
    """

    number: int
    num_steps: int = 0
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A run as it was known at one moment.

    Attributes:
        version: Grows with every change; the same number is the same snapshot.
        id: The run's name.
        script: The script or module as the user typed it.
        argv: Its arguments.
        started: When, ISO 8601.
        liveness: Whether it goes on.
        words: The same in words.
        over: Whether nothing more will come: it has ended, and all of it is read and analysed.
        notes: What the reader must know, such as damage.
        lost: Why records are lost, as it is known now; empty where none are known to be.
        num_steps: Steps of the first rank.
        filled_share: How much of the run has been read, 0 to 1: the newest comes first.
        world_size: Ranks that recorded steps.
        device_share: The part of the first rank's steps that is by the device's clock; `None` where all
            are by the host's.
        overview: All steps, of the first rank.
        recent: The newest, one by one.
        ranks: Every rank's file.
        lateness: How the ranks differ; `None` with one.
        vitals: Memory and CPUs, of the first rank.
        tuning: What tuning did so far; `None` where the run is not tuned.
        loss: The training loss; `None` where it was not recorded.
        marks: What tuning and commands did, in order.
        profile: The run analysed, its rules asked; `None` until that is done.
        analysed_steps: Steps that there were when it was.
        left_out: What the analysis leaves out, in words, such as all ranks but the first.
        analysis: `being analysed`, or why there is no profile; empty when there is a fresh one.
        refuses: Why the job takes no commands; empty where it does.
    """

    version: int
    id: str
    script: str = ""
    argv: tuple[str, ...] = ()
    started: str = ""
    liveness: Liveness
    words: str = ""
    over: bool = False
    notes: tuple[str, ...] = ()
    lost: str = ""
    num_steps: int = 0
    filled_share: float = 0.0
    world_size: int = 1
    device_share: float | None = None
    overview: Steps = field(default_factory=Steps)
    recent: Steps = field(default_factory=Steps)
    ranks: tuple[RankState, ...] = ()
    lateness: Lateness | None = None
    vitals: Vitals = field(default_factory=Vitals)
    tuning: Tuning | None = None
    loss: Loss | None = None
    marks: tuple[Mark, ...] = ()
    profile: Profile | None = None
    analysed_steps: int = 0
    left_out: str = ""
    analysis: str = ""
    refuses: str = "Nothing is known of this run yet."
