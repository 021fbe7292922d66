"""How a batch came to be: fetch, collate, and the workers that did it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from diagnose.core.input import InputStats, WorkerStats
from diagnose.core.profile import Profile
from diagnose.core.units import format_duration, format_share
from diagnose.report.base import Block, Fact, Facts, Section


class Input(Section):
    """Time per batch in the dataset and in collate, on the training thread or in worker processes."""

    order = 50
    title = "Loading a batch"

    def blocks(self, profile: Profile) -> Sequence[Block]:
        facts = [*on_training_thread(profile.input)]
        if profile.input.workers is not None:
            facts += in_workers(profile.input.workers)
        facts += at_epochs(profile)
        return [Facts(items=tuple(facts))] if facts else []


def on_training_thread(stats: InputStats) -> list[Fact]:
    """Returns what loading cost the training thread itself; nothing where it loaded no measured batch."""
    if not (stats.fetch_ns or stats.collate_ns):
        return []
    times = (("fetch", stats.fetch_ns), ("collate", stats.collate_ns))
    return [
        Fact(label=name, value=format_duration(time_ns), detail="per batch, on the training thread")
        for name, time_ns in times
        if time_ns is not None
    ]


def in_workers(workers: WorkerStats) -> list[Fact]:
    """Returns what the worker processes did."""
    made = "1 batch made" if workers.batches == 1 else f"{workers.batches:,} batches made"
    at_once = workers.at_once or workers.num_workers
    if at_once < workers.num_workers:
        made = f"started {times(math.ceil(workers.num_workers / at_once))}; {made}"
    facts = [
        Fact(label="workers", value=f"{at_once}", detail=made),
        Fact(label="fetch", value=format_duration(workers.fetch_ns), detail="per batch, in a worker"),
        Fact(label="collate", value=format_duration(workers.collate_ns), detail="per batch, in a worker"),
        Fact(label="send", value=format_duration(workers.send_ns), detail="CPU per batch: pickle, queue"),
        Fact(
            label="on a CPU",
            value=format_share(workers.cpu_share),
            detail="of fetch and collate; the rest waits for disk, network or a core",
        ),
        *delayed(workers),
        Fact(label="idle", value=format_share(workers.idle_share), detail="of the workers' life"),
    ]
    if workers.ready_batches is not None:
        ready = f"{workers.ready_batches:.1f}"
        facts.append(Fact(label="batches ready", value=ready, detail="on average, when the loop asked"))
    return facts


def delayed(workers: WorkerStats) -> list[Fact]:
    """Returns what kept the workers from being as fast as usual."""
    facts: list[Fact] = []
    if workers.delay_share is not None:
        value = format_share(workers.delay_share)
        facts.append(Fact(label="without a CPU", value=value, detail="of it, though ready to run"))
    if workers.median_ns is not None and workers.longest_ns is not None:
        detail = f"half of the batches are made in {format_duration(workers.median_ns)}"
        longest = format_duration(workers.longest_ns)
        facts.append(Fact(label="longest batch", value=longest, detail=detail))
    return facts


def times(count: int) -> str:
    """Returns `once`, `3 times`."""
    return "once" if count == 1 else f"{count:,} times"


def at_epochs(profile: Profile) -> list[Fact]:
    """Returns what the beginning of an epoch costs, if any began."""
    stats = profile.input
    if not stats.epoch_starts or not stats.epoch_start_ns:
        return []
    per_epoch = stats.epoch_start_ns * profile.steps.measured / stats.epoch_starts
    detail = f"beyond the usual wait, {times(stats.epoch_starts)}"
    return [Fact(label="epoch begins", value=format_duration(per_epoch), detail=detail)]
