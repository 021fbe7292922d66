"""Supply and demand of batches: what worker processes can deliver, and what the loop would win with more.

The loop and its workers are two stages of a pipeline, so a step takes as long as the slower of the two: the
loop's own work, or the workers' time for a step's batches divided by their number. Neither is faster than
the CPUs allow that both share.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from diagnose.core.input import WorkerStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Loader
from diagnose.core.units import format_ms, format_share
from diagnose.rules._loader_calls import DIVIDE, applicable
from diagnose.rules._machine import storage_cpus

MIN_WORKER_BATCHES = 10
"""Workers that have told of fewer batches have told of little but their own start."""

MIN_SHARE = 0.04
"""Loops that wait for less of the step are well fed; a loaded machine alone makes them wait that much."""

SATURATED = 0.75
"""Workers that are busy for so much of the time are behind: some idleness remains at each epoch's ends."""

STARVED_BATCHES = 1.0
"""With fewer finished batches than this waiting, on average, the loop meets an empty queue."""

TOGETHER = 0.75
"""Workers that began together and take equally long finish together: the loop waits for all of them in one
step, and finds what the others made in the next ones, `(n - 1) / 2` batches of `n` workers on average. So
many more may be waiting there. Workers that keep up fill the queue, with more than a batch for each."""

NEVER_IDLE = 0.06
"""Workers that wait to be asked for less of their life than this are never ahead of the loop, though ..."""

BEING_SENT = 1.25
"""... so many batches for each worker are counted as waiting: those that are still being sent, which takes
long beside a worker that computes in Python. Measured: 1.1, of one worker that was idle for 3 %."""

ASIDE = (Phase.EVALUATION, Phase.CHECKPOINT, Phase.COMPILE)
"""While these last nobody takes training batches, and what workers prepare for it is bounded: they hide
nothing there."""

WORKERS_PART = 0.4
"""Part of the CPU time used that is the workers' where these, and not the model, take the CPUs."""

SPUN_CPUS = 0.33
SHORT_OF_CPUS = 0.35
"""Or CPUs that the workers use where they want one in vain for this part of their work. Threads of torch's
use the rest then, whatever the model takes: they spin while one of them has no CPU. Of healthy jobs on two
CPUs none had both, the nearest 0.30 and 0.33; faults of a fifth of the step and more had 0.35 to 0.65, and
0.39 to 0.48."""

HANDOVER_NS = 500_000
"""What taking over a batch of a few tensors from a worker costs the loop; measured: 0.4 to 1.1 ms."""

MIN_HANDOVERS = 4.0
"""Loading that takes no longer than this many of them is as fast without workers, or faster: beside a model
of 10 ms on two CPUs a worker lost a tenth where a batch took 1.5 ms, and won from 2 ms on."""

CURED = 0.5
"""A cure wins at least this part of the wait; else something else is to blame."""

CPU_CURED = 0.75
"""More workers that compute cure a wait of which they win this part. Beside a loop that computes on one of
two CPUs a second one wins just half, whatever samples cost: were half asked for, chance would name it."""

HELPED = 1 / 3
"""More workers that compute are the first thing to try where they win this part of the wait: one number,
and a CPU that stands idle meanwhile. What they leave is the samples' price."""

IN_TRANSFORMS = 0.5
"""Part of the workers' time in transforms, from which on these are what is slow: to make them cheaper wins
all of a wait of which more workers win a part."""

MORE_WORKERS = ("loader-workers", "loader-workers-reseeded")
"""Actions that give a loader more workers."""

MIN_EPOCHS = 2
"""Beginnings of epochs to have seen: a single one may have been slow for another reason."""

DRAWN = 0.5
"""Part of a wait for workers that is not theirs, as the training thread draws what they are to fetch."""

