"""The settings of `DistributedDataParallel`, and what its own timers say."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._looks import added
from diagnose.hooks._made import UNKNOWN, remembered
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook
from diagnose.hooks.ddp_waits import averages

TIMES = {
    "backward_compute_time": "compute_ns",
    "backward_comm_time": "comm_ns",
    "backward_compute_comm_overlap_time": "overlap_ns",
}


MAX_TIMED = 50
"""Timed passes kept: the last ones."""


class DdpFactsHook(Hook):
    """Remembers where DDP is made, and reads what it logs of itself, with some of the backward passes,
    before they run.

    DDP times each of the first ten backward passes and every hundredth; nothing is added to it, no
    communication hook above all, which would change what is computed.

    A model may be part of the module that the loop calls. If it has averaged nothing so far, it was made
    for something else than training.

    What tuning makes of a model is none of the script's: with another reducer it is looked at no more.
    """

    requires = "torch.nn.parallel.distributed"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch.nn.parallel import DistributedDataParallel

        # Of each model and of its first reducer, which its logger stands for, weak references; then by
        # iteration what that one timed: those of `TIMES`.
        wrapped: list[tuple[Any, Any, dict[int, tuple[int, ...]]]] = []
        synced: list[bool] = []

        def look() -> None:
            called = [m for m in recorder.met.live_modules() if isinstance(m, DistributedDataParallel)]
            trained = [(*each, describe(each[0])) for each in own_models()]
            trained = [each for each in trained if each[0] in called or each[2]["times"]["iteration"]]
            for model, timed, facts in trained:
                synced.append(averages(model))
                file, line = places.get(model, UNKNOWN)
                facts.update(file=file, line=line)
                facts["synced_share"] = sum(synced) / len(synced)
                facts["rounds_per_step"] = recorder.rounds / max(1, recorder.steps)
                facts["num_models"] = max(len(called), len(trained))
                data = facts.pop("times")
                timed[data.pop("iteration")] = tuple(data[name] for name in TIMES.values())
                while len(timed) > MAX_TIMED:
                    del timed[min(timed)]
                facts["timed"] = [[iteration, *times] for iteration, times in timed.items()]
                recorder.facts["ddp"] = facts

        def own_models() -> Iterator[tuple[Any, dict[int, tuple[int, ...]]]]:
            for reference, logger, timed in wrapped:
                model = reference()
                if model is not None and model.logger is logger():
                    yield model, timed

        def on_backward(args: tuple[Any, ...]) -> None:
            if not wrapped:
                find()
            look()

        def find() -> None:
            called = recorder.met.live_modules()
            inner = [model for model in places if all(model is not each for each in called)]
            for model in (*inner, *called):
                if isinstance(model, DistributedDataParallel) and model.logger is not None:
                    wrapped.append((weakref.ref(model), weakref.ref(model.logger), {}))

        try:
            with (
                remembered(DistributedDataParallel, recorder) as places,
                added(recorder.looks.on_backward, on_backward),
            ):
                yield
        finally:
            wrapped.clear()


def describe(model: Any) -> dict[str, Any]:
    """Returns the facts of `core.parallel.Ddp`, and its timers' last readings under `times`."""
    from torch.distributed import get_process_group_ranks

    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    unused = data.get("unused_parameter_size")
    return {
        "ranks": get_process_group_ranks(model.process_group),
        "world_size": data.get("world_size", 1),
        "backend": data.get("backend_name", ""),
        "on_cuda": model.device_type == "cuda",
        "bucket_cap_bytes": data.get("bucket_cap_bytes"),
        "bucket_bytes": [int(size) for size in sizes.split(",") if size.strip()],
        "param_bytes": data.get("total_parameter_size_bytes"),
        "find_unused_parameters": bool(model.find_unused_parameters),
        "has_unused": bool(unused) if unused is not None else None,
        "static_graph": bool(model.static_graph),
        "gradient_as_bucket_view": bool(model.gradient_as_bucket_view),
        "broadcasts_buffers": bool(
            model.broadcast_buffers and next(model.module.buffers(), None) is not None
        ),
        "times": {
            "iteration": data.get("iteration", 0),
            **{ours: data.get(theirs, 0) for theirs, ours in TIMES.items()},
        },
    }
