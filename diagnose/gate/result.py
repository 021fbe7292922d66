"""What a gate measured and what it came to: the nouns that are judged, attributed and printed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Verdict(str, Enum):
    """How a gate ends. `INCONCLUSIVE` is never rounded to a pass, nor `MISMATCH` to either."""

    PASS = "pass"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    MISMATCH = "mismatch"
    FAILED = "failed"

    @property
    def exit_code(self) -> int:
        """What `diagnose gate` exits with; 2 is a wrong call, as everywhere."""
        return {"pass": 0, "regression": 1, "inconclusive": 3, "mismatch": 4, "failed": 5}[self.value]

    @property
    def label(self) -> str:
        """The verdict in the words of a headline."""
        return {
            "pass": "PASS",
            "regression": "REGRESSION",
            "inconclusive": "CANNOT TELL",
            "mismatch": "NO BASELINE TO COMPARE WITH",
            "failed": "THE TRAINING COMMAND FAILED",
        }[self.value]


class Metric(str, Enum):
    """What can be judged of a run, and the option's value that asks for it."""

    SAMPLES_PER_S = "samples_per_s"
    TOKENS_PER_S = "tokens_per_s"
    MEAN_SAMPLES_PER_S = "mean_samples_per_s"
    STEP_MS = "step_ms"
    CPU_MS = "cpu_ms"
    INSTRUCTIONS = "instructions"
    PEAK_MEMORY = "peak_memory"
    PEAK_DEVICE_MEMORY = "peak_device_memory"
    STARTUP = "startup"

    @property
    def more_is_better(self) -> bool:
        """Whether a larger figure is a gain."""
        return self in (Metric.SAMPLES_PER_S, Metric.TOKENS_PER_S, Metric.MEAN_SAMPLES_PER_S)

    @property
    def label(self) -> str:
        """The metric in the words of a sentence."""
        return {
            "samples_per_s": "samples/s",
            "tokens_per_s": "tokens/s",
            "mean_samples_per_s": "samples/s with every stall",
            "step_ms": "step time",
            "cpu_ms": "CPU time per step",
            "instructions": "instructions of the whole run",
            "peak_memory": "peak host memory",
            "peak_device_memory": "peak device memory",
            "startup": "time to the first step",
        }[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """How busy the machine was while a run was made. `None` was not measured.

    Attributes:
        load: Load average over the last minute, at the end of the run.
        cpus: CPUs that the run may use.
        foreign_cpus: CPUs that other processes used on average, those of the run not counted.
        stolen_cpus: CPUs that the machine's host gave to other guests.
        throttled_share: Part of the accounting periods in which the container's CPU quota was used up.
        system_share: Part of the time that the training thread was in the kernel.
        minor_faults_per_s: Page faults of the process that only needed memory.
    """

    load: float | None = None
    cpus: int | None = None
    foreign_cpus: float | None = None
    stolen_cpus: float | None = None
    throttled_share: float | None = None
    system_share: float | None = None
    minor_faults_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One short run of a training command.

    Attributes:
        name: Of the run, such as `head-03`.
        folder: The run's folder, as of `diagnose run`.
        root: The folder it ran in; its source files lie there.
        figures: Each metric that could be measured: per second, milliseconds, bytes, seconds, or a count.
        num_steps: Measured steps.
        warmup: Leading steps left out.
        step_s: What a usual step took.
        startup_s: From the start of the process to the end of its first step.
        wall_s: The whole run.
        device: Of the first rank, as torch calls it.
        ranks: The ranks whose records were read.
        missing_ranks: Ranks of the job that left no record of a step.
        notes: What could not be read, and which rank stopped before the others.
    """

    name: str
    folder: Path
    root: Path
    figures: Mapping[Metric, float]
    num_steps: int = 0
    warmup: int = 0
    step_s: float = 0.0
    startup_s: float = 0.0
    wall_s: float = 0.0
    machine: MachineState = field(default_factory=MachineState)
    device: str = "cpu"
    ranks: tuple[int, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How the command that was to be measured failed: it did not end well, or never trained.

    Attributes:
        run: Name of the run.
        reason: What happened, in words.
        exit_code: Its exit code; `None` when a signal ended it.
        signal: The signal's number.
        last_lines: The end of what it wrote to stderr.
    """

    run: str
    reason: str
    exit_code: int | None = None
    signal: int | None = None
    last_lines: tuple[str, ...] = ()


class TrainingFailed(Exception):
    """The command that was to be measured failed; `failure` says how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A run of each version, one right after the other."""

    base: MeasuredRun
    head: MeasuredRun
    base_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What all pairs say of one metric. What they do not tell is not a number.

    Attributes:
        drop: By what part the head is worse; below 0 it is better.
        low: Lower end of the drop's 95 % interval; likewise `high`. It takes enough pairs, or jobs, to know
            their scatter.
        error: Standard error of the drop; likewise.
        detectable: The drop that as many such pairs find in 95 of 100 cases; likewise.
        p: How often pairs of identical programs would look this much worse.
        base: Median over base's runs; likewise `head`.
        reason: Why there is no verdict; empty where there is one.
        against: What of a baseline it was compared with, in words, where not with all of it.
    """

    metric: Metric
    verdict: Verdict
    max_drop: float
    drop: float = math.nan
    low: float = math.nan
    high: float = math.nan
    error: float = math.nan
    detectable: float = math.nan
    p: float = math.nan
    pairs: int = 0
    base: float = math.nan
    head: float = math.nan
    reason: str = ""
    against: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One thing that the loss is attributed to.

    Attributes:
        text: One sentence.
        kind: What sort of thing: `phase`, `finding`, `line`, `event`, `diff`.
        file: Relative to the repository, with `/`; empty where no file is to blame.
        line: From 1; 0 where there is none.
        lost_share: Part of the loss that it explains, where that is known.
    """

    text: str
    kind: str
    file: str = ""
    line: int = 0
    lost_share: float | None = None

    @property
    def place(self) -> str:
        """Its file and line, to put before its text; empty where no file is to blame."""
        return f"{self.file}:{self.line}: " if self.file else ""

    @property
    def is_blamed(self) -> bool:
        """Whether it is to blame, and does not merely stand where it may matter."""
        return self.kind not in ("diff", "event")

    @property
    def title(self) -> str:
        """What to head it with where it is shown beside its line."""
        titles = {"line": "slower here", "finding": "new fault"}
        return titles.get(self.kind, "changed in the hot path")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two versions.

    Attributes:
        label: `base` or `head`.
        name: As the user named it: `main`.
        commit: Full hash; empty where no commit was asked for.
        root: The folder to run in.
        folder: The same, relative to the repository, with `/`; empty for its top, or where none is known.
        command: The training command: a script and its arguments, or `-m`, a module and its arguments;
            before them the absolute path of an interpreter, where that is not ours.
        environment: Variables set for it beside our own.
    """

    label: str
    name: str
    commit: str = ""
    root: Path
    folder: str = ""
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """Everything a gate has to say.

    Attributes:
        metric: What was judged: `asked`, or what stands in for it.
        asked: What it was asked to judge.
        max_drop: The drop that is still allowed.
        sides: Base and head; against a stored baseline the head alone.
        pairs: The runs, pair by pair; empty against a stored baseline.
        runs: All runs in the order in which they were made.
        judgement: Of `metric`; `None` where it never came to one.
        beside: Of other metrics, for the reader; they decide nothing.
        causes: What disturbed the measurement, where the verdict is that it cannot tell.
        advice: What to do about it.
        why: What a regression is attributed to.
        folder: Where the runs lie.
        fingerprint: Of the machine: `hard` and `soft`.
        failure: How the training command failed.
        wall_s: How long the gate took.
    """

    verdict: Verdict
    metric: Metric
    asked: Metric
    max_drop: float
    sides: tuple[Side, ...]
    pairs: tuple[Pair, ...] = ()
    runs: tuple[MeasuredRun, ...] = ()
    judgement: Judgement | None = None
    beside: tuple[Judgement, ...] = ()
    causes: tuple[str, ...] = ()
    advice: str = ""
    notes: tuple[str, ...] = ()
    why: tuple[Reason, ...] = ()
    folder: Path | None = None
    fingerprint: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failure: Failure | None = None
    wall_s: float = 0.0
