"""How the process was set up: threads, binding to CPUs, tracing, hooks on modules."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, replaced, spanned

BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")
MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
SPINS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""Variables of GNU's OpenMP, which torch's wheels bring, and what lets idle threads sleep at once."""
RECORDED = ("record_shapes", "with_stack", "profile_memory", "with_modules")
"""What torch's profiler can be asked to record besides; `with_flops` sets the first."""


class TorchSettingsHook(Hook):
    """Looks once, on the training thread after a few steps, at settings that decide the speed.

    A thread's number of intra-op threads and its trace function are its own, so another thread could not
    ask.
    """

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        import torch
        from torch.autograd import profiler

        recorded: list[str] = []
        num_threads = torch.get_num_threads()

        def starts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            recorded[:] = [name for name in RECORDED if getattr(args[0], name, False)]
            return -1

        def inspect() -> None:
            settings = settings_now(recorder)
            recorder.facts["settings"] = {
                **settings,
                "recorded": recorded,
                "sets_threads": settings["num_threads"] != num_threads,
            }

        with (
            replaced(profiler.profile, "_start_trace", lambda start: spanned(start, recorder, starts)),
            added(recorder.looks.inspections, inspect),
        ):
            yield


def settings_now(recorder: Recorder) -> dict[str, Any]:
    """Returns the calling thread's settings, as `core.settings.Settings` names them, and `num_threads`."""
    import torch

    omp = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    models = recorder.met.live_modules()
    modules = {id(module): module for model in models for module in model.modules()}.values()
    tracer = sys.gettrace() or sys.getprofile()
    return {
        "num_threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "omp_num_threads": int(omp) if omp.strip().isdigit() else 0,
        "bound_by": next((name for name in BINDING if os.environ.get(name)), ""),
        "sleeps_by": next(
            (f"{name}={value}" for name, value in SPINS.items() if _setting(name) == value), ""
        ),
        "local_processes": int(local) if local.isdigit() else 1,
        "start_method": multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0],
        "trace": _module_of(tracer),
        "trace_function": _function_of(tracer),
        "num_leaf_modules": sum(not module._modules for module in modules),
        "num_module_hooks": sum(
            len(vars(module).get(name) or ()) for module in modules for name in MODULE_HOOKS
        ),
    }


def _setting(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _module_of(tracer: Any) -> str:
    if tracer is None:
        return ""
    return getattr(tracer, "__module__", None) or type(tracer).__module__ or type(tracer).__name__


def _function_of(tracer: Any) -> str:
    """Returns the qualified name of a Python function that is called; empty for another."""
    code = getattr(getattr(tracer, "__func__", tracer), "__code__", None)
    if code is None:
        calls = (vars(kind)["__call__"] for kind in type(tracer).__mro__ if "__call__" in vars(kind))
        code = getattr(next(calls, None), "__code__", None)
    return str(getattr(code, "co_qualname", getattr(code, "co_name", "")))  # the former since Python 3.11