HEADROOM = 1.25
"""Workers to ask for, relative to the least that keep up: fetching times vary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """One loader with workers, and the loop that it feeds.

    Attributes:
        wait_ns: Mean wait of a step that begins no epoch.
        compute_ns: What such a step takes else, without what it does `ASIDE`.
        busy_ns: A worker's time for the batches of one step: fetch, collate and send.
        delay_share: Part of fetch and collate in which the worker had no CPU.
        worker_cpu_ns: CPU time that a worker takes for them, that of its helper threads included.
        delayed_ns: Part of it in which the worker wanted one.
        own_cpu_ns: CPU time per step of the training process; 0 when it was not measured.
        storage_cpu_ns: CPU time per step that others take to read for it: see `storage_cpus`.
        cpus: CPUs to be shared with the workers; `None` when unknown.
    """

    loader: Loader
    workers: WorkerStats
    step_ns: float
    wait_ns: float
    compute_ns: float
    batches: float
    busy_ns: float
    delay_share: float
    worker_cpu_ns: float
    delayed_ns: float
    own_cpu_ns: float
    storage_cpu_ns: float
    cpus: float | None

    @property
    def training_ns(self) -> float:
        """What such a step takes, without what it does `ASIDE`."""
        return self.compute_ns + self.wait_ns

    @property
    def wait_share(self) -> float:
        """Part of the mean step that the loop waits, epochs' beginnings left out."""
        return self.wait_ns / self.step_ns

    @property
    def load(self) -> float:
        """Part of the time that the workers would have to be busy to keep up with the steps as they are."""
        return self.busy_ns / self.loader.num_workers / self.training_ns

    @property
    def behind(self) -> bool:
        """Whether the loop waits because all workers are busy."""
        ready = self.workers.ready_batches
        together = (self.loader.num_workers - 1) / 2
        most = max(STARVED_BATCHES, together + TOGETHER)
        if self.workers.idle_share < NEVER_IDLE:
            most = max(most, BEING_SENT * self.loader.num_workers)
        is_starved = ready is None or ready < most
        return self.wait_share >= MIN_SHARE and self.load >= SATURATED and is_starved

    @property
    def needs_cpu(self) -> bool:
        """Whether the workers compute, or want to, for at least half of their time: else they wait, and not
        for threads of their own."""
        making_ns = max(1.0, self.workers.fetch_ns + self.workers.collate_ns)
        helped_share = (self.workers.helper_ns or 0.0) / making_ns
        return self.workers.cpu_share + self.delay_share + helped_share >= 0.5

    @property
    def collating_cpu_ns(self) -> float:
        """CPU time that a worker takes to collate the batches of one step."""
        return self.workers.collate_ns * self.workers.cpu_share * self.batches

    @property
    def fetching_cpu_ns(self) -> float:
        """Likewise to fetch them, threads included that compute for the dataset."""
        workers = self.workers
        return (workers.fetch_ns * workers.cpu_share + (workers.helper_ns or 0.0)) * self.batches

    @property
    def making_cpu_ns(self) -> float:
        """Both."""
        return self.fetching_cpu_ns + self.collating_cpu_ns

    @property
    def loading_cpu_ns(self) -> float:
        """CPU time per step of loading, sending included, whoever takes it for the workers."""
        return self.worker_cpu_ns + self.storage_cpu_ns

    @property
    def takes_the_cpus(self) -> bool:
        """Whether the workers use a large part of all that they and the training process use."""
        return self.crowds_a_team or self._takes_much

    @property
    def crowds_a_team(self) -> bool:
        """Whether they do, although the training process uses more by far: its threads spin for lack of a
        CPU."""
        crowded = self.worker_cpu_ns >= SPUN_CPUS * self.training_ns
        return crowded and self.delay_share >= SHORT_OF_CPUS and not self._takes_much

    @property
    def _takes_much(self) -> bool:
        return self.worker_cpu_ns >= WORKERS_PART * (self.worker_cpu_ns + self.own_cpu_ns)

    @property
    def won_by_workers_ns(self) -> float:
        """The part of `wait_ns` that more workers, as many as there are CPUs, would take away."""
        workers = self.enough_workers()
        return self.won_ns(num_workers=workers) if workers > self.loader.num_workers else 0.0

    @property
    def cured_by_workers(self) -> bool:
        """Whether more workers would take most of the wait away."""
        won_ns = self.won_by_workers_ns
        return won_ns > 0 and won_ns >= (CPU_CURED if self.needs_cpu else CURED) * self.wait_ns

    @property
    def helped_by_workers(self) -> bool:
        """Whether they would take enough of it away to be tried first; of workers that wait, most."""
        won_ns = self.won_by_workers_ns
        if self.cured_by_workers or not self.needs_cpu:
            return self.cured_by_workers
        return won_ns >= max(HELPED * self.wait_ns, MIN_SHARE * self.step_ns)

    @property
    def in_transforms(self) -> bool:
        """Whether most of the workers' time passes in transforms of the samples."""
        return (self.workers.transform_share or 0.0) >= IN_TRANSFORMS

    @property
    def waits_for_storage(self) -> bool:
        """Whether it is what the workers wait for themselves that keeps them behind.

        More workers wait side by side, each for samples of its own. One that reads a stream alone may read
        it in a way that cannot be divided: each further one would read all of it, and wait as long.
        """
        if not self.loader.iterable or self.loader.num_workers > 1:
            return not self.needs_cpu and not self.cured_by_workers
        return self.won_without_waiting_ns() >= CURED * self.wait_ns

    def won_ns(self, *, num_workers: int | None = None, busy_ns: float | None = None) -> float:
        """Returns the part of `wait_ns` that other workers, or less work for them, would take away."""
        busy = self.busy_ns if busy_ns is None else busy_ns
        cpu_ns = self.worker_cpu_ns * busy / self.busy_ns if self.busy_ns else 0.0
        return self._won_ns(busy, cpu_ns, num_workers or self.loader.num_workers)

    def won_without_waiting_ns(self) -> float:
        """Returns the part of `wait_ns` that workers which waited for nothing but a CPU would take away."""
        return self._won_ns(
            self.worker_cpu_ns + self.delayed_ns, self.worker_cpu_ns, self.loader.num_workers
        )

    def _won_ns(self, busy_ns: float, cpu_ns: float, num_workers: int) -> float:
        paces = [self.compute_ns, busy_ns / num_workers]
        if self.cpus:
            paces.append((self.own_cpu_ns + cpu_ns) / self.cpus)
        return min(self.wait_ns, max(0.0, self.training_ns - max(paces)))

    def enough_workers(self) -> int:
        """Returns how many workers to ask for: enough to keep up, at most one per CPU."""
        wanted = ceil(HEADROOM * self.busy_ns / max(1.0, self.compute_ns))
        most = max(int(self.cpus or wanted), self.loader.num_workers)
        return min(max(wanted, self.loader.num_workers + 1), most)

    @property
    def or_workers(self) -> str:
        """What more workers win beside another cure, in a sentence to go on with; empty where they do not
        help."""
        if not self.helped_by_workers:
            return ""
        give = f", if the stream can be divided: {DIVIDE}" if self.loader.iterable else " give"
        won = format_share(self.won_by_workers_ns / self.wait_ns)
        return (
            f" Or{give} the DataLoader {self.enough_workers()} workers instead of"
            f" {self.loader.num_workers}: that wins {won} of the wait."
        )

    def evidence(self) -> tuple[str, ...]:
        """Returns the sentences that every fault of a starved loop has in common."""
        workers = self.workers
        ready = workers.ready_batches
        queue = "" if ready is None else f"; {ready:.1f} finished batches were waiting on average"
        return (
            f"The loop waits {format_ms(self.wait_ns)} of each step for a batch{queue}.",
            f"A batch takes a worker {format_ms(workers.fetch_ns)} to fetch,"
            f" {format_ms(workers.collate_ns)} to collate and {format_ms(workers.send_ns)} to send;"
            f" {self.loader.num_workers} {'worker is' if self.loader.num_workers == 1 else 'workers are'}"
            f" busy {format_share(min(1.0, self.load))} of the time.",
        )


