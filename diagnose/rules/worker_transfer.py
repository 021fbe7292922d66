"""Handing batches over from workers takes longer than making them"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.input import WorkerStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._lines import at
from diagnose.rules._loader_calls import with_loader_arguments
from diagnose.rules._supply import (
    DRAWN,
    HANDOVER_NS,
    MIN_HANDOVERS,
    MIN_SHARE,
    Supply,
    supply_of,
)
from diagnose.rules._worker_examples import WELL_FED, fed_by
from diagnose.rules._worker_rule import WorkerRule

SENDING = 0.35
"""Part of a worker's time for a batch that goes into sending it; a batch of a few tensors takes a
hundredth."""

MIN_SEND_NS = 2_000_000
"""Sending one batch of a few tensors takes less, on most machines."""

MANY = 64
"""A batch of so many objects takes long to unpack, however long it took to make."""

FEW = 16
"""A batch of no more objects leaves little to stack: sending two tensors takes 2 ms on a slow machine."""

MIN_LARGE_SEND_NS = 10_000_000
"""A few pieces take so long only where copying them into shared memory does."""

MIN_PIPED_BYTES = 500_000
"""Bytes of arrays and texts from which on a batch takes longer than one of tensors to be taken over: 1 MB
took 7.6 ms for 2.3, 4 MB 16 for 3.3, a quarter of one less than tensors (`benchmarks/piped_batches.py`)."""

READY = 1.0
"""Finished batches waiting, on average: the loop then waits for nothing but the unpacking of one."""

EVENLY = 0.5
"""Part of the wait that may come in single long waits; unpacking takes about the same in each step."""

NEEDLESS = 0.5
"""Batches that are made in this part of the wait or less would come faster from the training thread
itself."""

QUIET = 0.05
"""Part of the time that the training thread may want a CPU and have none: with more, that is what takes
long. At a tenth two healthy jobs were accused. Where the loop is seen to use a CPU meanwhile it unpacks."""


PIECES = {"ready_batches": 2.6, "pieces": 180}
ARRAYS = {"ready_batches": 2.6, "pieces": 29, "piped_bytes": 2_400_000}
ASKS = at("batch = next(batches)", 0.2, phase=Phase.DATA_WAIT)
BUSY = HostStats(cpus=2, process_cpus=1.0, runnable_share=0.07)


class _Slow(Enum):
    """What takes long where a batch is handed over."""

    PIPED = "arrays and texts come through a pipe"
    NEEDLESS = "taking a batch over takes longer than making it"
    UNPACKED = "the loop unpacks it"
    PACKED = "the workers pack it"


FEWER = "Let collate_fn return a few large tensors instead of many small ones or Python objects."
FIXES = {
    _Slow.PIPED: "Return tensors, torch.from_numpy(array): those are in memory that workers share with the"
    " loop, and arrays go through a pipe. Leave out what the loop does not use.",
    _Slow.NEEDLESS: "Let the training thread load: it makes a batch faster than it takes one over.",
}


class WorkerTransfer(WorkerRule):
    """
    ## What it means
    Batches are made fast enough, but the loop waits while each is pickled, sent and unpacked. Every
    tensor of a batch is sent by itself, through a file descriptor and shared memory of its own, so
    batches of hundreds of small tensors, or of many Python objects, take far longer than their bytes. And
    arrays of NumPy, texts and bytes go through a pipe, which takes what the loop reads meanwhile.

    ## What to do
    Return a few contiguous tensors: stack the fields of a sample into one tensor in `collate_fn`, use
    arrays instead of lists and dictionaries of numbers, and split them up in the training step. Make
    large arrays tensors with `torch.from_numpy`; leave out what the loop does not use.

    ## When it is wrong
    Batches of hundreds of megabytes: there, copying is the cost, and the fault is their size.
    """

    needs = ("input.workers.ready_batches", "input.steady_wait_ns")
    explains = (
        "bursty-prefetch",
        "gc-pauses",
        "slow-pinning",
        "slow-storage",
        "slow-transform",
        "too-few-workers",
    )
    fires_on = (
        fed_by(data_wait_ms=30, fetch_ms=20, send_ms=60, workers={"ready_batches": 2.6, "pieces": 400}),
        fed_by(data_wait_ms=30, fetch_ms=60, send_ms=120, workers={"ready_batches": 0.2}),
        fed_by(data_wait_ms=8, fetch_ms=1, send_ms=1, workers={"ready_batches": 3.8}),
        fed_by(data_wait_ms=6, fetch_ms=30, send_ms=12, workers=PIECES),
        fed_by(data_wait_ms=9, fetch_ms=12, send_ms=5, workers=ARRAYS),
        fed_by(
            data_wait_ms=20,
            fetch_ms=30,
            send_ms=6,
            workers={"ready_batches": 1.9, "pieces": 34},
            host=BUSY,
            where=(replace(ASKS, off_cpu=0.55),),
        ),
        fed_by(
            data_wait_ms=10,
            gc_ms=14,
            fetch_ms=20,
            send_ms=60,
            workers={"ready_batches": 2.6, "pieces": 400},
            stats={"collected_share": 0.9},
        ),
    )
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=30, fetch_ms=190, send_ms=1),
        fed_by(data_wait_ms=8, fetch_ms=1, workers={"ready_batches": 3.8}, host=BUSY),
        fed_by(data_wait_ms=2, fetch_ms=20, send_ms=30, workers={"ready_batches": 2.6}),
        fed_by(data_wait_ms=6, fetch_ms=5, send_ms=5, workers={"ready_batches": 3.9, "pieces": 3}),
        fed_by(data_wait_ms=6, fetch_ms=30, send_ms=12, workers={"ready_batches": 2.6, "pieces": 40}),
        fed_by(data_wait_ms=6, fetch_ms=30, send_ms=12, workers={"ready_batches": 0.6, "pieces": 180}),
        fed_by(data_wait_ms=6, fetch_ms=30, send_ms=1, workers=PIECES),
        fed_by(data_wait_ms=6, fetch_ms=30, send_ms=12, workers=PIECES, stats={"burst_ns": 4e6}),
        fed_by(data_wait_ms=6, fetch_ms=30, send_ms=12, workers=PIECES, host=BUSY),
        fed_by(data_wait_ms=9, fetch_ms=12, send_ms=5, workers={**ARRAYS, "piped_bytes": 9_000}),
        fed_by(data_wait_ms=9, fetch_ms=12, send_ms=5, workers={**ARRAYS, "ready_batches": 0.3}),
        fed_by(data_wait_ms=9, fetch_ms=12, send_ms=5, workers=ARRAYS, host=BUSY),
        fed_by(data_wait_ms=20, fetch_ms=1, workers={"ready_batches": 3.8}, stats={"drawing_ns": 19e6}),
        fed_by(
            data_wait_ms=20,
            fetch_ms=30,
            send_ms=6,
            workers={"ready_batches": 1.9, "pieces": 34},
            host=BUSY,
            where=(replace(ASKS, off_cpu=0.9),),
        ),
    )

    def check(self, profile: Profile) -> Finding | None:
        supply = supply_of(profile)
        if supply is None or supply.wait_share < MIN_SHARE:
            return None
        drawing_ns = profile.input.drawing_ns or 0.0  # of that wait, and no batch is handed over meanwhile
        if drawing_ns > DRAWN * supply.wait_ns:
            return None
        taken_ns = supply.wait_ns - drawing_ns
        slow = _slow(profile, supply, taken_ns)
        if slow is None:
            return None
        lost_ns, workers = _lost_ns(slow, supply, taken_ns), supply.workers
        collected_ns = 0.0
        if slow is not _Slow.PACKED and not _is_few(workers):  # objects that the collector runs for
            collected_ns = (profile.input.collected_share or 0.0) * profile.spent_ns(Phase.GC)
        total_ns = lost_ns + collected_ns
        if total_ns < MIN_SHARE * profile.step_time_ns:
            return None
        evidence = [
            f"A worker spends {format_ms(workers.send_ns)} of CPU time to send a batch"
            f"{f' of {workers.pieces} objects' if workers.pieces else ''} and"
            f" {format_ms(workers.fetch_ns + workers.collate_ns)} to make it.",
            f"The loop waits {format_ms(supply.wait_ns)} of each step, with"
            f" {workers.ready_batches:.1f} finished batches waiting on average.",
        ]
        if slow is _Slow.PIPED:
            evidence.append(f"{format_bytes(workers.piped_bytes or 0)} are arrays and texts.")
        if collected_ns:
            evidence.append(f"The garbage collector stops it there for {format_ms(collected_ns)} more.")
        where = "the workers pack them" if slow is _Slow.PACKED else "the training thread unpacks them"
        return Finding(
            rule=self.name,
            summary=f"Handing batches over costs {format_share(total_ns / profile.step_time_ns)} of each"
            f" step: the loop waits while {where}.",
            lost_ns={Phase.DATA_WAIT: lost_ns, Phase.GC: collected_ns},
            low_ns=0.5 * total_ns,
            high_ns=supply.wait_ns + collected_ns,
            assumption="a batch of a few tensors is handed over in no time",
            evidence=tuple(evidence),
            fix=FIXES.get(slow, FEWER),
            code=with_loader_arguments(
                profile, supply.loader, num_workers=0, persistent_workers=None, prefetch_factor=None
            )
            if slow is _Slow.NEEDLESS
            else "",
            file=supply.loader.file,
            line=supply.loader.line,
        )


def _slow(profile: Profile, supply: Supply, taken_ns: float) -> _Slow | None:
    """Returns what of handing a batch over takes long, if that does.

    Args:
        taken_ns: What a step waits for batches, less what drawing them takes.
    """
    workers = supply.workers
    if workers.ready_batches is None:
        return None
    making_ns = (workers.fetch_ns + workers.collate_ns) * supply.batches
    sending = workers.send_ns / max(1.0, workers.fetch_ns + workers.collate_ns + workers.send_ns)
    evenly = (profile.input.burst_ns or 0.0) < EVENLY * supply.wait_ns
    quiet = (profile.host.runnable_share or 0.0) < QUIET
    unpacking = workers.ready_batches >= READY and evenly
    computing = unpacking and _on_cpu_share(profile) >= MIN_SHARE
    if unpacking and (quiet or computing) and (workers.piped_bytes or 0) >= MIN_PIPED_BYTES:
        return _Slow.PIPED
    if computing and not quiet and workers.pieces is not None and not _is_few(workers):
        return _Slow.UNPACKED
    if unpacking and quiet and making_ns <= NEEDLESS * taken_ns:
        return _Slow.NEEDLESS
    # What workers take besides says nothing of this: finished batches wait for the loop.
    many = workers.pieces is not None and workers.pieces >= MANY
    long = unpacking and many and quiet and taken_ns >= MIN_HANDOVERS * HANDOVER_NS * supply.batches
    if workers.send_ns < (MIN_LARGE_SEND_NS if _is_few(workers) else MIN_SEND_NS):
        return None
    if not (long or sending >= SENDING):
        return None
    return _Slow.UNPACKED if unpacking else _Slow.PACKED


def _on_cpu_share(profile: Profile) -> float:
    """Returns the part of the step in which the line that asks for batches uses a CPU: where they are
    finished it unpacks them, whoever else wants the CPUs."""
    asking = max(
        (line for line in profile.where if line.phase is Phase.DATA_WAIT and not line.in_worker),
        key=lambda line: line.share,
        default=None,
    )
    if asking is None or asking.off_cpu is None:
        return 0.0
    return asking.share * (1 - asking.off_cpu)


def _lost_ns(slow: _Slow, supply: Supply, taken_ns: float) -> float:
    workers = supply.workers
    match slow:
        case _Slow.PIPED:
            return max(0.0, taken_ns - HANDOVER_NS * supply.batches)
        case _Slow.NEEDLESS:
            return taken_ns - (workers.fetch_ns + workers.collate_ns) * supply.batches
        case _Slow.UNPACKED:
            return taken_ns
        case _Slow.PACKED:
            return supply.won_ns(busy_ns=supply.busy_ns - workers.send_ns * supply.batches)


def _is_few(workers: WorkerStats) -> bool:
    return workers.pieces is not None and workers.pieces <= FEW
