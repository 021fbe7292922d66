"""Another Python thread holds the interpreter lock"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats, PythonThread
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_duration, format_share
from diagnose.rules._cpus import MOST, spread
from diagnose.rules._examples import profile
from diagnose.rules._lines import waiting_share
from diagnose.rules._machine import one_core
from diagnose.rules.base import Rule
from diagnose.rules.slow_pinning import THREAD

MIN_CPUS = 0.05
"""A background thread that computes less is hardly ever met."""

MIN_WAITING = 0.05
"""The training thread waits for something else than a CPU for this part of the time, or more."""

MIN_WAITS_PER_S = 40
"""And that often: a loop that loads its own batches waits some twenty times a second, for the disk."""

SWITCH_INTERVAL_S = 0.005
"""Whoever wants the lock waits this long before the other thread is asked to give it up."""

MAX_WAIT_NS = 60_000_000
"""One wait for the lock takes 5 ms and the other thread's turn; longer ones are for something else."""

HOG = PythonThread(name="Thread-1 (watch)", cpus=0.5, file="/home/me/train.py", line=12)
HELD = HostStats(
    on_cpu_share=0.3, runnable_share=0.05, process_cpus=0.9, voluntary_per_s=250.0, python_threads=(HOG,)
)


class GilContention(Rule):
    """
    ## What it means
    Only one Python thread runs at a time. The training thread gives the lock up in every operation, and
    when another thread of the script computes in Python, gets it back only after 5 ms: hundreds of times
    a step.

    ## What to do
    Give the other thread's work to a process (`multiprocessing`), or to libraries that release the lock,
    or do it between epochs.

    ## When it is wrong
    A thread whose results the training thread waits for, such as one that loads data.
    """

    needs = ("host.on_cpu_share", "host.runnable_share", "host.voluntary_per_s")
    explains = ("small-operators", "python-overhead", "slow-optimizer")
    of_host = True
    fires_on = (profile(host=HELD),)
    silent_on = (
        profile(host=replace(HELD, python_threads=())),
        profile(host=replace(HELD, voluntary_per_s=2.0)),
        profile(host=replace(HELD, on_cpu_share=0.97, runnable_share=0.01)),
        profile(data_wait_ms=80, host=HELD),
        profile(data_wait_ms=45, input=InputStats(asked_aside=True), host=replace(HELD, on_cpu_share=0.5)),
    )

    def check(self, profile: Profile) -> Finding | None:
        host = profile.host
        # What torch's own thread takes to pin memory is for `slow-pinning`.
        others = [thread for thread in host.python_threads if THREAD not in thread.name]
        threads = [thread for thread in others if thread.cpus >= MIN_CPUS]
        assert host.voluntary_per_s is not None
        # What the loop waits for, a batch or a sleep, is no wait for the lock.
        elsewhere = waiting_share(profile)
        waited = host.off_cpu_share or 0.0
        data = profile.share(Phase.DATA_WAIT) or 0.0
        workers = any(loader.num_workers for loader in profile.program.loaders)
        if workers or data > 0.5 or profile.input.asked_aside:
            elsewhere += data
        if profile.run.device != "cpu":  # there the loop waits for autograd's thread, and for copies
            elsewhere += sum(profile.share(phase) or 0.0 for phase in (Phase.BACKWARD, Phase.COPY))
        if not elsewhere:
            # Where CPUs are short, the thread that holds the lock waits for one, and who wants it seems to.
            off_cpu = 1 - (host.on_cpu_share or 0.0)
            waited = max(waited, min(off_cpu, host.voluntary_per_s * SWITCH_INTERVAL_S))
        # Nobody waits for the lock longer than the others hold it: the rest is for torch's own threads.
        held = sum(thread.cpus for thread in others)
        waiting = min(waited - elsewhere, held)
        if not threads or waiting < MIN_WAITING or host.voluntary_per_s < MIN_WAITS_PER_S:
            return None
        each_ns = 1e9 * waited / host.voluntary_per_s
        if each_ns > MAX_WAIT_NS:
            return None
        worst = threads[0]
        lost = spread(profile, min(waiting, MOST))
        total = sum(lost.values())
        where = f" ({Path(worst.file).name}:{worst.line})" if worst.file else ""
        return Finding(
            rule=self.name,
            summary=f"The thread {worst.name!r}{where} computes in Python, and training waits for the"
            f" interpreter lock for {format_share(waiting)} of the time",
            lost_ns=lost,
            low_ns=0.5 * total,
            high_ns=max(total, min(1.5 * total, MOST * profile.step_time_ns)),
            assumption="what the thread waits for, besides CPUs, batches and sleeps, is the lock, at most"
            " as long as the other one computes",
            evidence=(
                f"{worst.name!r} used {worst.cpus:.2f} CPUs, as a Python thread of the same process.",
                f"The training thread stopped {host.voluntary_per_s:,.0f} times a second, for"
                f" {format_duration(each_ns)} on average; the lock changes hands after 5 ms.",
                *one_core(host),
            ),
            fix=f"Run what {worst.name!r} does in a process of its own.",
            code="multiprocessing.Process(target=..., daemon=True).start()",
            file=worst.file,
            line=worst.line,
        )
