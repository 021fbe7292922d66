"""What made one version slower than another: the nouns that the attribution fills and the outputs print."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diagnose.core.phases import Phase


class Kind(str, Enum):
    """How far the loss could be attributed. `CANNOT_TELL` is never rounded to a phase."""

    PHASES = "phases"
    EVENLY = "evenly"
    CANNOT_TELL = "cannot_tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """By how much something took longer per step, over pairs of runs.

    Attributes:
        before_ns: Median over the first version's runs.
        ns: Hodges-Lehmann estimate of the paired differences.
        low_ns: Lower end of its 99 % interval.
        high_ns: Upper end.

    Raises:
        ValueError: If the interval does not hold the estimate.
    """

    before_ns: float
    ns: float
    low_ns: float
    high_ns: float

    def __post_init__(self) -> None:
        if not self.low_ns <= self.ns <= self.high_ns:
            raise ValueError(f"{self.ns} is not within {self.low_ns} to {self.high_ns}")

    @property
    def is_certain(self) -> bool:
        """Whether the whole interval is growth."""
        return self.low_ns > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseGrowth:
    """A phase and its growth.

    Attributes:
        part: Its part of the step's growth; over 1 where other phases shrank.
    """

    phase: Phase
    growth: Growth
    part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LineGrowth:
    """A sampled source line and its growth. It is named as it stands in the second version.

    Attributes:
        phase: The phase that most of its time belongs to.
        file: Relative to the version's root, with `/`; absolute outside of it.
        line: Line number in the second version; in the first, where the second no longer has it.
        function: The function it is in.
        text: Its source, without indentation; empty where it could not be read.
        growth: Nanoseconds per step; of a line of DataLoader workers, per batch, all workers together.
        after_ns: What it takes in the second version: median over the runs.
        in_worker: Whether DataLoader workers, not the training thread, spent the time.
        in_diff: Whether the two versions differ in its statement.
        idiom: What it is there for: `sync`, `log`, ... (`source.purposes`).
    """

    phase: Phase
    file: str
    line: int
    function: str
    text: str
    growth: Growth
    after_ns: float
    in_worker: bool = False
    in_diff: bool = False
    idiom: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFinding:
    """A fault that the second version's runs have and the first version's have not.

    Attributes:
        rule: Name of the rule.
        summary: Of the run that lost most by it.
        lost_ns: Median over the runs that have it.
        file: The file to blame, relative like a line's; empty when no line is.
        line: Its line; 0 with no file.
        before: Runs of the first version that have it, and how many were asked.
        after: Likewise of the second.
    """

    rule: str
    summary: str
    lost_ns: float
    file: str
    line: int
    before: tuple[int, int]
    after: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactChange:
    """Something counted or set, other than time, that differs between the versions in every run.

    Attributes:
        name: What: `recompilations`, `loader workers`.
        before: Its value in the first version, as text.
        after: In the second.
    """

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """What a loss is attributed to.

    Attributes:
        kind: Whether phases could be named, all grew alike, or neither.
        reason: Why nothing could be named; empty where something was.
        num_pairs: Pairs of runs it rests on.
        step: Growth of the mean step.
        phases: The phases that account for the loss, the largest growth first; all of weight where the
            kind is `EVENLY`.
        shrank: Phases that certainly took less time.
        lines: Source lines that certainly grew, the largest growth first.
        new_waits: Lines that wait for a device or for other ranks, or compile, and that the first version
            does not have; the most costly first.
        hot_diff: Lines of the diff that the second version spends time on, the most costly first, but for
            those that certainly did not grow.
        findings: New faults, the most costly first.
        facts: Counts and settings that changed.
        work: Where the versions' steps differ in samples, or tokens, and these are judged: how many of them
            all times are for, as `32 samples`: those of the first version's step.
    """

    kind: Kind
    reason: str = ""
    num_pairs: int
    step: Growth
    phases: tuple[PhaseGrowth, ...] = ()
    shrank: tuple[PhaseGrowth, ...] = ()
    lines: tuple[LineGrowth, ...] = ()
    new_waits: tuple[LineGrowth, ...] = ()
    hot_diff: tuple[LineGrowth, ...] = ()
    findings: tuple[NewFinding, ...] = ()
    facts: tuple[FactChange, ...] = ()
    work: str = ""
