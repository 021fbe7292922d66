"""How a training is divided among processes or devices, as its wrappers tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Ddp:
    """`DistributedDataParallel` on one rank: its settings, and its own timers' averages.

    Attributes:
        rank: Whose, by its number in the job.
        ranks: The job's ranks that its gradients are averaged over; empty where that is not known.
        world_size: Number of these ranks.
        backend: What carries the gradients: `nccl`, `gloo`.
        on_cuda: Whether the parameters are on CUDA devices.
        bucket_cap_bytes: Most that a bucket may hold.
        bucket_bytes: What each bucket holds, in the order in which they are reduced.
        param_bytes: Bytes of all gradients.
        find_unused_parameters: Whether each pass looks for parameters that got no gradient.
        has_unused: Whether it found any.
        static_graph: Whether the graph is promised to stay the same.
        gradient_as_bucket_view: Whether gradients live in the buckets.
        broadcasts_buffers: Whether each forward sends the buffers of rank 0 to all; `False` without any.
        compute_ns: Time of a backward pass until its last gradient was there: the median of DDP's samples.
        comm_ns: Time from the first bucket's all-reduce to the end of the last.
        overlap_ns: Part of `comm_ns` in which gradients were still computed.
        compute_ns_by_pass: `compute_ns` of each pass that DDP timed.
        exposed_ns_by_pass: Likewise, how long it waited for gradients when its own were all there.
        synced_share: Part of the backward passes looked at that reduced gradients.
        passes_per_step: Backward passes of a step.
        rounds_per_step: How often in a step optimizers step after a backward pass; `None` was not told.
        num_models: Models of the script that are wrapped in it.
        file: Where it was made; empty when unknown.
        line: Likewise.
        call: That call; of the first rank.
    """

    rank: int = 0
    ranks: tuple[int, ...] = ()
    world_size: int = 1
    backend: str = ""
    on_cuda: bool = False
    bucket_cap_bytes: int | None = None
    bucket_bytes: tuple[int, ...] = ()
    param_bytes: int | None = None
    find_unused_parameters: bool = False
    has_unused: bool | None = None
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcasts_buffers: bool = False
    compute_ns: float | None = None
    comm_ns: float | None = None
    overlap_ns: float | None = None
    compute_ns_by_pass: Mapping[int, float] = field(default_factory=dict)
    exposed_ns_by_pass: Mapping[int, float] = field(default_factory=dict)
    synced_share: float | None = None
    passes_per_step: float | None = None
    rounds_per_step: float | None = None
    num_models: int = 1
    file: str = ""
    line: int = 0
    call: str = ""

    @property
    def exposed_ns(self) -> float | None:
        """Time of a sampled backward pass that waited for gradients of other ranks; `None` if not known."""
        if self.comm_ns is None or self.overlap_ns is None:
            return None
        return max(0.0, self.comm_ns - self.overlap_ns)

    @property
    def synced_passes(self) -> float:
        """Backward passes of a step that reduce gradients; those under `no_sync` do not."""
        return (self.passes_per_step or 1.0) * (1.0 if self.synced_share is None else self.synced_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp:
    """Fully sharded data parallelism. What was not measured is `None`.

    Attributes:
        world_size: Number of ranks that share each parameter.
        reshards: Whether parameters are given up after the forward and gathered again for the backward.
        gather_ns: Nanoseconds per step that the step waited for parameters to be gathered. It is not known
            of GPUs: there the host only launches, half of it in a thread of autograd's.
        regather_ns: Part of `gather_ns` in the backward pass, for parameters that the forward had gathered.
        scatter_ns: Likewise, for gradients to be added up and scattered.
        unsharded_bytes: What the parameters would take on each rank if they stayed gathered.
    """

    world_size: int
    reshards: bool | None = None
    gather_ns: float | None = None
    regather_ns: float | None = None
    scatter_ns: float | None = None
    unsharded_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline of stages, as `torch.distributed.pipelining` runs it. What was not measured is `None`.

    Attributes:
        kind: Name of the schedule's class.
        num_stages: Number of stages.
        num_ranks: Ranks that share them; each has one stage or more.
        num_microbatches: Micro-batches that a batch is divided into.
        idle_ns: Nanoseconds per step that each rank waits for a neighbour at least; that of the rank that
            waits least, whose stages set the pace. It is not known of GPUs: there the host only launches.
        file: Where the schedule was made, absolute; empty when unknown.
        line: Its line.
        call: Text of the call that made it, on one line, as the script has it; empty when it was not found.
    """

    kind: str
    num_stages: int
    num_ranks: int
    num_microbatches: int
    idle_ns: float | None = None
    file: str = ""
    line: int = 0
    call: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """How unevenly the ranks' batches of the same step are filled.

    Attributes:
        unit: What is counted: `tokens` or `samples`.
        spread: Of a step, what the fullest rank has above the mean of all, on average over the steps.
        mean: What a rank has in a step, on average.
        forward_ns_per_unit: By how much a rank's forward pass takes longer for each one more, by a line
            through all ranks' steps.
        correlation: How well that line fits, 0 to 1.
        fullest: How often each rank was the fullest, by rank, as a part of the steps.
    """

    unit: str
    spread: float
    mean: float
    forward_ns_per_unit: float
    correlation: float
    fullest: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meetings:
    """How the ranks meet to average their gradients, by what each waits there when its own are ready.

    Whoever comes last waits for nobody: what it still waits is the communication itself. All others wait
    for it besides. Nothing here compares clocks of two machines.

    Attributes:
        num_steps: Steps that all ranks made and in which all of them met.
        wait_ns: Nanoseconds per step that each rank waits, by rank: the mean over the steps.
        common_ns: What even the rank that waits least does: the mean over the steps.
        calm_ns: Likewise, in the calmest quarter of the steps: on a busy machine the rest is its doing.
        last_share: Part of the steps in which each rank came last, by rank.
        held_ns: Nanoseconds per step by which a step would have been shorter if a rank had come with the
            last but one, by rank: the mean over the steps.
        lead_share: Part of ten equal stretches of the run in which each rank came last most often, by rank;
            empty where they would be short.
        chance_ns: Nanoseconds per step by which a rank would hold the others up by chance, were it as fast
            as they are: 0 where that was not measured.
    """

    num_steps: int
    wait_ns: Mapping[int, float] = field(default_factory=dict)
    common_ns: float = 0.0
    calm_ns: float = 0.0
    last_share: Mapping[int, float] = field(default_factory=dict)
    held_ns: Mapping[int, float] = field(default_factory=dict)
    lead_share: Mapping[int, float] = field(default_factory=dict)
    chance_ns: float = 0.0


