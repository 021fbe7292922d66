"""Gives a live `DistributedDataParallel` another reducer: its settings count only for a fresh one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from diagnose.actions._memory import free_at_peak
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job

NEEDED = (
    "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer",
    "_ddp_init_helper",
    "_get_ddp_logging_data",
    "_has_rebuilt_buckets",
    "_remove_autograd_hooks",
    "_set_static_graph",
    "bucket_bytes_cap",
    "logger",
    "reducer",
)
"""Of DDP's own; all are in torch 2.6 to 2.13."""

SETTINGS = (
    "_bucket_config",
    "bucket_bytes_cap",
    "bucket_bytes_cap_default",
    "bucket_bytes_cap_list",
    "find_unused_parameters",
    "static_graph",
)
"""What a reducer is made from; not every torch has all of them."""

MIN_FREE = 1.5
"""Free memory of the device, in gradients: the new buckets are there before the old ones are gone."""

Reduce = Callable[[Any, Any], Any]
"""A communication hook: gets the process group and a bucket, returns a future of the averaged gradients."""

HOOKS = frozenset(path.stem.replace("_", "-") for path in Path(__file__).parent.glob("ddp_*_hook.py"))
"""The actions that give a reducer its one hook: no two at a time."""

TORCHS = "torch.distributed.algorithms.ddp_comm_hooks"
"""Where torch has hooks of its own."""

_reduce_of: WeakKeyDictionary[DistributedDataParallel, Reduce] = WeakKeyDictionary()
"""Hooks of ours. A reducer takes one for life, so that each fresh one is given it again."""


def wrapped(job: Job) -> list[DistributedDataParallel]:
    """Returns the models wrapped in DDP.

    Raises:
        CannotApply: If there is none, or one whose reducer cannot be replaced.
    """
    models = [model for model in job.models if isinstance(model, DistributedDataParallel)]
    if not models:
        raise CannotApply("no model of the loop is wrapped in DistributedDataParallel")
    for model in models:
        _refuse(job, model)
    return models


def in_float32(job: Job, copies: int = 0) -> list[DistributedDataParallel]:
    """Returns the models wrapped in DDP, whose gradients a hook of ours can send in another form.

    Args:
        copies: How many times the memory of the gradients the hook will take for itself.

    Raises:
        CannotApply: See `wrapped`; and if some gradients are sparse, or not of float32.
    """
    models = wrapped(job)
    for model in models:
        types = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
        if types != {torch.float32}:
            raise CannotApply(f"gradients are not all float32: {', '.join(sorted(map(str, types)))}")
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
                raise CannotApply(f"the gradient of {type(module).__name__} is sparse")
        _refuse_short_of(job, model, MIN_FREE + copies)
    return models


def _refuse(job: Job, model: DistributedDataParallel) -> None:
    for name in NEEDED:
        if not hasattr(model, name):
            raise CannotApply(f"this torch's DistributedDataParallel has no {name}")
    state = vars(model)
    if model not in _reduce_of and comm_hook(model):
        raise CannotApply(f"the script has its own communication hook ({comm_hook(model)})")
    if state.get("mixed_precision") is not None:
        raise CannotApply("DistributedDataParallel casts parameters itself (mixed_precision)")
    if state.get("_delay_all_reduce_params"):
        raise CannotApply("the script delays some reductions (delay_all_reduce_named_params)")
    if state.get("_use_python_reducer"):
        raise CannotApply("compiled autograd reduces the gradients")
    if model._join_config.enable:
        raise CannotApply("the script joins ranks that have different numbers of batches")
    if model._compiled_call_impl is not None:
        raise CannotApply("DistributedDataParallel itself is compiled")
    _refuse_short_of(job, model, MIN_FREE)


def _refuse_short_of(job: Job, model: DistributedDataParallel, gradients: float) -> None:
    """Raises `CannotApply` if less is free than so many times what all gradients take."""
    if model.device_type == "cuda":
        free = int(free_at_peak(job))
        needed = int(gradients * gradient_bytes(model))
        if free < needed:
            raise CannotApply(f"a fresh reducer needs {needed >> 20} MiB, and {free >> 20} MiB are free")


def comm_hook(model: DistributedDataParallel) -> str:
    """Returns the name of the communication hook in force; empty for torch's own all-reduce."""
    if model._comm_hooks:
        return str(getattr(model._comm_hooks[0][0], "__name__", "a hook"))
    return str(model._get_ddp_logging_data().get("comm_hook", ""))


