"""What the training program is made of, as its live objects told: loaders, optimizers, models, settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diagnose.core.graph import Compiler, Dropped, Graph
from diagnose.core.parallel import Averaging, Ddp, Fsdp, Imbalance, Meetings, Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A `DataLoader` that fed the training loop.

    Attributes:
        num_workers: 0 when the training thread loads.
        batch_size: `None` for a loader that is given whole batches.
        pin_memory: Whether a thread copies batches to page-locked memory.
        persistent_workers: Whether the workers outlive an epoch.
        prefetch_factor: Batches that each worker prepares ahead; `None` without workers.
        dataset: Class of the dataset.
        iterable: Whether the dataset is a stream, all of which each worker reads unless it divides itself;
            `None` when unknown.
        on_device: Whether the dataset holds tensors on a device, which no worker process can use.
        moves_batches: Whether, without workers, its batches come on a device: what makes them moves them.
        dataset_length: Its samples, where it has a length.
        collate: Name of the function that makes a batch of samples.
        collate_file: Where the script has it written, absolute; empty where it is not the script's.
        collate_line: Its first line.
        sampler: Class of the sampler.
        epochs: Times the loop began to iterate over it, over the whole run.
        num_objects: Loaders that these were, all made by the same line; `None` when unknown.
        num_others: Loaders of the same line that have not fed training, or are of another dataset or with
            another number of workers than the first; `None` when unknown.
        construct_ns: Mean time that `iter(loader)` took: with workers, mostly their start.
        file: Where the loader was made, absolute; empty when unknown.
        line: Its line.
        call: Text of the call that made it, on one line, as the script has it; empty when it was not found.
    """

    num_workers: int
    batch_size: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    dataset: str = ""
    iterable: bool | None = None
    on_device: bool = False
    moves_batches: bool = False
    dataset_length: int | None = None
    collate: str = ""
    collate_file: str = ""
    collate_line: int = 0
    sampler: str = ""
    epochs: int = 0
    num_objects: int | None = None
    num_others: int | None = None
    construct_ns: float = 0.0
    file: str = ""
    line: int = 0
    call: str = ""

    @property
    def made_anew(self) -> bool:
        """Whether the script makes another loader for each epoch."""
        return self.num_objects is not None and self.num_objects >= self.epochs > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """A `DataLoader` whose workers are started to evaluate.

    Attributes:
        loader: It; its epochs are the beginnings for which workers were started.
        starts: Those of them within the measured steps.
        start_ns: What these took of each step, the mean of all steps: from `iter(loader)` to the first
            batch, but for the time that making this one takes a worker.
    """

    loader: Loader
    starts: int
    start_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer that stepped.

    Attributes:
        kind: Name of its class.
        num_tensors: Parameter tensors with a gradient.
        num_elements: Their elements.
        num_groups: Groups that they are in: each is updated by itself.
        fused: Whether the fused implementation was asked for; `None` is torch's default.
        implementation: What it runs as: `for-loop`, `foreach` or `fused`; empty where that is not known.
        can_fuse: Whether torch has a fused implementation of this class that can take these parameters.
        can_group: Likewise for `foreach`.
        param_bytes: Bytes of its parameters.
        state_bytes: Bytes of what it remembers between steps.
        host_state_bytes: Part of `state_bytes` in host memory although what is trained is on a device;
            `None` when unknown.
        zeroes_grads: Whether the loop writes zeros into the gradients instead of dropping them.
        file: Where it was made, absolute; empty when unknown.
        line: Its line.
        call: Text of the call that made it, on one line, as the script has it; empty when it was not found.
    """

    kind: str
    num_tensors: int
    num_elements: int
    num_groups: int = 1
    fused: bool | None = None
    implementation: str = ""
    can_fuse: bool = False
    can_group: bool = True
    param_bytes: int | None = None
    state_bytes: int | None = None
    host_state_bytes: int | None = None
    zeroes_grads: bool | None = None
    file: str = ""
    line: int = 0
    call: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A module that was called outermost in training and has parameters.

    Attributes:
        kind: Name of its class.
        device: Type of the device that its parameters are on.
        num_tensors: Its parameter tensors.
        param_bytes: Their bytes.
        dtypes: Bytes of the parameters, by type: `float32`.
        double_constants: Names of large float64 tensors that its modules hold besides parameters, each as
            its module calls it; none that a tensor of another type has as well.
        num_convolutions: Convolutions in it.
        loops_in_torch: Whether it has an `nn.RNN` or `nn.GRU`, which torch computes step by step on a CPU,
            and no cell, such as `nn.GRUCell`, over which the script loops itself.
        biased_before_norm: Names of convolutions with a bias directly before a batch normalization.
        channels_last: Whether the convolutions' weights are stored so.
        is_data_parallel: Whether it is a `torch.nn.DataParallel`.
        num_replicas: Devices that a `DataParallel` copies it to.
    """

    kind: str
    device: str = "cpu"
    num_tensors: int = 0
    param_bytes: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    double_constants: tuple[str, ...] = ()
    num_convolutions: int = 0
    loops_in_torch: bool = False
    biased_before_norm: tuple[str, ...] = ()
    channels_last: bool | None = None
    is_data_parallel: bool = False
    num_replicas: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What the calls of the models in a few steps were, looked at once. `None` was not seen.

    Attributes:
        num_steps: Steps that were looked at.
        repeated: Gradient-free calls per step of a model, or of a part of one, in training mode and with
            samples that it was trained on in the same step, in whatever tensors.
        judged: Likewise in evaluation mode, where not every step trains on these samples.
        repeated_before: Gradient-free calls per step with what the next call of the model is trained on,
            with the same weights.
        repeated_with_grad: Calls with gradients per step, in training mode, that were not the first with
            these samples.
        judged_with_grad: Likewise in evaluation mode, where not every step trains on these samples.
        repeated_share: Part of what is computed without gradients in a usual step that `repeated` and
            `judged` are, by sizes of models and inputs.
        before_share: Likewise, that `repeated_before` are.
        untrained: Gradient-free calls per step of models without a parameter of a trained one, such as a
            teacher.
        free: Gradient-free calls per step of the trained models, in training mode and with an input of
            their own.
        free_rows: The fewest samples that one of these was given: so many a policy acts for at once.
        padding_share: Part of the tokens given to the models that are padding.
        overlong_share: Part of the tokens that are padding past the longest row of their own batch.
        padded_tokens: Tokens of a model's input, padding included, where that is known.
        padded_beside: Whether these are of token ids beside what a model is given first.
        padded_masked: Whether only masks tell that these are padding.
        batch_size: Samples of a model's input.
        file: The line of a repeated call; empty when unknown.
        line: Its line.
    """

    num_steps: int
    repeated: float | None = None
    judged: float | None = None
    repeated_before: float | None = None
    repeated_with_grad: float | None = None
    judged_with_grad: float | None = None
    repeated_share: float | None = None
    before_share: float | None = None
    untrained: float | None = None
    free: float | None = None
    free_rows: int | None = None
    padding_share: float | None = None
    overlong_share: float | None = None
    padded_tokens: float | None = None
    padded_beside: bool | None = None
    padded_masked: bool | None = None
    batch_size: int | None = None
    file: str = ""
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the process holds in host memory. `None` was not measured.

    Attributes:
        rss_bytes: Resident memory at the end of the measured steps, without pages of mapped files.
        growth_bytes: By how much it grew from the first quarter of them to the last, where every quarter
            grew; else 0.
        growth_steps: The steps between the middles of these quarters.
        total_bytes: Memory that the process may use.
    """

    rss_bytes: int | None = None
    growth_bytes: int | None = None
    growth_steps: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is known of the program besides times. An empty tuple or `None` was not seen.

    Attributes:
        loaders: The one that fed most steps first.
        evaluating: Loaders whose workers are started to evaluate, the one first that this costs most.
        optimizers: In order of first step.
        models: In order of first call.
        ddp: One per rank that trains with it, in order of rank.
        fsdp: Of the first rank.
        averaging: Of the first rank.
        pipeline: Of the first rank, but for the waiting, which is of all.
        imbalance: Of all ranks together.
        meetings: Likewise; `None` where the ranks' waits for gradients were not measured in each step.
        gatherings: Likewise, of all that the ranks do together, other collectives included; `None` where
            that is not known to hold all that they wait for each other.
        collective_ns: Nanoseconds by which a step would be shorter without collectives of the script's own;
            where a rank also waits for a single other one (`RankProfile.exchanged_ns`), those in them of
            the rank that spends least in that step. `None` with one rank.
        collective_share: Part of the steps that have them; `None` likewise.
    """

    loaders: tuple[Loader, ...] = ()
    evaluating: tuple[Evaluating, ...] = ()
    optimizers: tuple[Optimizer, ...] = ()
    models: tuple[Model, ...] = ()
    calls: Calls | None = None
    graph: Graph | None = None
    dropped: Dropped | None = None
    compiler: Compiler | None = None
    memory: Memory = field(default_factory=Memory)
    ddp: tuple[Ddp, ...] = ()
    fsdp: Fsdp | None = None
    averaging: Averaging | None = None
    pipeline: Pipeline | None = None
    imbalance: Imbalance | None = None
    meetings: Meetings | None = None
    gatherings: Meetings | None = None
    collective_ns: float | None = None
    collective_share: float | None = None