def supply_of(profile: Profile) -> Supply | None:
    """Returns supply and demand of the loader that feeds the loop, or `None` where no worker does."""
    loader = main_loader(profile)
    stats = profile.input
    workers = stats.workers
    if loader is None or not loader.num_workers or workers is None or stats.steady_wait_ns is None:
        return None
    if workers.batches < MIN_WORKER_BATCHES:
        return None
    batches = (stats.batches_per_step or 1.0) / stats.loaders_per_step
    making = workers.fetch_ns + workers.collate_ns
    wait_ns = stats.steady_wait_ns * stats.main_wait_share
    compute_ns = computing_ns(profile) + stats.steady_wait_ns - wait_ns  # other loaders are waited for, too
    return Supply(
        loader=loader,
        workers=workers,
        step_ns=profile.step_time_ns,
        wait_ns=wait_ns,
        compute_ns=compute_ns,
        batches=batches,
        busy_ns=(making + workers.send_ns) * batches,
        delay_share=workers.delay_share or 0.0,
        worker_cpu_ns=(making * workers.cpu_share + (workers.helper_ns or 0.0) + workers.send_ns) * batches,
        delayed_ns=making * (workers.delay_share or 0.0) * batches,
        own_cpu_ns=(profile.host.process_cpus or 0.0) * (compute_ns + wait_ns),
        storage_cpu_ns=storage_cpus(profile) * (compute_ns + wait_ns),
        cpus=profile.own_cpus,
    )


def drawn_at_starts_ns(profile: Profile) -> float:
    """Returns the part of `epoch_start_ns` in which the training thread draws the order of the samples, for
    workers; 0 where that is not known."""
    stats = profile.input
    return min(stats.epoch_drawing_ns or 0.0, stats.epoch_start_ns or 0.0)


def draws_at_starts(profile: Profile) -> bool:
    """Whether that is most of what an epoch's beginning costs."""
    return drawn_at_starts_ns(profile) > DRAWN * (profile.input.epoch_start_ns or 0.0)


def computing_ns(profile: Profile) -> float:
    """Returns what the mean step takes besides waiting for data and what it does `ASIDE`."""
    return sum(
        profile.phase_time_ns[p] for p in profile.phase_time_ns if p not in (Phase.DATA_WAIT, *ASIDE)
    )


def begins_anew(profile: Profile, loader: Loader) -> bool:
    """Whether each batch is the first of an epoch that has more: `next(iter(loader))` in every step."""
    if loader.dataset_length is not None and loader.dataset_length <= (loader.batch_size or 1):
        return False
    taken = (profile.input.batches_per_step or 1.0) / profile.input.loaders_per_step * profile.steps.count
    return loader.epochs > LEFT * taken


def main_loader(profile: Profile) -> Loader | None:
    """Returns the loader that fed most steps."""
    return profile.program.loaders[0] if profile.program.loaders else None


LEFT = 0.75
"""Epochs begun for each batch taken, from which on the loop takes one batch of each and leaves it: where an
epoch has two batches it is a half."""


def won_beside(actions: tuple[str, ...], profile: Profile, supply: Supply) -> dict[str, float]:
    """Returns the actions that give more workers, and nanoseconds of a wait per step that these win where
    something else would win all of it; empty where they do not help."""
    if not supply.helped_by_workers or profile.input.asked_aside:
        return {}
    return dict.fromkeys(applicable(actions, supply.loader), supply.won_by_workers_ns)
