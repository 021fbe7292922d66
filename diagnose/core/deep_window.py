"""A few steps recorded operation by operation, and what they say. `None` was not measured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

KIND = "deep-window"

TOLD = (
    "device.busy_share",
    "device.launch_bound_ns",
    "device.num_kernels",
    "device.tensor_core_share",
    "device.matmul_share",
    "device.layout_share",
)
"""The readings of a profile that a window is one source of. A rule whose `needs` name one declares by
that that a window would help it."""
"""Name of the command that asks for one, and of the events that say which steps it spoils."""

OURS = "diagnose waits for the device"
"""Around a wait of ours inside a recording: the script does not make it."""

WHOLE_SHARE = 0.95
"""Of a trace's launches: where fewer have their kernel in it, the rest ran after its end. Some launch
nothing, such as those of an empty graph."""


class WorkClass(str, Enum):
    """What a kernel, or an operation on the CPU, is for. Each has one."""

    MATRIX = "matrix"
    ATTENTION = "attention"
    NORM = "norm"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    OPTIMIZER = "optimizer"
    COPY = "copy"
    COLLECTIVE = "collective"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime:
    """What one class took in the whole trace.

    Attributes:
        work: The class.
        count: Kernels, or operations on the CPU.
        total_ns: Their times added up: of an operation only what none inside it took. Kernels that run at
            the same time count both.
    """

    work: WorkClass
    count: int
    total_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hot:
    """A kernel, or an operation on the CPU, by name; otherwise as `ClassTime`.

    Attributes:
        tensor_core: Whether its name says that it uses tensor cores.
    """

    name: str
    work: WorkClass
    count: int
    total_ns: int
    tensor_core: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Calls in which the host waits for the device.

    Attributes:
        what: The call, such as `cudaStreamSynchronize`, or the operation that makes it.
        count: How often, in the whole trace.
        blocked_ns: Time inside, together.
        file: Where it was called from; empty when unknown.
        line: Likewise; 0 when unknown.
    """

    what: str
    count: int
    blocked_ns: int
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one trace of torch's profiler says. Times are of the whole trace; those of several intervals
    count an instant once, however many of them overlap there.

    Attributes:
        device: Name of the device whose kernels were recorded; empty where there are none.
        num_steps: Steps that the trace marks itself, by `ProfilerStep`; 0 where it marks none.
        num_events: Events read.
        damaged: Whether the file ends in the middle.
        span_ns: From the first event to the end of the last.
        kernels_span_ns: From the first kernel or copy to the end of the last; 0 without any.
        num_kernels: Kernels, without copies and fills.
        num_launches: Calls that launched one; `None` where such calls were not recorded.
        num_graph_launches: Of these, calls that launched a whole graph.
        launched_share: Part of the launches that something in the trace ran for; `None` where unknown, 0
            where a model is on a device and the trace has no kernel.
        busy_ns: Time in which the device did something.
        compute_ns: Time in which a kernel ran that is no collective.
        communication_ns: Time in which a collective's kernel ran.
        exposed_ns: Likewise, and no other kernel.
        launch_bound_ns: Time in which the device did nothing and the host was inside an operation, but in
            no call that waits; `None` where the host was not recorded.
        sync_ns: Time that a thread of the host waited for the device, by the script's doing.
        kernel_ns: Times of all kernels added up.
        tensor_core_ns: Likewise of those that use tensor cores.
        layout_ns: Likewise of those that only change how a tensor lies in memory.
        sm_share: Part of the multiprocessors that a kernel has blocks for, averaged over the time of those
            that are no collective, which take few by design; `None` where the trace does not say.
        classes: By class, the longest first.
        top: The longest kernels or operations.
        syncs: Where the host waits, the longest first.
    """

    device: str = ""
    num_steps: int = 0
    num_events: int = 0
    damaged: bool = False
    span_ns: int = 0
    kernels_span_ns: int = 0
    num_kernels: int = 0
    num_launches: int | None = None
    num_graph_launches: int = 0
    launched_share: float | None = None
    busy_ns: int = 0
    compute_ns: int = 0
    communication_ns: int = 0
    exposed_ns: int = 0
    launch_bound_ns: int | None = None
    sync_ns: int = 0
    kernel_ns: int = 0
    tensor_core_ns: int = 0
    layout_ns: int = 0
    sm_share: float | None = None
    classes: tuple[ClassTime, ...] = ()
    top: tuple[Hot, ...] = ()
    syncs: tuple[Sync, ...] = ()

    @property
    def on_device(self) -> bool:
        """Whether kernels of a device were recorded; else the figures are of operations on the CPU."""
        return self.num_kernels > 0

    @property
    def is_whole(self) -> bool:
        """Whether the trace has what its calls launched. Else the host ran ahead of the device, and it
        tells neither what a step launches nor how long one takes."""
        return self.launched_share is None or self.launched_share >= WHOLE_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step asks of the machine in one class of operations, counted from shapes.

    Attributes:
        flops: Floating point operations of products and convolutions; other arithmetic is not counted.
        num_bytes: Bytes of the tensors that operations read and write, each time they do.
    """

    work: WorkClass
    count: int
    flops: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One step whose operations were counted as they were called, in the step before the trace.

    Attributes:
        work: By class.
        dtype: The type that most of the products are computed in, which is `tf32` for float32 where tensor
            cores take it; empty without any.
        lines: Calls that wait for a result of the device, or would with one: `blocked_ns` is the time of
            the call there.
        unknown: The first operation called that makes products and has no formula for them; empty without.
    """

    work: tuple[Work, ...]
    dtype: str = ""
    lines: tuple[Sync, ...] = ()
    unknown: str = ""

    @property
    def flops(self) -> int:
        """Floating point operations of the step's products and convolutions."""
        return sum(each.flops for each in self.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine reached when it was measured (`diagnose doctor --measure`).

    Attributes:
        device: As the driver names it.
        copy_bytes_per_s: Bytes read and written per second by a large copy.
        flops_per_s: Of a large matrix product, for the type of the run's products.
    """

    device: str
    copy_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepWindow:
    """A deep window of one rank.

    Attributes:
        rank: The rank.
        first_step: The first step recorded, from 0.
        num_steps: How many were.
        asked_by: `option`, `command`, or the names of the rules that were unsure.
        trace_file: Its name in the run's folder; empty where it was not kept.
        trace_bytes: Its size.
        cut: Whether its end is missing because it would have become too large.
        left_out: Steps that no figure of the run contains: those recorded, and those slowed down by
            starting, stopping and writing.
        start_ns: What starting the profiler took of the training thread.
        stop_ns: What stopping took.
        export_ns: What writing took, in a thread of its own.
        why_not_counted: Why `counted` is missing, in words.
        wall_ns: From the beginning of the first recorded step to the end of the last.
        usual_step_ns: Mean time of the run's other steps, which nothing slowed down; 0 where unknown.
        rates: Of the device, where they were measured.
    """

    rank: int
    first_step: int
    num_steps: int
    asked_by: str = ""
    trace_file: str = ""
    trace_bytes: int = 0
    cut: bool = False
    left_out: int = 0
    start_ns: int = 0
    stop_ns: int = 0
    export_ns: int = 0
    wall_ns: int = 0
    usual_step_ns: float = 0.0
    why_not_counted: str = ""
    counted: Counted | None = None
    trace: Trace = Trace()
    rates: Rates | None = None

    @property
    def step_ns(self) -> float:
        """How long a step takes: a usual one where known, else one that was recorded, which is slower."""
        return self.usual_step_ns or self.wall_ns / max(1, self.num_steps)

    @property
    def mfu(self) -> float | None:
        """The step's products per second, as a share of what the machine reached in one large product."""
        if self.counted is None or self.rates is None or not self.counted.flops or not self.step_ns:
            return None
        if not self.trace.is_whole:
            return None
        return self.counted.flops * 1e9 / self.step_ns / self.rates.flops_per_s
