"""What a fault truly costs: the same job with and without it, in turn.

Where nothing works beside the training loop, two jobs take turns every tenth of a second, without
`diagnose`. The judged runs are others between those, of more steps, as the start of `diagnose` is a part of
their first second. Else whole runs take turns, all under `diagnose`, and those with the fault are judged.
The time is our own clock's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from accuracy.scripts import AS_IT_IS, PROBE, Fault, Script
from accuracy.server import WARMUP, Job, JobFailed, forked_run, in_turn, real_run
from accuracy.sizing import Tried, find_size

MIN_NOISES = 2.0
"""A slowdown is known when it is so many times the noise."""

MIN_TRUE_SHARE = 0.02
"""A fault that truly takes less is not there to be named, whatever its size was to be."""

LAUNCHES = 3
"""So often two jobs are started to take turns, and up to twice as often until the median is sharp; so often
a run is judged."""

SHARP = 0.05
"""A truth is sharp when its noise is this part of it: a size error of 15 % can then be told from none."""

LONGER = 3
"""The judged run takes so many times the steps, but for the warm-up."""

MAY_GROW = frozenset({"checkpoint-stall"})
"""Labels of faults that are often larger in a longer run, as what is saved is what was gathered so far.
Their truth takes as many steps as the judged run; that of the others is as long in a third of them."""

MEDIAN_ERROR = 1.86
"""Standard error of a median, from the median absolute deviation and the root of the number of values."""

FRESH_S = 20
"""A run without the fault is compared with what runs so soon after it: a shared machine changes."""

Run = Callable[[Sequence[str]], Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One question: a job with certain faults, and what it is compared with.

    Attributes:
        kind: `single`, `pair`, `decoy` or `control`.
        faults: The faults that are on; of a decoy, the one that costs nothing first.
        severity: Percentage of the step that the first is to take; 0 for a control, and for a fault
            without a size.
        base: Options of a control.
    """

    script: Script
    kind: str
    faults: tuple[Fault, ...] = ()
    severity: int = 0
    base: tuple[str, ...] = ()

    @property
    def right(self) -> tuple[str, ...]:
        """Names of which the first finding must have one; empty if nothing must be found."""
        named = self.faults[1:] if self.kind == "decoy" else self.faults
        return tuple(name for fault in named for name in fault.right)

    @property
    def beside(self) -> bool:
        """Whether anything works on while the training loop waits."""
        return any(fault.beside for fault in self.faults)

    @property
    def longer(self) -> tuple[str, ...]:
        """Options that make the judged run longer: none where that would change the fault."""
        fixed = any(fault.grows or "--steps" in fault.fixed for fault in self.faults)
        steps = 0 if fixed else self.script.steps
        return ("--steps", str(WARMUP + 1 + LONGER * (steps - WARMUP - 1))) if steps else ()

    @property
    def label(self) -> str:
        """The row of the confusion matrix."""
        return self.faults[0].label if self.faults else "healthy"

    def __str__(self) -> str:
        names = " + ".join(fault.name or fault.label for fault in self.faults) or "healthy"
        return f"{self.script}: {names}{f' {self.severity} %' if self.severity else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was said of a cell, and what was true.

    Attributes:
        job: The judged run.
        more: Further ones of the same options, seconds apart: a shared machine is not the same in any two,
            and neither is the part of the step that a fault takes.
        options: Their options.
        true_share: Part of its step that the faults took, 0 to 1; `None` for a control.
        noise_share: How far that may be off, from how much launches differ.
        failed: The last words of a job that could not be run.
        commit: Of `diagnose`, where the answer was kept.
    """

    cell: Cell
    job: Job | None
    more: tuple[Job, ...] = ()
    options: tuple[str, ...] = ()
    true_share: float | None = None
    noise_share: float = 0.0
    failed: str = ""
    commit: str = ""

    @property
    def resolved(self) -> bool:
        """Whether the truth is known well enough to judge by it."""
        if self.job is None:
            return False
        if self.true_share is None:
            return True
        if self.cell.kind == "decoy":
            return abs(self.true_share) < MIN_TRUE_SHARE + self.noise_share
        return self.true_share > max(MIN_TRUE_SHARE, MIN_NOISES * self.noise_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a tool said of a job: its verdicts, the gravest first; `grave` are not those it calls low."""

    verdicts: tuple[str, ...]
    grave: tuple[str, ...]