def gradient_bytes(model: DistributedDataParallel) -> int:
    """Returns what all gradients take."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _settings(model: DistributedDataParallel) -> dict[str, Any]:
    return {name: vars(model)[name] for name in SETTINGS if name in vars(model)}


def settings_in_force(job: Job) -> list[dict[str, Any]]:
    """Returns what reducers are made from, for `Action.state`."""
    return [
        {**_settings(model), "comm_hook": comm_hook(model), "ours": _reduce_of.get(model)}
        for model in job.models
        if isinstance(model, DistributedDataParallel)
    ]


@contextmanager
def with_fresh_reducers(
    models: list[DistributedDataParallel],
    change: Callable[[DistributedDataParallel], None] = lambda model: None,
    reduce: Callable[[DistributedDataParallel], Reduce] | None = None,
) -> Iterator[None]:
    """Changes settings of models, and gives each a reducer made from them; on leaving, one as before.

    Args:
        models: As `wrapped` returned them.
        change: Sets some of `SETTINGS`.
        reduce: Makes the communication hook of a model; `None` keeps what is in force.
    """
    before = [(ref(model), _settings(model), _reduce_of.get(model)) for model in models]
    try:
        _renew_all(models, change, reduce)
        del models
        yield
    finally:
        for alive, settings, hook in before:
            model = alive()
            if model is None:
                continue
            vars(model).update(settings)
            _reduce_of.pop(model, None)
            if hook is not None:
                _reduce_of[model] = hook
            if distributed.is_initialized():  # else the script has done with training
                _renew(model)


def _renew_all(
    models: list[DistributedDataParallel],
    change: Callable[[DistributedDataParallel], None],
    reduce: Callable[[DistributedDataParallel], Reduce] | None,
) -> None:
    for model in models:
        change(model)
        if reduce is not None:
            _reduce_of[model] = reduce(model)
        _renew(model)


def _renew(model: DistributedDataParallel) -> None:
    """Replaces the reducer by one made from the settings; nothing is sent. Between two steps only."""
    static = model.static_graph
    model._remove_autograd_hooks()
    if model.gradient_as_bucket_view:
        for parameter in model.parameters():
            if parameter.grad is not None:  # it lies in a bucket of the old reducer
                parameter.grad = parameter.grad.clone()
    parameters, are_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, are_sparse, names, static)
    model._has_rebuilt_buckets = False
    if static:
        model.static_graph = False  # else it says that it is set already
        model._set_static_graph()
    reduce = _reduce_of.get(model)
    if reduce is not None:
        logger: Any = model.logger
        logger._set_comm_hook_name(reduce.__name__)
        torch._C._distributed_c10d._register_comm_hook(model.reducer, model.process_group, reduce)


class ReducerAction(Action):
    """An action that gives DDP fresh reducers, made from other settings."""

    order = 50
    settle_steps = 2
    hangs_on = ("models",)

    def change(self, model: DistributedDataParallel, prepared: Any) -> None:
        """Sets some of `SETTINGS`; `prepared` is as for `Action.apply`."""
        raise NotImplementedError

    def apply(self, job: Job, prepared: Any) -> AbstractContextManager[None]:
        return with_fresh_reducers(wrapped(job), lambda model: self.change(model, prepared))

    def state(self, job: Job) -> Any:
        return settings_in_force(job)


class GradientHook(ReducerAction):
    """An action whose reducers have a communication hook of ours.

    Attributes:
        copies: How many times the memory of the gradients the hook takes for itself.
        torchs: What gives a model torch's own hook of the kind, if there is one: arguments for
            `register_comm_hook`.
    """

    touches = "ranks"
    copies: ClassVar[int] = 0
    torchs: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.excludes = HOOKS - {cls.__module__.rpartition(".")[2].replace("_", "-")}

    def check(self, job: Job) -> None:
        in_float32(job, self.copies)

    def reduce(self, model: DistributedDataParallel, prepared: Any) -> Reduce:
        """Makes the communication hook of a model; `prepared` is as for `Action.apply`."""
        raise NotImplementedError

    def apply(self, job: Job, prepared: Any) -> AbstractContextManager[None]:
        return with_fresh_reducers(in_float32(job), reduce=lambda model: self.reduce(model, prepared))

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"advice": f"model.register_comm_hook({self.torchs})"} if self.torchs else {}
