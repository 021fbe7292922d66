"""What is known of a run once its records are analysed: the nouns that rules and reports read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from diagnose.core.copies import Copies
from diagnose.core.deep_window import DeepWindow
from diagnose.core.device import Device
from diagnose.core.finding import Abstention, Finding
from diagnose.core.history import History
from diagnose.core.host import HostStats, foreign_cpus
from diagnose.core.input import InputStats
from diagnose.core.parallel import ClockOffset
from diagnose.core.phases import Phase
from diagnose.core.program import Program
from diagnose.core.series import Series
from diagnose.core.settings import Settings
from diagnose.core.trial import Tuning


class Status(str, Enum):
    """How much a run's figures can carry."""

    OK = "ok"
    NO_STEPS = "no_steps"
    TOO_FEW_STEPS = "too_few_steps"
    SCRIPT_FAILED = "script_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Which program ran, where, and how it ended.

    Attributes:
        id: Name of the run's folder.
        script: The script or module as the user typed it.
        argv: The script's own arguments.
        exit_code: The code the script exited with; `None` while it runs or when a signal ended it.
        signal: The number of the signal that ended the script, if one did.
        world_size: Number of ranks that recorded steps.
        device: `cpu` or the accelerator's type as torch names it.
        torch: Version of torch, or `None` when the script never imported it.
        started: Start of the run, ISO 8601 with time zone.
        duration_s: Wall time of the script, from its start to its end, as far as it is known.
        error: Type of the uncaught exception that ended the script, if one did.
        recorder: Which recorder wrote it, `core.ledger.RECORDER`; `None` for the first, which did not say.
        lost: Why records are lost, in a few words; empty where none are known to be.
    """

    id: str
    script: str
    argv: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: int | None = None
    world_size: int = 1
    device: str = "cpu"
    torch: str | None = None
    started: str = ""
    duration_s: float | None = None
    error: str | None = None
    recorder: int | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Work done per second over the measured steps, of all ranks together.

    Attributes:
        samples_per_s: `None` when no batch size could be read.
        samples_per_s_ci95: 95 % interval of `samples_per_s`, from the spread between blocks of steps.
        tokens_per_s: Only for integer batches of shape `(B, T)`.
        steps_per_s: Steps of one rank per second.
    """

    samples_per_s: float | None = None
    samples_per_s_ci95: tuple[float, float] | None = None
    tokens_per_s: float | None = None
    steps_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """How many steps there were, and how long the measured ones took.

    Attributes:
        count: All steps that ended, warm-up included.
        warmup: Leading steps left out of every figure.
        left_out: Other steps left out: those of a tuned run that were not the script's own, those that a
            deep window slowed down, and those in which a gate stopped the process.
        total_time_ns: Wall time of the measured steps together.
        passes: Backward passes of a step: of most measured ones.
    """

    count: int = 0
    warmup: int = 0
    left_out: int = 0
    total_time_ns: int = 0
    mean_ns: float | None = None
    median_ns: float | None = None
    p95_ns: float | None = None
    p99_ns: float | None = None
    passes: float = 1.0

    @property
    def measured(self) -> int:
        """Number of steps that the figures rest on."""
        return self.count - self.warmup - self.left_out

    @property
    def looked_at(self) -> int:
        """Number of steps that counts of events and calls are of: the measured ones and the warm-up."""
        return self.count - self.left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of the user's code and the share of all measured time spent there, from the sampler.

    Attributes:
        phase: The phase that the time belongs to.
        file: Absolute path, or the name in angle brackets of code without a file.
        line: Line number, from 1.
        function: Qualified name of the function, `<module>` at the top level.
        share: Part of the measured wall time, 0 to 1.
        between: The part of `share` that passed between hooked calls, so in code of the loop itself: of a
            wait for data, what the loop does to batches rather than its loader.
        model_share: Part of the measured time in which a model was called from the line, however deep.
        acting: The part of `share` in which who called it acted in an environment, or stepped one.
        irregular: The part of `share`, beside `acting`, that passed in a few steps, at no regular interval,
            in which what lies between the same hooks takes far longer than it usually does.
        for_loss: The part of `share` in collectives that get what the loss or a batch is made of.
        num_samples: About how many times the sampler saw the line; small numbers carry little.
        in_worker: Whether a DataLoader worker, not the training thread, spent the time. `share` is then
            the part of the workers' busy time.
        text: The source line without indentation, when it could be read.
        via: The frame of an installed package, inside that line, that most of its time was spent in:
            `transformers/trainer.py:2520 Trainer._inner_training_loop`. Empty when there was none.
        idiom: What the line is there for, the most telling first: the names of `source.purposes`, such as
            `log` and `sync` for `print(loss.item())`. Empty when its source does not say.
        every: The condition with a remainder under which it runs, `step % 10 == 0`; empty for none.
        off_cpu: Part of its time, 0 to 1, in which the thread used no CPU: it waited, for whatever it was.
            `None` where it was not sampled twice in a row there.
        num_operations: In an optimizer's phase, about how many operations on whole tensors it does.
        trains: Whether it leaves training to a package, in which backward passes and steps were seen.
    """

    phase: Phase
    file: str
    line: int
    function: str
    share: float
    between: float = 0.0
    model_share: float = 0.0
    acting: float = 0.0
    irregular: float = 0.0
    for_loss: float = 0.0
    num_samples: int = 0
    in_worker: bool = False
    text: str = ""
    via: str = ""
    idiom: tuple[str, ...] = ()
    every: str = ""
    off_cpu: float | None = None
    num_operations: int = 0
    trains: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What measuring cost, measured.

    Attributes:
        us_per_step: Microseconds of the training thread per step: spans, sampler and flushes.
        startup_s: Seconds added before the script's first line and by installing hooks.
    """

    us_per_step: float | None = None
    startup_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """One rank's ledger: mean nanoseconds per measured step.

    Attributes:
        standing_ns: Part of the phase `OTHER` in lines that only wait: sleep, or wait for a process.
        working_ns: Part of the phase `DATA_WAIT` in which the loop's own lines work on a batch that they
            have: by their names they neither read nor wait.
        gathering_ns: Part of the phase `COMMUNICATION` in which the loop gets of the other ranks what the
            loss or a batch is made of.
        exchanged_ns: Part of the phase `COMMUNICATION` that waits for one other rank, not for all, or that
            model and optimizers call themselves; `None` where that is not known.
        averaged_ns: Part of the phase `COMMUNICATION` in which the loop adds up tensors over the ranks,
            between a backward pass and the optimizer's step, or hands on what each rank's optimizer updates
            alone; `None` where that is not known.
        late_share: Part of the steps, by phase, in which this rank took longest of all; empty where that is
            not known.
        stats: What the operating system says of its process and machine.
        clock: How far its clock is ahead of the first rank's; `None` where they were not seen to meet.
    """

    rank: int
    host: str
    phase_time_ns: Mapping[Phase, float]
    late_ns_per_step: float | None = None
    standing_ns: float = 0.0
    working_ns: float = 0.0
    gathering_ns: float = 0.0
    exchanged_ns: float | None = 0.0
    averaged_ns: float | None = 0.0
    late_share: Mapping[Phase, float] = field(default_factory=dict)
    stats: HostStats = field(default_factory=HostStats)
    clock: ClockOffset | None = None

    def own_ns(self, phase: Phase) -> float:
        """Returns a phase's nanoseconds per step, but a rank that stands still between its passes counts as
        waiting for its input, and one that works on a batch which it has does not."""
        spent_ns = self.phase_time_ns.get(phase, 0.0)
        moved_ns = self.standing_ns - self.working_ns
        if phase is Phase.OTHER:
            return spent_ns - moved_ns
        return spent_ns + moved_ns if phase is Phase.DATA_WAIT else spent_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One run, analysed.

    Attributes:
        phase_time_ns: Mean nanoseconds per measured step. Their sum is `step_time_ns`. A phase that is
            absent was not measured; a phase at 0 was measured and took no time.
        where: Sampled source lines, most expensive first, all phases.
        history: How the run went from its first step to its last, for charts; `None` without steps.
        series: How single steps differ from the mean one.
        host: What the operating system says of the process.
        program: What the script trains with.
        settings: How the process was set up.
        device: What the accelerator says, if there is one.
        device_clock_share: Part of the measured steps whose phases are by the clock of the device; the
            others are by the host's. `None`: all are.
        copies: What is copied between host and device.
        deep_window: A few steps recorded operation by operation; `None` where none were. No other figure is
            of those steps.
        events: How often something happened, on all ranks, in the steps that were looked at, warm-up
            included: `compile`, `checkpoint`, `gc`, ...
        findings: Named faults, the most costly first; empty until the rules have been asked.
        abstained: Rules that missed a reading.
        num_rules: How many rules there were to ask, those that abstained included; `None` until then.
        tuning: What tuning did; `None` in a run that was not tuned. Of a run that was, every other figure
            is of the steps with nothing changed, save those that are of the whole run.
        ranks_comparable: Whether the ranks' times tell which of them the others wait for; `None` where they
            do not.
        notes: What the reader must know: hooks that were switched off, records that were lost.
    """

    run: RunInfo
    status: Status
    throughput: Throughput = Throughput()
    steps: StepStats = StepStats()
    phase_time_ns: Mapping[Phase, float] = field(default_factory=dict)
    where: tuple[SourceLine, ...] = ()
    input: InputStats = field(default_factory=InputStats)
    overhead: Overhead = Overhead()
    ranks: tuple[RankProfile, ...] = ()
    history: History | None = None
    series: Series = field(default_factory=Series)
    host: HostStats = field(default_factory=HostStats)
    program: Program = field(default_factory=Program)
    settings: Settings = field(default_factory=Settings)
    device: Device = field(default_factory=Device)
    device_clock_share: float | None = None
    copies: Copies = field(default_factory=Copies)
    deep_window: DeepWindow | None = None
    events: Mapping[str, int] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    abstained: tuple[Abstention, ...] = ()
    num_rules: int | None = None
    tuning: Tuning | None = None
    ranks_comparable: bool | None = True
    notes: tuple[str, ...] = ()

    @property
    def step_time_ns(self) -> float:
        """Mean wall time of a measured step; 0 without steps."""
        return sum(self.phase_time_ns.values())

    def spent_ns(self, phase: Phase) -> float:
        """Returns the phase's nanoseconds per step; 0 also where it was not measured."""
        return self.phase_time_ns.get(phase, 0.0)

    def rank(self, number: int) -> RankProfile:
        """Returns the rank of this number, which must be one of them."""
        return next(rank for rank in self.ranks if rank.rank == number)

    @property
    def neighbours(self) -> tuple[HostStats, ...]:
        """What the system says of the other ranks on the first one's machine."""
        return tuple(rank.stats for rank in self.ranks[1:] if rank.host == self.ranks[0].host)

    @property
    def foreign_cpus(self) -> float | None:
        """CPUs of the first rank's machine that others used than this run; `None` where not all ranks there
        were recorded."""
        hosts = (self.host, *self.neighbours)
        return foreign_cpus(hosts) if len(hosts) >= self.settings.local_processes else None

    @property
    def own_cpus(self) -> float | None:
        """CPUs whose time this process can have, if the training processes of its machine share equally."""
        cpus = self.host.usable_cpus
        return None if cpus is None else cpus / self.settings.local_processes

    def share(self, phase: Phase) -> float | None:
        """Returns the phase's part of the step, 0 to 1, or `None` when it was not measured."""
        if phase not in self.phase_time_ns or not self.step_time_ns:
            return None
        return self.phase_time_ns[phase] / self.step_time_ns

    @property
    def memory_bytes(self) -> int | None:
        """Memory where the model lives: the accelerator's, or the host's."""
        return self.device.total_bytes if self._on_accelerator else self.program.memory.total_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """Memory that was never used where the model lives; `None` when it was not measured."""
        memory = self.program.memory
        used = self.device.peak_bytes if self._on_accelerator else memory.rss_bytes
        total = self.memory_bytes
        return max(0, total - used) if total is not None and used is not None else None

    @property
    def _on_accelerator(self) -> bool:
        return any(model.device != "cpu" for model in self.program.models)
