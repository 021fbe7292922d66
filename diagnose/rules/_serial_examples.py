"""Profiles of loops whose training thread loads, to write the examples of rules with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diagnose.core.host import HostStats
from diagnose.core.input import InputStats, OwnLoading
from diagnose.core.profile import Profile
from diagnose.core.program import Loader, Program
from diagnose.core.units import NS_PER_MS
from diagnose.rules._examples import profile

ON_BOTH_CPUS = HostStats(cpus=2, process_cpus=1.3, on_cpu_share=0.98, runnable_share=0.01, num_threads=2)
"""A thread of torch's on each of two CPUs: a worker has none of its own."""

ON_ONE_CPU = replace(ON_BOTH_CPUS, process_cpus=0.98, num_threads=1)
"""One of two CPUs stands idle, and is a worker's."""


def loading(
    data_wait_ms: float,
    *,
    step_ms: float = 100,
    own: OwnLoading | None = None,
    stats: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    host: HostStats = ON_BOTH_CPUS,
) -> Profile:
    """Returns a profile of steps whose training thread loads batches of 32, on two CPUs.

    Args:
        data_wait_ms: What loading takes of each step; a twentieth of it is collating.
        step_ms: What a step takes.
        own: What it does meanwhile.
        stats: Further figures of `InputStats`.
        loader: Further facts of the loader.
        host: What the machine reads.
    """
    facts: dict[str, Any] = {"batch_size": 32, "epochs": 5, "file": "/home/me/train.py", "line": 31}
    shown: dict[str, Any] = {
        "fetch_ns": 0.95 * data_wait_ms * NS_PER_MS,
        "collate_ns": 0.05 * data_wait_ms * NS_PER_MS,
        "batches_per_step": 1.0,
        "steady_wait_ns": data_wait_ms * NS_PER_MS,
    }
    return profile(
        data_wait_ms=data_wait_ms,
        step_ms=step_ms,
        program=Program(loaders=(Loader(num_workers=0, **{**facts, **(loader or {})}),)),
        input=InputStats(own=own, **{**shown, **(stats or {})}),
        host=host,
    )


def pieces(**figures: Any) -> OwnLoading:
    """Returns what is done where each sample lies in sixteen small files, but for the figures given."""
    usual: dict[str, Any] = {"samples": 32.0, "reads": 1024.0, "read_bytes": 5e5, "reading_share": 0.85}
    return OwnLoading(**{**usual, **figures})


def prepared(**figures: Any) -> OwnLoading:
    """Returns what is done where samples are in memory and the same is made of them in each epoch, but for
    the figures given."""
    usual: dict[str, Any] = {"samples": 32.0, "reads": 0.0, "read_bytes": 0.0, "reading_share": 0.0}
    return OwnLoading(**{**usual, "repeated": 4, **figures})
