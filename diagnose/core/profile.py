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
        num_samples: About how many times the sampler saw the line; small numbers carry little.
        in_worker: Whether a DataLoader worker, not the training thread, spent the time. `share` is then
            the part of the workers' busy time.
        text: The source line without indentation, when it could be read.
        via: The frame of an installed package, inside that line, that most of its time was spent in:
            `transformers/trainer.py:2520 Trainer._inner_training_loop`. Empty when there was none.
        idiom: What the line is there for, the most telling first: the names of `analysis.purposes`, such as
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
class SlowBatch:
    """One of the batches that took a worker longest.

    Attributes:
        took_ns: Fetch and collate together.
        worker: The loader's number of the worker.
        before: How many batches the worker had made before: the first one also pays for its start.
        step: The step, from 0, that was under way when the batch was there; `None` where none was.
        num_samples: How many samples it holds; `None` where the loader does not batch them itself.
        samples: What was asked of the dataset, the first of them; empty for a stream.
    """

    took_ns: int
    worker: int
    before: int
    step: int | None = None
    num_samples: int | None = None
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a worker reads for a batch, from a disk or the page cache: the mean of those looked into.

    Attributes:
        opens: Files that its main thread opens, by way of Python.
        samples: Samples in the batch; `None` where nobody says.
        read_bytes: Bytes that its main thread reads, without what is mapped into memory; `None` when
            unknown.
        made_bytes: Bytes of the batch; `None` when unknown.
        share: Part of the workers' sampled time in lines of the script that open files, or work on them
            while they are open; `None` where samples are too few.
    """

    opens: float
    samples: float | None = None
    read_bytes: float | None = None
    made_bytes: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """What the DataLoader's worker processes did, all of them together.

    Attributes:
        num_workers: Number of distinct worker processes that reported.
        batches: Batches they produced.
        fetch_ns: Time in `dataset[...]` per batch, without collate.
        collate_ns: Time in `collate_fn` per batch.
        send_ns: CPU time per batch of everything but fetch and collate: pickling and queues, mostly. That
            of helper threads, too, where `helper_ns` is `None`.
        cpu_share: Part of fetch and collate that was spent on a CPU; the rest waited for disk, network or a
            free core.
        idle_share: Part of the workers' life spent waiting to be asked.
        ready_batches: Mean number of finished batches waiting when the loop asked for one.
        delay_share: Part of fetch and collate in which a worker was ready to run and had no CPU.
        median_ns: Median time of fetch and collate together, per batch.
        tail_share: Part of the workers' busy time that batches took beyond the median, counting those alone
            that took over twice of it.
        tail_batches: Part of the batches that took over twice the median.
        longest_ns: The longest batch.
        slowest: The longest batches, the longest first; empty where it was not kept what they held.
        busiest: Busy time of the busiest worker, as a multiple of the mean one's.
        pieces: Objects that the fullest batch looked into consists of, up to 1000; `None` when unknown.
        private_growth_bytes: Memory that each worker came to own over its life, mean of those that lived
            long enough to tell: pages no longer shared with the training process.
        repeated: Watched samples that came out the same each time they were asked for again.
        varied: Watched samples that came out differently.
        at_once: Workers of one epoch, where each epoch starts its own; `None` when unknown.
        helper_ns: CPU time per batch of threads that compute beside a worker's main one and send nothing:
            teams of BLAS or OpenMP, decoders; `None` when unknown.
        reading: What they read; `None` when unknown.
    """

    num_workers: int
    batches: int
    fetch_ns: float
    collate_ns: float
    send_ns: float
    cpu_share: float
    idle_share: float
    ready_batches: float | None = None
    delay_share: float | None = None
    median_ns: float | None = None
    tail_share: float | None = None
    tail_batches: float | None = None
    longest_ns: float | None = None
    slowest: tuple[SlowBatch, ...] = ()
    busiest: float | None = None
    pieces: int | None = None
    private_growth_bytes: float | None = None
    repeated: int = 0
    varied: int = 0
    at_once: int | None = None
    helper_ns: float | None = None
    reading: Reading | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStats:
    """Where loading a batch took its time, whoever loaded it.

    Attributes:
        fetch_ns: Time per batch in `dataset[...]` on the training thread; `None` when workers do it.
        collate_ns: Likewise in `collate_fn`.
        collate_cpu_share: Part of it, 0 to 1, that the training thread was on a CPU; `None` where that is
            not known.
        workers: The worker processes of the loader that fed most steps, if there were any.
        batches_per_step: Training batches asked of loaders per step.
        loaders_per_step: Loaders that feed each step together: `zip(labelled, unlabelled)`.
        main_wait_share: Part of the waits for batches, 0 to 1, that is for those of them that have workers
            as the first has, or none as it; 1 where all are alike, or nobody looked.
        epoch_starts: Epochs that began within the measured steps.
        epoch_start_ns: Time per step (of all steps) that waits at the beginning of an epoch took beyond the
            usual wait.
        epoch_start_compute_ns: Likewise, what forward, backward and optimizer took beyond the usual in the
            steps that begin an epoch: after a fork, memory is copied when it is written first.
        epoch_start_gap_ns: Likewise, what the code between hooked calls took beyond the usual.
        steady_wait_ns: Mean wait of a step that begins no epoch.
        steady_gap_ns: Mean time of such a step between hooked calls, in the code of the loop itself.
        burst_ns: Part of `steady_wait_ns` above the usual wait, in steps that wait far longer than usual.
        burst_share: Part of the steps that do.
        burst_period: Steps between them, where they come regularly.
        early_wait_ns: Mean wait in the first quarter of the steps that begin no epoch.
        late_wait_ns: Likewise in the last quarter.
        early_read_bytes: Bytes read from storage per step in the first quarter of the run.
        late_read_bytes: Likewise in the last quarter.
        collected_share: Part of the garbage collector's time, 0 to 1, in which the loop waited for a batch:
            what unpacking or making one leaves for it.
        drawing_ns: Time per step in which the training thread draws what workers are to fetch next, without
            the beginnings of epochs; `None` when unknown.
        epoch_drawing_ns: Time per step (of all steps) that it takes at the beginnings of epochs.
        asked_aside: Whether another thread takes the batches from the loader, ahead of the loop, which
            waits for that one.
    """

    fetch_ns: float | None = None
    collate_ns: float | None = None
    collate_cpu_share: float | None = None
    workers: WorkerStats | None = None
    loaders_per_step: int = 1
    main_wait_share: float = 1.0
    batches_per_step: float | None = None
    epoch_starts: int = 0
    epoch_start_ns: float | None = None
    epoch_start_compute_ns: float | None = None
    epoch_start_gap_ns: float | None = None
    steady_wait_ns: float | None = None
    steady_gap_ns: float | None = None
    burst_ns: float | None = None
    burst_share: float | None = None
    burst_period: int | None = None
    early_wait_ns: float | None = None
    late_wait_ns: float | None = None
    early_read_bytes: float | None = None
    late_read_bytes: float | None = None
    collected_share: float | None = None
    drawing_ns: float | None = None
    epoch_drawing_ns: float | None = None
    asked_aside: bool = False


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
        exchanged_ns: Part of the phase `COMMUNICATION` that waits for one other rank, not for all, or that
            model and optimizers call themselves; `None` where that is not known.
        averaged_ns: Part of the phase `COMMUNICATION` in which the loop adds up tensors over the ranks,
            between a backward pass and the optimizer's step; `None` where that is not known.
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
    exchanged_ns: float | None = 0.0
    averaged_ns: float | None = 0.0
    late_share: Mapping[Phase, float] = field(default_factory=dict)
    stats: HostStats = field(default_factory=HostStats)
    clock: ClockOffset | None = None


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
            is of the steps before anything was changed, save those that are of the whole run.
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
    input: InputStats = InputStats()
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
