"""What the script's optimizers are, looked at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from diagnose.hooks._looks import added
from diagnose.hooks._made import UNKNOWN, remembered
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook


class OptimizerFactsHook(Hook):
    """Remembers where each optimizer is made, and reads its settings and sizes once, after some steps.

    Of an SGD with momentum it looks once, before its second step, whether all parameters were in the first.
    """

    requires = "torch.optim.optimizer"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch.optim.optimizer import Optimizer

        looked_at: WeakSet[Any] = WeakSet()

        def made() -> None:
            recorder.met.optimizers_made = True

        def steps(optimizer: Any) -> None:
            from diagnose.hooks._fusing import momenta

            if optimizer in looked_at:
                return
            has = momenta(optimizer)
            if has and not any(has):
                return  # it has not stepped yet
            looked_at.add(optimizer)
            if not all(has):
                recorder.facts["late_momenta"] = True

        def inspect() -> None:
            facts: list[dict[str, Any]] = []
            models = recorder.met.live_modules()
            for optimizer in recorder.met.live_optimizers():
                file, line = places.get(optimizer, UNKNOWN)
                facts.append({**describe(optimizer, models), "file": file, "line": line})
            recorder.facts["optimizers"] = facts

        looks = recorder.looks
        with (
            remembered(Optimizer, recorder, made) as places,
            added(looks.inspections, inspect),
            added(looks.on_step, steps),
        ):
            yield


def describe(optimizer: Any, models: Sequence[Any] = ()) -> dict[str, Any]:
    """Returns the facts of `core.program.Optimizer`, but for where it was made.

    Args:
        optimizer: The optimizer.
        models: What it trains.
    """
    import torch

    from diagnose.hooks._fusing import why_not_fused

    group = optimizer.param_groups[0]
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    state = [
        (param, value)
        for param, entry in optimizer.state.items()
        if isinstance(entry, dict)
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]
    return {
        "kind": type(optimizer).__name__,
        "num_tensors": len(params),
        "num_elements": sum(p.numel() for p in params),
        "num_groups": sum(any(p.requires_grad for p in each["params"]) for each in optimizer.param_groups),
        "fused": group.get("fused"),
        "implementation": _implementation(group, params),
        "can_fuse": not why_not_fused(optimizer, models),
        "can_group": _can_group(optimizer, models),
        "param_bytes": sum(p.numel() * p.element_size() for p in params),
        "state_bytes": _bytes(value for _, value in state),
        "host_state_bytes": _host_state_bytes(state, params, models),
    }


def _host_state_bytes(
    state: Sequence[tuple[Any, Any]], params: Sequence[Any], models: Sequence[Any]
) -> int:
    """What lies in host memory although a device computes, but for what the models keep there themselves:
    an optimizer may also update copies of their parameters."""
    trained = [param for model in models for param in model.parameters()]
    if all(param.device.type == "cpu" for param in (*params, *trained)):
        return 0
    kept_there = {id(param) for param in trained if param.device.type == "cpu"}
    return _bytes(
        value for param, value in state if value.device.type == "cpu" and id(param) not in kept_there
    )


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _implementation(group: dict[str, Any], params: list[Any]) -> str:
    """What torch chooses where the script does not."""
    if "foreach" not in group:
        return ""
    if group.get("fused"):
        return "fused"
    if group["foreach"] is None:
        from torch.optim.optimizer import _default_to_fused_or_foreach

        differentiable = bool(group.get("differentiable"))
        foreach = _default_to_fused_or_foreach(params, differentiable, use_fused=False)[1]
    else:
        foreach = group["foreach"]
    return "foreach" if foreach else "for-loop"


def _can_group(optimizer: Any, models: Sequence[Any]) -> bool:
    from diagnose.hooks._fusing import why_sparse

    kind, group = type(optimizer), optimizer.param_groups[0]
    ours = kind.__module__.startswith("torch.optim") and "foreach" in group
    return ours and not group.get("differentiable") and not why_sparse(optimizer, models)