MODEL_SHARE = 0.5
"""Part of what the optimizers update that a loop adds up at least if it averages its gradients itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """What a loop adds up over the ranks itself: between a backward pass and the optimizer's step, or
    inside of one of them, in a hook of each parameter or in a `step` of its own.

    Attributes:
        passes: Backward passes of a step that are followed by such sums.
        times: How many times in a step as much is added up as the optimizers' parameters have elements:
            from about 1 on it is their gradients.
        rounds: How often in a step an optimizer steps after a backward pass. Where two take turns, or a
            batch is trained on several times, each needs averages of its own.
        inside: Whether it is inside of passes or steps: then it is nothing but gradients.
    """

    passes: float
    times: float
    rounds: float = 1.0
    inside: bool = False

    @property
    def is_of_gradients(self) -> bool:
        """Whether it is as much as the gradients, some of which may be missing: what a script adds up for
        its log is far less."""
        return self.times >= MODEL_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a rank's clock is ahead of the first rank's.

    Attributes:
        at_ns: A time by the rank's own clock.
        offset_ns: How far it was ahead then.
        drift: Nanoseconds that it gains in each of its own.
    """

    at_ns: int
    offset_ns: float
    drift: float = 0.0

    def removed(self, time_ns: int) -> int:
        """Returns a time of the rank by the first rank's clock."""
        return time_ns - round(self.offset_ns + self.drift * (time_ns - self.at_ns))
