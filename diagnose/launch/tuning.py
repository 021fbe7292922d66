"""Begins the tuning that `diagnose run --tune` asked for, in the process that trains."""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnose.hooks._allocator import uncounted
from diagnose.hooks._cuda import cuda_in_use
from diagnose.hooks._looks import added
from diagnose.launch.interrupts import handlers_wait, interrupts_wait
from diagnose.launch.steps_left import Progress

if TYPE_CHECKING:
    from diagnose.actions._losses import Losses
    from diagnose.core.command import Command
    from diagnose.hooks._recorder import Recorder
    from diagnose.tuner.installed import Installed
    from diagnose.tuner.world import Numerics, Snapshot, World

CALM = ("holding", "waiting", "paused", "frozen")
"""States of the controller in which no fix is tried: a deep window takes but a few steps from it."""

LOSS_STEPS = 7
"""While tuning rests the loss is only to be shown. Of one in so many steps it is read: that takes 10 us,
where all that measuring does in a step takes 40. An odd number: of 8 it would always be the same one where
two networks take turns, or an epoch has 16 batches."""


class LiveTuning:
    """The controller of this process, and what stands between it and the hooks.

    Args:
        recorder: Tells where steps end, and keeps what the tuner does as events.
        folder: The run's folder.
        asked: The object in `DIAGNOSE_TUNING`, as `launch.command.environment` makes it.

    Attributes:
        window: Takes a deep window that was asked for; gets whether that may begin, returns whether one is
            under way.

    Raises:
        DiagnoseError: If the file of settings to use is not one.
    """

    def __init__(self, recorder: Recorder, folder: Path, asked: Mapping[str, Any]) -> None:
        from diagnose.core.job import Job
        from diagnose.core.trial import Safety
        from diagnose.launch.ranks import GlooRanks
        from diagnose.tuner.controller import Controller
        from diagnose.tuner.kept import read
        from diagnose.tuner.loss_curve import LossCurve
        from diagnose.tuner.policy import Policy

        policy = Policy(
            allowed=frozenset(map(Safety, asked["allow"])),
            only=frozenset(asked["only"]),
            skip=frozenset(asked["skip"]),
            dry_run=asked["dry_run"],
        )
        reuse = read(Path(asked["apply"])) if asked["apply"] else None
        self._recorder = recorder
        self.window: Callable[[bool], bool] = lambda calm: False
        self._in_window = self._captured = False
        self._until = 0  # nobody asks after the loss of a step that ends before so many have
        self._asides = self._samples = 0
        self._began_at, self._begun, self._epoch_began = 0, False, False
        self._feeds: list[tuple[Callable[[], Any], weakref.ref[Any]]] = []
        self._progress = Progress()
        self._losses: Losses | None = None
        self.loss = LossCurve()
        self._installed = ExitStack()
        self._ranks = GlooRanks(lambda: recorder.steps, lambda: recorder.guarded(self.finish))
        self._ranks.install()
        self._job = Job(
            routes=recorder.routes,
            on_iterator=recorder.looks.on_iterator,
            local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
            steps_left=self._steps_left,
            unmeasured=recorder.unmeasured,
        )
        self._commands: deque[Command] = deque()
        world = self._world(folder)
        self._installed.enter_context(added(recorder.looks.on_iterator, self._begins))
        try:
            self._controller = Controller(world, policy, reuse)
        except BaseException:
            self._installed.close()
            self._ranks.close()
            raise
        recorder.on_boundary = self._boundary

    def _world(self, folder: Path) -> World:
        """Returns what the controller may do to this process; listens for its pauses from now on."""
        from diagnose import actions
        from diagnose.actions.base import Action
        from diagnose.core.plugins import discover
        from diagnose.tuner.diagnosis import OtherProcess
        from diagnose.tuner.pauses import Pauses
        from diagnose.tuner.world import World

        pauses = Pauses()
        self._installed.enter_context(pauses.watched())
        return World(
            job=self._job,
            actions=discover(actions, Action),
            diagnose=lambda first_step: OtherProcess(folder, first_step),
            watch=self._watch,
            check_numerics=_check_numerics,
            time_passes=self._time_passes,
            tell=self._tell,
            stop=self.detach,
            look=self._look,
            ranks=self._ranks,
            commands=self._commands,
            losses=self._latest_losses,
            synchronize=self._synchronize,
            uncounted=uncounted,
            snapshot=self._snapshot,
            pauses=pauses,
        )

    def finish(self) -> None:
        """The script ends: everything is undone."""
        self._look()
        try:
            with interrupts_wait() as self._ranks.interrupted:
                self._controller.finish()
        finally:
            self._forget()
            self._ranks.close()

    def command(self, command: Command) -> str:
        """Takes a command for the next time that nothing is being tried; returns why it cannot.

        Called in the flusher's thread.
        """
        self._commands.append(command)
        self._recorder.boundary_due = 0
        state = self._controller.state  # only now: tuning that ends after this answers what is waiting
        if state not in ("ended", "frozen"):
            return ""
        try:
            self._commands.remove(command)
        except ValueError:
            return ""  # it has been answered
        return "tuning has ended" if state == "ended" else "tuning has stopped"

    def detach(self) -> None:
        """Takes this object out of the hooks; nothing is left to tune."""
        self._recorder.on_boundary = None
        self._recorder.rest_until(0)
        self._recorder.inputs = None
        self._forget()
        self._installed.close()

    def _boundary(self) -> None:
        if _is_capturing():
            self._captured = True
            return  # whoever waits for the device now, or asks it anything, breaks the graph
        self._count()
        with interrupts_wait() if self._job.on_step else nullcontext():
            rests = self._controller.rests(self._recorder.steps)
        if rests:
            self._in_window = self.window(self._controller.state in CALM)
            self._rest()
            return
        self._recorder.rest_until(0)  # the hooks look at everything again
        self._until = 0
        self._look()
        if any(_is_joined(model) for model in self._job.models):
            self._ranks.leave("the script joins ranks that have different numbers of batches")
        aside = self._recorder.asides != self._asides or self._in_window or self._captured
        self._asides, self._captured = self._recorder.asides, False
        num_samples = max(0, self._recorder.samples - self._samples)
        self._samples = self._recorder.samples
        # A step that was not seen to end is ended by the next one.
        self._ranks.an_epoch_begins, self._epoch_began = self._begun or self._epoch_began, self._begun
        try:
            with interrupts_wait() as self._ranks.interrupted:
                self._controller.boundary(self._recorder.steps, aside, self._begun, num_samples)
        finally:
            self._forget()
        self._begun = False
        self._in_window = self.window(self._controller.state in CALM)
        self._rest()

    def _rest(self) -> None:
        """Lets steps pass that need no look, also by the hooks."""
        recorder = self._recorder
        if recorder.on_boundary != self._boundary:
            return  # tuning has just ended
        if self._in_window:
            self._until = 0
        elif recorder.steps >= self._until:
            self._until = min(self._controller.rests_until, recorder.steps + LOSS_STEPS)
        recorder.rest_until(self._until)
        # Who is called after each step needs no look of the hooks. A command may have come just before.
        if self._job.on_step or self._commands:
            recorder.boundary_due = 0

    def _count(self) -> None:
        self._job.steps, self._job.backward_passes = self._recorder.steps, self._recorder.backward_passes

    def _look(self) -> None:
        """Fills the job with what the loop uses now."""
        recorder, met, job = self._recorder, self._recorder.met, self._job
        job.loaders, job.iterators = [], []
        job.models = met.live_modules()
        job.optimizers = met.live_optimizers()
        job.is_between = not (job.models or job.optimizers) and bool(met.modules or met.optimizers)
        for held, iterated in self._feeds:
            loader, iterator = held(), iterated()
            if loader is not None and iterator is not None:
                job.loaders.append(loader)
                job.iterators.append(iterator)
        job.facts = recorder.facts
        self._count()
        job.epochs_ended = recorder.feed.epochs_ended
        for model in job.models:
            parameter = next(model.parameters(), None)
            if parameter is not None:
                job.device, job.torch_device = parameter.device.type, parameter.device
                break

    def _forget(self) -> None:
        """Lets go of what `_look` has found: an object that the script is done with would stay alive."""
        self._job.models, self._job.optimizers = [], []
        self._job.loaders, self._job.iterators = [], []

    def _begins(self, loader: Any, iterator: Any) -> None:
        """The loop begins to iterate over a loader for training: its last iterator is done with."""
        job = self._job
        job.epochs_begun += 1
        if self._recorder.steps > self._began_at:  # a second loader begins at the same step as the first
            job.epoch_steps = self._recorder.steps - self._began_at
            self._began_at, self._begun = self._recorder.steps, True
        others = [feed for feed in self._feeds if feed[1]() is not None and feed[0]() is not loader]
        # `for batch in DataLoader(...)` leaves the loader to nobody: it lives as long as its iterator. One
        # that holds its iterator itself must not be held, or both would live for ever.
        holds_itself = any(each is iterator for each in vars(loader).values())
        held: Callable[[], Any] = weakref.ref(loader) if holds_itself else lambda: loader
        self._feeds = [*others, (held, weakref.ref(iterator, self._is_over))]

    def _is_over(self, iterator: weakref.ref[Any]) -> None:
        self._feeds = [feed for feed in self._feeds if feed[1] is not iterator]

    @contextmanager
    def _watch(self) -> Iterator[None]:
        from diagnose.actions._watch import watched

        self._recorder.inputs = self._job.inputs = {}
        try:
            with watched(self._job):
                yield
        finally:
            self._recorder.inputs = None
            self._job.inputs = {}

    def _steps_left(self) -> int | None:
        recorder, within = self._recorder, None
        if recorder.stop_after:
            return max(0, recorder.stop_after - recorder.steps)
        for loader, iterator in zip(self._job.loaders, self._job.iterators, strict=True):
            with suppress(TypeError, ZeroDivisionError):  # of a stream nobody knows the length
                within = min(1.0, getattr(iterator, "_num_yielded", 0) / len(loader))
        return self._progress.steps_left(sys._getframe(), recorder.steps, within)

    def _synchronize(self) -> None:
        """Waits for every device that holds what is trained: a model may be spread over several."""
        import torch

        groups = (group for optimizer in self._job.optimizers for group in optimizer.param_groups)
        devices = {parameter.device for group in groups for parameter in group["params"]}
        for device in {self._job.torch_device, *devices} - {None}:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)

    def _latest_losses(self) -> Sequence[float]:
        if self._losses is None:
            from diagnose.actions._losses import Losses

            recorder = self._recorder
            self._losses = Losses(recorder.guarded, lambda: recorder.steps + 1 >= self._until)
            self._installed.enter_context(self._losses.noted())
        losses = self._losses.step_ended()
        self.loss.add(self._recorder.steps, losses)
        return losses

    def _time_passes(self, job: Any, installed: Installed) -> tuple[int, int] | None:
        from diagnose.actions import _shadow

        with handlers_wait():
            return _shadow.time_passes(job, installed.context(), self._synchronize)

    def _snapshot(self, job: Any) -> Snapshot:
        from diagnose.actions._snapshot import Snapshot

        return Snapshot(job, self._losses.scalers if self._losses is not None else ())

    def _tell(self, kind: str, detail: dict[str, Any]) -> None:
        self._recorder.event(kind, **detail)


def _check_numerics(job: Any, installed: Installed) -> Numerics:
    from diagnose.actions import _shadow

    compare = (
        _shadow.compare_update if installed.action.touches == "optimizer" else _shadow.compare_gradients
    )
    with handlers_wait():  # what they would save is not the script's model
        return compare(job, installed.context(), installed.action.safety)


def _is_capturing() -> bool:
    """Whether what this thread gives its GPU now goes into a graph instead."""
    return cuda_in_use() and bool(sys.modules["torch"].cuda.is_current_stream_capturing())


def _is_joined(model: Any) -> bool:
    """Whether the loop runs inside of `DistributedDataParallel.join`: some ranks take fewer steps."""
    return bool(getattr(getattr(model, "_join_config", None), "enable", False))
