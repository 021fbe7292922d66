"""The training thread loads its own batches"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.input import InputStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Loader, Program
from diagnose.core.units import format_share, format_speedup
from diagnose.rules._examples import profile
from diagnose.rules._loader_calls import DIVIDE, KEEP_ITERATOR, with_loader_arguments
from diagnose.rules._serial import LEAST, MIN_SHARE, Serial, SerialRule, serial_of, takes_rewriting
from diagnose.rules._supply import (
    begins_anew,
)

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
OF_40_MS = InputStats(steady_wait_ns=40e6)
NO_WORKER = Program(loaders=(Loader(num_workers=0, batch_size=32, file="/home/me/train.py", line=31),))
STREAM = Program(loaders=(replace(NO_WORKER.loaders[0], iterable=True),))
MOVED = Program(loaders=(replace(NO_WORKER.loaders[0], moves_batches=True),))
ON_DEVICE = Program(loaders=(replace(NO_WORKER.loaders[0], on_device=True),))


class SerialLoading(SerialRule):
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
        *(profile(data_wait_ms=40, program=each, input=OF_40_MS) for each in (STREAM, ON_DEVICE, MOVED)),
        profile(
            data_wait_ms=60, program=NO_WORKER, input=InputStats(steady_wait_ns=60e6), host=QUOTA_OF_ONE
        ),
    )
    silent_on = (
        profile(step_ms=5, data_wait_ms=1.2, program=NO_WORKER, input=InputStats(steady_wait_ns=1.2e6)),
        profile(data_wait_ms=3, program=NO_WORKER, input=InputStats(fetch_ns=2e6, steady_wait_ns=3e6)),
        profile(data_wait_ms=40, program=ONE_WORKER, input=OF_40_MS),
    )

    def check(self, profile: Profile) -> Finding | None:
        serial = serial_of(profile)
        if serial is None:
            return None
        loader, lost_ns, by_all_ns = serial.loader, serial.lost_ns, serial.by_workers_ns
        alone, offered = takes_rewriting(profile, loader), serial.won_by(profile)
        return Finding(
            rule=self.name,
            summary="The training thread loads its own batches:"
            f" {format_share(serial.loading_ns / serial.step_ns)} of each step.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=min(LEAST * lost_ns, max(0.0, serial.won_ns - serial.handover_ns)),
            high_ns=serial.high_ns,
            assumption="workers prepare each batch while the model computes; the lower bound shares the"
            " CPUs there are",
            evidence=(*serial.evidence(profile), *serial.whether_it_computes(profile)),
            fix=f"{_advice(profile, serial)}."
            + ("" if alone or profile.settings.start_method == "fork" else f" {MAIN_GUARD}"),
            code=""
            if alone
            else with_loader_arguments(
                profile, loader, num_workers=serial.workers, persistent_workers=True
            ),
            file=loader.file,
            line=loader.line,
            actions=self.actions if offered else (),
            won_ns=offered,
            fix_won_ns=by_all_ns if serial.cpus and by_all_ns < LEAST * lost_ns else None,
        )


def _advice(profile: Profile, serial: Serial) -> str:
    """Returns what to do, without a full stop."""
    loader, workers, cpus, won_ns = serial.loader, serial.workers, serial.cpus, serial.won_ns
    if loader.on_device:
        return WHOLE_BATCHES
    if loader.moves_batches:
        return MOVE_LATER
    if begins_anew(profile, loader):
        return KEEP
    advice = DIVIDE if loader.iterable else "Give"
    advice += f" the DataLoader {workers} {'worker' if workers == 1 else 'workers'}"
    if cpus and won_ns < MIN_SHARE * serial.step_ns:
        they = f"the {cpus:g} CPUs are" if cpus > 1 else "the one CPU is"
        advice += f", if that helps: {they} in use already; or load less"
    elif cpus and won_ns < LEAST * serial.loading_ns:
        faster = format_speedup(serial.step_ns / (serial.step_ns - won_ns))
        advice += f": about {faster}, as loading and the model share {cpus:g} CPU{'s' * (cpus > 1)}"
    return advice