@dataclass(slots=True)
class Bench:
    """Runs cells, and keeps the runs without fault, which neighbouring cells share.

    Attributes:
        repeat: How many more pairs of runs a cell gets whose truth is not resolved, or not sharp.
        launches: How often two jobs are started to take turns.
        real: Whether every job is a `diagnose run` of its own.
    """

    repeat: int = 1
    launches: int = LAUNCHES
    real: bool = False
    _bases: dict[tuple[Script, tuple[str, ...]], tuple[float, Job]] = field(default_factory=dict)
    _tried: dict[tuple[Script, str], list[Tried]] = field(default_factory=dict)

    def run(self, script: Script, arguments: Sequence[str]) -> Job:
        """Runs one job."""
        if self.real or script.ranks > 1:
            return real_run(script.path, arguments, ranks=script.ranks)
        return forked_run(script.path, arguments)

    def options(self, cell: Cell) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the options of the job without what is asked for, and with it."""
        if not cell.faults:
            return cell.base, cell.base
        first, *rest = cell.faults
        if cell.kind == "decoy":
            (_, on), (_, more) = self.sized(cell.script, first, 20), self.sized(cell.script, rest[0], 40)
            return more, (*more, *on)
        off, on = self.sized(cell.script, first, cell.severity)
        for second in rest:
            on = (*on, *self.sized(cell.script, second, cell.severity)[1])
        return off, on

    def sized(self, script: Script, fault: Fault, severity: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the options without and with a fault that takes `severity` percent of the step."""
        if fault.probe is None or fault.is_hidden or severity in (PROBE, AS_IT_IS):
            return fault.arms(fault.probe)

        def share_at(size: float) -> float:
            off, on = fault.arms(size)
            if not fault.beside:
                return self.share_in_turn(script, off, on)
            base_ms, with_ms = self.base(script, off).step_ms, self.run(script, on).step_ms
            return (with_ms - base_ms) / with_ms

        size = find_size(
            share_at,
            severity / 100,
            first=fault.probe,
            limits=fault.limits,
            tried=self._tried.setdefault((script, fault.name or fault.label), []),
            whole=isinstance(fault.probe, int),
        )
        return fault.arms(size)

    def base(self, script: Script, off: tuple[str, ...]) -> Job:
        """Returns a run without the fault that was made just now, or makes it."""
        made_s, known = self._bases.get((script, off), (-FRESH_S, None))
        if known is None or time.monotonic() - made_s > FRESH_S:
            return self.keep(script, off, self.run(script, off))
        return known

    def keep(self, script: Script, off: tuple[str, ...], job: Job) -> Job:
        """Keeps a run without the fault for what comes next."""
        self._bases[script, off] = time.monotonic(), job
        return job

    def answer(self, cell: Cell) -> Answer:
        """Runs a cell: without, with, without; again where that does not tell."""
        try:
            return self._answer(cell)
        except JobFailed as error:
            return Answer(cell=cell, job=None, failed=str(error))

    def _answer(self, cell: Cell) -> Answer:
        off, on = self.options(cell)
        if not cell.faults:
            return Answer(cell=cell, job=self.base(cell.script, off), options=off)
        return self._beside(cell, off, on) if cell.beside else self._in_turn(cell, off, on)

    def share_in_turn(self, script: Script, off: tuple[str, ...], on: tuple[str, ...]) -> float:
        """Returns the part of the step that options cost, in one launch of two jobs that take turns."""
        off_ms, on_ms = in_turn(script.path, off, on)
        return (on_ms - off_ms) / on_ms

    def _in_turn(self, cell: Cell, off: tuple[str, ...], on: tuple[str, ...]) -> Answer:
        longer = cell.longer if any(fault.label in MAY_GROW for fault in cell.faults) else ()
        judged: list[Job] = []
        shares: list[float] = []
        while len(shares) < self.launches * (1 + self.repeat):
            if len(judged) < self.launches:
                judged.append(self.run(cell.script, (*on, *cell.longer)))
            shares.append(self.share_in_turn(cell.script, (*off, *longer), (*on, *longer)))
            answer = Answer(
                cell=cell,
                job=judged[0],
                more=tuple(judged[1:]),
                options=on,
                true_share=statistics.median(shares),
                noise_share=_median_error(shares),
            )
            sharp = answer.noise_share <= SHARP * abs(answer.true_share)
            if len(shares) >= self.launches and answer.resolved and sharp:
                break
        return answer

    def _beside(self, cell: Cell, off: tuple[str, ...], on: tuple[str, ...]) -> Answer:
        without, with_ = [self.base(cell.script, off)], []
        for _ in range(2 + self.repeat):
            with_.append(self.run(cell.script, on))
            without.append(self.run(cell.script, off))
            answer = _compare(cell, on, without, with_)
            if len(with_) > 1 and answer.resolved:
                break
        self.keep(cell.script, off, without[-1])
        return answer


def _median_error(values: list[float]) -> float:
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return MEDIAN_ERROR * deviation / math.sqrt(len(values))


def _compare(cell: Cell, on: tuple[str, ...], without: list[Job], with_: list[Job]) -> Answer:
    off_ms, on_ms = [job.step_ms for job in without], [job.step_ms for job in with_]
    slow_ms = statistics.median(on_ms)
    return Answer(
        cell=cell,
        job=with_[0],
        more=tuple(with_[1:]),
        options=on,
        true_share=(slow_ms - statistics.median(off_ms)) / slow_ms,
        noise_share=max((max(ms) - min(ms)) / len(ms) for ms in (off_ms, on_ms)) / slow_ms,
    )


def cells_of(script: Script, severities: Sequence[int]) -> Iterator[Cell]:
    """Yields the questions that a script can be asked.

    The controls come last: they take a run that a fault was compared with, where there is one.
    """
    for fault in script.faults:
        if fault.is_hidden:
            continue
        for severity in severities if fault.probe is not None else (AS_IT_IS,):
            yield Cell(script=script, kind="single", faults=(fault,), severity=severity)
    for pair in script.pairs:
        yield Cell(script=script, kind="pair", faults=pair, severity=20)
    for decoy in script.decoys:
        yield Cell(script=script, kind="decoy", faults=decoy, severity=20)
    sized = [fault for fault in script.faults if fault.probe is not None and not fault.dial]
    for base in sorted({fault.fixed for fault in sized} or {()}):
        yield Cell(script=script, kind="control", base=base)
