"""The training thread loads its own batches"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Loader, Program
from diagnose.core.units import format_ms, format_share, format_speedup
from diagnose.rules._examples import profile
from diagnose.rules._machine import disk, waits_for_disk
from diagnose.rules._supply import (
    DIVIDE,
    HANDOVER_NS,
    HEADROOM,
    KEEP_ITERATOR,
    MIN_HANDOVERS,
    begins_anew,
    computing_ns,
    main_loader,
    with_loader_arguments,
)
from diagnose.rules.base import Rule

MIN_SHARE = 0.04
"""Of the step; less is not worth worker processes. So much is expected of them at least where no CPU seems
to be free: threads that spin look like work, and only a trial tells."""

LEAST, MOST = 0.8, 1.15
"""Workers never hide all of it, and what loads between two steps also empties the caches that they use."""

BLOCKED = 0.7
"""The loop stands off the CPU for this part of its loading or more: it waits for a disk or a network."""

COMPUTING = 0.3
"""And for less than this: it computes."""

WAITING_PER_CPU = 4
"""Workers that wait take turns on a CPU; more of them are processes and memory for little."""

MOVE_LATER = (
    "Let collate_fn and the dataset leave their tensors on the CPU, move each batch in the loop, and give"
    " the DataLoader workers: no worker process can use a device"
)
MAIN_GUARD = (
    "Workers are started anew here, not forked: first put what trains under `if __name__ == '__main__':`."
)
WHOLE_BATCHES = (
    "Index whole batches of the tensors instead of single samples: they are on a device, which no worker"
    " process can use"
)
KEEP = (
    f"{KEEP_ITERATOR}. Now each step begins an epoch, and workers would be started or filled anew for each:"
    " they help only then"
)

ONE_WORKER = Program(loaders=(Loader(num_workers=1, batch_size=32),))
QUOTA_OF_ONE = HostStats(cpus=64, quota_cpus=1.0, process_cpus=1.0)
NO_WORKER = Program(loaders=(Loader(num_workers=0, batch_size=32, file="/home/me/train.py", line=31),))
STREAM = Program(loaders=(replace(NO_WORKER.loaders[0], iterable=True),))
MOVED = Program(loaders=(replace(NO_WORKER.loaders[0], moves_batches=True),))
ON_DEVICE = Program(loaders=(replace(NO_WORKER.loaders[0], on_device=True),))


class SerialLoading(Rule):
    """
    ## What it means
    The loader has no workers, so the loop stands still while the training thread itself fetches, decodes
    and collates each batch. The evidence says whether it computes meanwhile or waits for a disk.

    ## What to do
    Give the loader workers: they prepare the next batches while the model computes on this one. Where
    collating takes most of the time the fault is `slow-collate`.

    ## When it is wrong
    Loading that must run in the main process, a stream that cannot be divided, loading that takes little
    longer than to take a batch over from a worker (a millisecond: for tables in memory, index whole
    batches instead), or a machine without a CPU to spare: workers then compete with the model, and the
    lower bound says what is left to win.
    """

    needs = ("input.steady_wait_ns",)
    actions = ("loader-workers", "fork-continuation", "dataset-cache", "loader-workers-reseeded")
    fires_on = (
        profile(
            data_wait_ms=40,
            program=NO_WORKER,
            input=InputStats(fetch_ns=38e6, collate_ns=2e6, steady_wait_ns=40e6),
            host=HostStats(cpus=8, process_cpus=1.0, on_cpu_share=0.98, runnable_share=0.01),
        ),
        profile(
            data_wait_ms=5,
            program=NO_WORKER,
            input=InputStats(fetch_ns=4e6, collate_ns=1e6, steady_wait_ns=5e6),
        ),
        profile(data_wait_ms=40, program=STREAM, input=InputStats(steady_wait_ns=40e6)),
        profile(data_wait_ms=40, program=ON_DEVICE, input=InputStats(steady_wait_ns=40e6)),
        profile(data_wait_ms=40, program=MOVED, input=InputStats(steady_wait_ns=40e6)),
        profile(
            data_wait_ms=60, program=NO_WORKER, input=InputStats(steady_wait_ns=60e6), host=QUOTA_OF_ONE
        ),
    )
    silent_on = (
        profile(step_ms=5, data_wait_ms=1.2, program=NO_WORKER, input=InputStats(steady_wait_ns=1.2e6)),
        profile(data_wait_ms=3, program=NO_WORKER, input=InputStats(fetch_ns=2e6, steady_wait_ns=3e6)),
        profile(data_wait_ms=40, program=ONE_WORKER, input=InputStats(steady_wait_ns=40e6)),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        loader = main_loader(profile)
        return loader is not None and not loader.num_workers

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        loader, wait_ns = main_loader(profile), profile.input.steady_wait_ns
        step_ns = profile.step_time_ns
        assert loader is not None and wait_ns is not None
        other_ns = (1 - profile.input.main_wait_share) * wait_ns  # for loaders that have workers
        wait_ns = min(wait_ns - other_ns, profile.spent_ns(Phase.DATA_WAIT))
        handover_ns = HANDOVER_NS * (profile.input.batches_per_step or 1.0)
        loading_ns = wait_ns - handover_ns
        if loading_ns < MIN_SHARE * step_ns or wait_ns < MIN_HANDOVERS * handover_ns:
            return None
        compute_ns = computing_ns(profile) + other_ns
        training_ns = compute_ns + wait_ns
        workers = _workers_for(profile, wait_ns, compute_ns)
        host, cpus = profile.host, profile.own_cpus
        # The CPUs bound what workers win: all that the process computes now has to be done then too.
        least_ns = (host.process_cpus or 0.0) * training_ns / (cpus or 1)
        won_ns, by_one_ns = (
            training_ns
            - max(compute_ns, wait_ns / num, least_ns, compute_ns + _taken_ns(profile, wait_ns, num))
            - handover_ns
            for num in (workers, 1)
        )
        low_ns = won_ns - handover_ns
        lost_ns, high_ns = loading_ns, MOST * wait_ns
        if cpus and cpus < 2 and profile.run.device == "cpu":  # it does one or the other
            lost_ns = min(loading_ns, max(MIN_SHARE * step_ns, won_ns))
            high_ns = MOST * lost_ns
        by_all_ns, by_one_ns = (min(lost_ns, max(MIN_SHARE * step_ns, won)) for won in (won_ns, by_one_ns))
        advice = DIVIDE if loader.iterable else "Give"
        advice += f" the DataLoader {workers} {'worker' if workers == 1 else 'workers'}"
        if cpus and won_ns < MIN_SHARE * step_ns:
            they = f"the {cpus:g} CPUs are" if cpus > 1 else "the one CPU is"
            advice += f", if that helps: {they} in use already; or load less"
        elif cpus and won_ns < LEAST * loading_ns:
            faster = format_speedup(step_ns / (step_ns - won_ns))
            advice += f": about {faster}, as loading and the model share {cpus:g} CPU{'s' * (cpus > 1)}"
        if loader.on_device:
            advice = WHOLE_BATCHES
        elif loader.moves_batches:
            advice = MOVE_LATER
        elif begins_anew(profile, loader):
            advice = KEEP
        alone = bool(advice in (WHOLE_BATCHES, MOVE_LATER, KEEP) or loader.iterable)
        parts: tuple[str, ...] = ()
        if profile.input.fetch_ns is not None and profile.input.collate_ns is not None:
            parts = (
                f"A batch takes {format_ms(profile.input.fetch_ns)} to fetch"
                f" and {format_ms(profile.input.collate_ns)} to collate.",
            )
        return Finding(
            rule=self.name,
            summary=(
                f"The training thread loads its own batches: {format_share(loading_ns / step_ns)} of each"
                " step."
            ),
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=min(LEAST * lost_ns, max(0.0, low_ns)),
            high_ns=high_ns,
            assumption=(
                "workers prepare each batch while the model computes; the lower bound shares the CPUs"
                " there are"
            ),
            evidence=(
                f"num_workers=0, and {format_ms(wait_ns)} of each step pass in next(loader).",
                *parts,
                *_whether_it_computes(profile, wait_ns),
            ),
            fix=f"{advice}."
            + ("" if alone or profile.settings.start_method == "fork" else f" {MAIN_GUARD}"),
            code=""
            if alone
            else with_loader_arguments(profile, loader, num_workers=workers, persistent_workers=True),
            file=loader.file,
            line=loader.line,
            actions=() if alone or profile.input.asked_aside else self.actions,
            won_ns={}
            if alone or profile.input.asked_aside
            else {
                "loader-workers": by_all_ns,
                "loader-workers-reseeded": by_all_ns,
                "fork-continuation": by_one_ns,
            },
            fix_won_ns=by_all_ns if cpus and by_all_ns < LEAST * lost_ns else None,
        )


def _workers_for(profile: Profile, load_ns: float, compute_ns: float) -> int:
    """Returns how many workers keep up: at most one per CPU, or some where they only wait."""
    wanted = max(1, ceil(HEADROOM * load_ns / max(1.0, compute_ns)))
    waits = (_off_cpu(profile, load_ns) or 0.0) >= BLOCKED
    cpus = max(1, int(profile.own_cpus or wanted))
    return min(wanted, cpus * (WAITING_PER_CPU if waits else 1))


def _taken_ns(profile: Profile, load_ns: float, workers: int) -> float:
    """Returns how much longer computing takes with workers beside it.

    Where torch has a thread on each CPU, an operation ends when the last of them has, so it stands still
    while a worker has the CPU of one. Measured: 0.89 of the speed where one worker took over 10 % of the
    step of pytorch/examples mnist on two CPUs (`docs/case-studies.md`).
    """
    host, off_cpu = profile.host, _off_cpu(profile, load_ns)
    cpus = (
        host.cpus or 0
    ) / profile.settings.local_processes  # whatever the quota: threads take turns on them
    if not cpus or off_cpu is None or (host.num_threads or 1) < cpus:
        return 0.0
    return load_ns * (1 - min(1.0, max(0.0, off_cpu))) / min(workers, max(1.0, cpus))


def _off_cpu(profile: Profile, load_ns: float) -> float | None:
    """Returns the part of its loading that the loop stands off the CPU, where its time there can be nothing
    else."""
    host = profile.host
    if host.on_cpu_share is None or host.runnable_share is None or profile.run.device != "cpu":
        return None
    return (1 - host.on_cpu_share - host.runnable_share) * profile.step_time_ns / load_ns


def _whether_it_computes(profile: Profile, load_ns: float) -> tuple[str, ...]:
    """Says whether loading computes or waits."""
    host, off_cpu = profile.host, _off_cpu(profile, load_ns)
    if off_cpu is None:
        return ()
    if off_cpu >= BLOCKED:
        waits = "The training thread is off the CPU meanwhile: it waits for a disk, a network or a sleep."
        return (waits, *disk(host))
    if off_cpu <= COMPUTING and not waits_for_disk(host):
        return ("The training thread is on the CPU meanwhile: it computes, it does not wait for a disk.",)
    return disk(host)
