"""Profiles of loops that workers feed, to write the examples of rules with."""

from __future__ import annotations

from typing import Any

from diagnose.core.host import HostStats
from diagnose.core.input import InputStats, WorkerStats
from diagnose.core.profile import Profile
from diagnose.core.program import Loader, Program
from diagnose.core.units import NS_PER_MS
from diagnose.rules._examples import profile

CALL = "DataLoader(train_set, batch_size=32, shuffle=True, num_workers=2)"


def fed_by(
    *,
    data_wait_ms: float,
    fetch_ms: float = 0.0,
    collate_ms: float = 0.0,
    send_ms: float = 0.1,
    num_workers: int = 2,
    cpus: int = 8,
    loader: dict[str, Any] | None = None,
    workers: dict[str, Any] | None = None,
    stats: dict[str, Any] | None = None,
    **parts: Any,
) -> Profile:
    """Returns a profile of steps of 100 ms that are fed by workers.

    Args:
        data_wait_ms: Wait of each step, evenly.
        fetch_ms: Worker's time per batch, and likewise `collate_ms` and `send_ms`.
        num_workers: Workers of the one loader.
        cpus: CPUs of the machine.
        loader: Further facts of the loader.
        workers: Further figures of the workers.
        stats: Further figures of `InputStats`.
        parts: As for `profile`.
    """
    figures: dict[str, Any] = {
        "num_workers": num_workers,
        "batches": 500,
        "fetch_ns": fetch_ms * NS_PER_MS,
        "collate_ns": collate_ms * NS_PER_MS,
        "send_ns": send_ms * NS_PER_MS,
        "cpu_share": 0.95,
        "delay_share": 0.02,
        "idle_share": 0.05,
        "ready_batches": 0.1,
        "median_ns": (fetch_ms + collate_ms) * NS_PER_MS,
        "tail_share": 0.0,
        "tail_batches": 0.0,
        "busiest": 1.0,
    }
    facts: dict[str, Any] = {
        "batch_size": 32,
        "prefetch_factor": 2,
        "persistent_workers": True,
        "epochs": 5,
        "file": "/home/me/train.py",
        "line": 31,
        "call": CALL,
    }
    shown: dict[str, Any] = {
        "batches_per_step": 1.0,
        "steady_wait_ns": data_wait_ms * NS_PER_MS,
        "burst_ns": 0.0,
        "burst_share": 0.0,
        "early_wait_ns": data_wait_ms * NS_PER_MS,
        "late_wait_ns": data_wait_ms * NS_PER_MS,
    }
    return profile(
        data_wait_ms=data_wait_ms,
        program=Program(loaders=(Loader(num_workers=num_workers, **{**facts, **(loader or {})}),)),
        input=InputStats(
            workers=WorkerStats(**{**figures, **(workers or {})}), **{**shown, **(stats or {})}
        ),
        **{"host": HostStats(cpus=cpus, process_cpus=1.0), **parts},
    )


CROWDED: dict[str, Any] = {
    "cpus": 2,
    "host": HostStats(cpus=2, process_cpus=0.75, runnable_share=0.15),
    "workers": {"cpu_share": 0.9, "delay_share": 0.25, "ready_batches": 2.5},
}
"""Two workers that keep up, on two CPUs; with 110 ms for a batch they and the model want both always."""


def crowded_by(**workers: Any) -> dict[str, Any]:
    """Returns the same, with more known of the workers."""
    return {**CROWDED, "workers": {**CROWDED["workers"], **workers}}


BESIDE_A_TEAM: dict[str, Any] = {
    "cpus": 2,
    "num_workers": 1,
    "host": HostStats(
        cpus=2, process_cpus=1.6, num_threads=2, runnable_share=0.14, native_delay_share=0.23
    ),
    "workers": {"cpu_share": 0.67, "delay_share": 0.3, "ready_batches": 1.8},
}
"""A worker that keeps up beside two threads of torch's on two CPUs: the one that has none holds up the
other, which meanwhile spins. Measured; steps of 100 ms, of which 35 ms are the worker's."""

CROWDING_A_TEAM: dict[str, Any] = {
    "cpus": 2,
    "host": HostStats(
        cpus=2, process_cpus=1.46, num_threads=2, runnable_share=0.25, native_delay_share=0.29
    ),
    "workers": {"cpu_share": 0.6, "delay_share": 0.39, "ready_batches": 3.5, "idle_share": 0.7},
}
"""Workers that keep up beside such threads, which spin for lack of a CPU and seem to use more than the
workers. Measured, with two workers; steps of 100 ms, of which 52 ms are the workers' CPU time at 87 ms for
a batch: without them a step took 58."""

A_CPU_IDLE: dict[str, Any] = {"num_workers": 1, "cpus": 2, "host": HostStats(cpus=2, process_cpus=0.5)}
"""One worker on two CPUs that takes 100 ms for a batch, beside a loop that computes for half of the time
and waits for the other: a second worker wins half of the wait."""

EPOCHS = {"epoch_starts": 20, "epoch_start_ns": 10e6, "steady_wait_ns": 2e6}
"""Of steps of 100 ms: what twenty beginnings of epochs cost, divided among all of them."""

WELL_FED = fed_by(data_wait_ms=0.3, fetch_ms=90, workers={"ready_batches": 3.4, "idle_share": 0.5})
"""Two workers that keep up."""
