"""The ledger of the training thread: charges every nanosecond to one slot, and cuts it into steps.

Everything here runs on the training thread, inside the user's step, where the caches are cold and every
bytecode counts. So: one number per event into a log, no locks, no input or output; the flusher's thread
reads the log and does the arithmetic.
"""

from __future__ import annotations

import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from diagnose.core.job import Route
from diagnose.core.ledger import (
    CHECKPOINT,
    COMMUNICATION,
    COMPILE,
    EVALUATION,
    FIRST_GAP,
    GAP_AFTER,
    GAP_AFTER_EVALUATION,
    GAP_AFTER_REST,
    OPTIMIZER,
)
from diagnose.hooks._curious import settle, take_care
from diagnose.hooks._device_ledger import DeviceLedger
from diagnose.hooks._feed import Feed
from diagnose.hooks._log import ARRIVED, SETTLED, STEPPED, WIDTH, Log, Mark, Seen
from diagnose.hooks._looks import Looks
from diagnose.hooks._met import Met
from diagnose.hooks._signals import from_signal_handler
from diagnose.hooks._steps import StepFinder

ASIDE = frozenset((EVALUATION, CHECKPOINT, COMPILE))

UNSETTLED = (GAP_AFTER_EVALUATION, EVALUATION)
"""Slots in which no training event can begin: it ends the evaluation, and says whose the gap was."""

UNUSED, EVALUATED, TRAINED = range(3)

NOTHING_SEEN: Seen = {}
"""What a mark holds of the models where a loader tells the samples; one for all, never written to."""


class Recorder:
    """Charges the training thread's time to the slots of `core.ledger`.

    Attributes:
        thread: Identity of the training thread; others pass through unmeasured. 0 while measuring is off.
        calm: The same identity while the next forward, backward or optimizer step has nothing to do but to
            be charged; else 0: an optimizer has stepped, an evaluation is or was on, no loader counts the
            samples, or the hooks look around. The hooks look at nothing else while it is set.
        calm_when_told: What `calm` becomes when a loader has told the samples of this step's batch.
        device: The ledger by the device's clock, once there is a device to have one.
        curious: Whether the hooks look around in this step.
        searching: Whether modules of new classes are looked for in this step.
        listening: Whether modules of new classes are looked for at this moment.
        current: The slot that time is running into.
        log: What has been charged since the flusher read last. The hooks of the hottest calls write to it
            themselves, as `run_into` does.
        in_step: Number of optimizer steps that are running; their closures' events end no step.
        steps: Number of finished steps.
        samples: Samples that loaders have handed over for training, and likewise `tokens`.
        backward_passes: Number of outermost backward passes.
        passes_stepped: How many of them there were when an optimizer last stepped: those since then have
            left gradients that no optimizer has used.
        passes_beside: Number of those besides that ran in evaluations, such as of an attack on a batch.
        rounds: How often an optimizer has stepped after a backward pass: one round of passes and steps.
        evaluating: Whether the model is in evaluation mode between training steps.
        evaluated: Whether it has been called in that mode since.
        called_freely: Identities of the modules called without gradients since training's last event.
        batch_use: What the last batch of a training loader was used for so far: `UNUSED`, `EVALUATED` or
            `TRAINED`.
        met: What the loop is made of.
        feed: What its loaders feed it with.
        looks: Whom the hooks show what they see, and what is called between steps.
        events: `(time, step, kind, detail)` of what happened besides.
        notes: What went wrong with measuring, in words.
        facts: What hooks have learnt of the program besides times, by name; JSON's types only.
        accumulates: Whether the latest outermost backward pass leaves a gradient in each parameter that it
            reaches: it was `backward`, and was not given the inputs to leave one in.
        stepped_beside: Identities of optimizers that stepped in the backward pass under way, in a thread of
            autograd's: those of a GPU's tensors do, in a hook of a parameter.
        asides: Spans so far that evaluated, saved or compiled: no part of what steps are compared by.
        on_boundary: Called between two steps, before the loop gets its next batch or calls its model.
        boundary_due: It need not be called before so many steps have finished; any thread may set it to 0.
        inputs: What each outermost training-mode call got last, by `id(model)`; see `core.job.Job`. `None`
            keeps nothing.
        routes: By `id(model)`, what its outermost training-mode calls go through; see `core.job.Job`.
    """

    __slots__ = (
        "_begun",
        "_counted",
        "_next_care",
        "_seen",
        "accumulates",
        "asides",
        "backward_passes",
        "batch_use",
        "boundary_due",
        "called_freely",
        "calm",
        "calm_when_told",
        "clock",
        "curious",
        "current",
        "device",
        "evaluated",
        "evaluating",
        "events",
        "facts",
        "feed",
        "finder",
        "in_step",
        "inputs",
        "listening",
        "log",
        "looks",
        "max_steps",
        "met",
        "notes",
        "on_begin",
        "on_boundary",
        "passes_beside",
        "passes_stepped",
        "rounds",
        "routes",
        "samples",
        "searching",
        "stepped_beside",
        "steps",
        "stop_after",
        "thread",
        "tokens",
    )

    def __init__(self, *, max_steps: int = 0, stop_after: int = 0) -> None:
        self.clock: Callable[[], int] = perf_counter_ns
        self.max_steps = max_steps
        self.stop_after = stop_after
        self.thread = get_ident()
        self.on_begin: Callable[[], None] | None = None
        self.accumulates = True
        self.routes: dict[int, list[Route]] = {}
        self.looks = Looks()
        self.log = Log()
        self.met = Met()
        self.feed = Feed()
        self.reset()

    def reset(self) -> None:
        """Forgets everything measured: a forked child begins with an empty ledger."""
        self.current = GAP_AFTER_REST
        self.device: DeviceLedger | None = None  # a forked child has no device
        self.log.clear()  # in place, as what was met and what feeds: the wrappers hold them
        self.met.clear()
        self.feed.clear()
        self.asides = 0
        self.on_boundary: Callable[[], None] | None = None
        self.boundary_due = 0
        self.inputs: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        self.calm = 0
        self.calm_when_told = 0
        self.curious = True
        self.searching = True
        self.listening = False
        self.in_step = 0
        self.steps = 0
        self.samples = 0
        self.tokens = 0
        self.backward_passes = 0
        self.passes_beside = 0
        self.passes_stepped = 0
        self.rounds = 0
        self.evaluated = False
        self.evaluating = False
        self.called_freely: set[int] = set()
        self.batch_use = TRAINED
        self.facts: dict[str, Any] = {}
        self.stepped_beside: deque[int] = deque()
        self.events: deque[tuple[int, int, str, dict[str, Any]]] = deque()
        self.notes: deque[str] = deque()
        self.finder = StepFinder(self._mark, self._close)
        self._begun = False
        self._next_care = 0
        self._seen: Seen = {}
        self._counted = 0

    # -- spans

    def on_training_thread(self) -> bool:
        """Whether the calling thread is the one that is measured."""
        return get_ident() == self.thread

    def switch_off(self) -> None:
        """Ends the measuring; any thread may call it."""
        self.calm_when_told = self.thread = self.calm = 0

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """What the training thread does inside is our own, no event of the script's loop: the hooks see
        nothing of it, and no step ends. For model calls and optimizer steps of a numerics check."""
        thread, self.thread, self.calm = self.thread, 0, 0  # not calm again before the next step
        try:
            yield
        finally:
            self.thread = thread

    def claim_thread(self) -> None:
        """Makes the calling thread the measured one if no other has trained: not all loops run in the main
        one."""
        if not self.thread:
            self.calm = 0  # if the training thread was just setting it while another switched off
        if self.thread and not self._begun and get_ident() != self.thread:
            self.thread = get_ident()

    def push(self, slot: int) -> int:
        """Opens a span on the training thread; returns the slot it interrupts, which `leave` wants back."""
        interrupted = self.current
        if slot in ASIDE:
            self.asides += 1
        self.run_into(slot)
        return interrupted

    def leave(self, slot: int, interrupted: int) -> None:
        """Closes the span in `slot`, and any that an exception left open inside it."""
        self.run_into(GAP_AFTER[slot] if interrupted >= FIRST_GAP else interrupted)

    def run_into(self, slot: int) -> None:
        """From now on time runs into `slot`. Closes by itself a span that was no event of the loop: the gap
        that it cut in two goes on."""
        # First the slot: a collection between the two lines then ends where the span has begun.
        self.current = slot
        if self._begun:  # else nothing reads the log, and a process that never trains would fill it
            self.log.append(self.clock() * WIDTH + slot)

    def arrive(self) -> None:
        """This rank has its part of a meeting, and waits for those of others in `communication`."""
        self.current = COMMUNICATION
        if self._begun:
            self.log.append(self.clock() * WIDTH + ARRIVED)

    def guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Calls our own code where it meets the script: whatever it raises is noted, not raised."""
        try:
            function(*args)
        except Exception:  # noqa: BLE001 (the one place where a hook meets the script)
            self.broke(function)

    def broke(self, function: Callable[..., Any]) -> None:
        """Notes the exception being handled, once per place. A hook that fails stays in: it may recover.

        Raises:
            Exception: The one being handled, if a signal handler of the script's raised it: that runs
                wherever the training thread happens to be.
        """
        if from_signal_handler(sys.exc_info()[2]):
            raise
        name = getattr(function, "__qualname__", repr(function)).split(".<locals>")[0]
        error = traceback.format_exc(limit=-3).strip()
        note = f"measuring failed in {name}: {error}"
        if len(self.notes) < 20 and note not in self.notes:
            self.notes.append(note)

    # -- what the hooks tell

    def batch_asked(self) -> None:
        """The loop asks a loader for a training batch: the step before, if complete, ends here."""
        if self.evaluating or self.current in UNSETTLED:
            self._settle_evaluation(False)
        if not self._begun:
            self._begin()
        self.batch_use = UNUSED
        self.calm = 0  # until a batch has come and told its size
        finder = self.finder
        if finder.batch_asked():
            mark = self._mark()
            if not finder.marked:
                self._close(mark)
            if self.on_boundary is not None and self.steps >= self.boundary_due:
                self.guarded(self.on_boundary)
        if self.stop_after:
            self._stop_if_done()

    def forward_begins(self, model: Any, size: Callable[[], tuple[int, int]]) -> None:
        """The outermost training-mode call of a model begins. Needed only while not `calm`.

        Args:
            model: The module.
            size: Returns samples and tokens of its input; asked only when no loader tells.
        """
        if self.current == OPTIMIZER:
            self._drop_stale_optimizer()
        self.work_begins()
        if self.samples == self._counted:
            samples, tokens = size()
            before = self._seen.get(id(model), (0, 0))
            self._seen[id(model)] = (before[0] + samples, before[1] + tokens)

    def work_begins(self, by_optimizer: bool = False) -> None:
        """A training forward, a backward or an optimizer step begins. Needed only while not `calm`."""
        if self.evaluating or self.current in UNSETTLED:
            self._settle_evaluation(False)
        self.called_freely.clear()
        if not self._begun:
            self._begin()
        if not self.in_step:
            is_due = self.on_boundary is not None and self.steps >= self.boundary_due
            ends = is_due and self.finder.ends_here()
            self.finder.work_begins(by_optimizer)
            if ends and self.on_boundary is not None:
                self.guarded(self.on_boundary)
            if self.finder.provisional is not None:
                self._counted = self.samples  # of the step that may begin here, no loader has told yet
            if self.stop_after:
                self._stop_if_next_is_known()

    def optimizer_stepped(self, optimizer: int, slot: int = -1) -> None:
        """The outermost `step()` of an optimizer ended, or a scaler skipped it.

        Args:
            optimizer: Its identity.
            slot: The slot that time runs into now, if that changes.
        """
        if slot >= 0:
            self.current = slot
        self.log.append(self.clock() * WIDTH + self.current + STEPPED)
        self.finder.optimizer_stepped(optimizer)
        if self.passes_stepped != self.backward_passes:
            self.passes_stepped = self.backward_passes
            self.rounds += 1
        self.batch_use = TRAINED  # whatever its models were called with
        self.calm = 0
        if self.stop_after:
            self._stop_if_done()

    def tell_stepped_beside(self) -> None:
        """A backward pass has ended in which optimizers stepped in other threads."""
        if get_ident() == self.thread:
            for optimizer in dict.fromkeys(self.stepped_beside):
                self.optimizer_stepped(optimizer)
            self.stepped_beside.clear()

    def evaluation_begins(self, model: int = 0) -> None:
        """A gradient-free model call, or a batch for one: the gap since the last one belongs to it too. But
        not where another model is called than those before: so an actor has acted, and what lies between it
        and the target network is the training's batch.

        Args:
            model: Identity of the module, if one is called.
        """
        self.calm = 0
        if self.batch_use == UNUSED:
            self.batch_use = EVALUATED
        if self.current == GAP_AFTER_EVALUATION:
            again = self.evaluating or not model or model in self.called_freely
            self._settle_evaluation(again)
        if model:
            self.called_freely.add(model)

    def evaluation_region(self, inside: bool) -> None:
        """The model was switched to or from evaluation mode: gaps belong to `evaluation` in between."""
        self.evaluated = False
        if inside == self.evaluating or not self._begun:
            return
        if inside and self.current >= FIRST_GAP:
            if self.current == GAP_AFTER_EVALUATION:
                self._settle_evaluation(True)
            # With an unused batch in hand it may be an attack on that one: what comes next will tell.
            self.run_into(GAP_AFTER_EVALUATION if self.batch_use == UNUSED else EVALUATION)
            self.evaluating = True
            self.calm = 0
        elif not inside:
            self.evaluating = False
            if self.current == EVALUATION:
                self.run_into(GAP_AFTER_REST)

    @property
    def outermost(self) -> bool:
        """Whether no span is open that a model call could be part of."""
        current = self.current
        return (
            current >= FIRST_GAP
            or current == OPTIMIZER  # left open by an exception: no optimizer calls a model by itself
            or (current == EVALUATION and self.evaluating)
        )

    def event(self, kind: str, **detail: Any) -> None:
        """Notes that something happened in the present step; a process that never trains has none."""
        if self._begun:
            self.events.append((self.clock(), self.steps, kind, detail))

    def rest_until(self, step: int) -> None:
        """`on_boundary` need not be called before so many steps have finished: the hooks may look
        at nothing but the time until then. 0: after each step."""
        self.boundary_due = step
        settle(self)

    # -- steps

    def step_marked(self) -> None:
        """The script itself says that a step ends here."""
        self._settle_evaluation(False)
        self.finder.marked = True
        if self._begun:
            self._close(self._mark())
            self._stop_if_done()
        else:
            self._begin()

    def finish(self) -> None:
        """The script ends: the last step ends with its last optimizer step."""
        if self.thread:
            self.switch_off()
            self.finder.finish()

    def _begin(self) -> None:
        """The first training event: what went before belongs to no step."""
        self._begun = True
        self.log.clear()
        self.run_into(self.current)
        self.log.close(self._mark())
        if self.on_begin is not None:
            self.on_begin()

    def _mark(self, where_stepped: bool = False) -> Mark:
        mark = (
            self.clock(),
            self.samples,
            self.tokens,
            self.backward_passes,
            self._seen.copy() if self._seen else NOTHING_SEEN,
            where_stepped,
        )
        self.log.append(mark)
        return mark

    def _close(self, mark: Mark) -> None:
        self.log.close(mark)
        self.steps = steps = self.steps + 1
        self._counted = mark[1]
        if steps >= self._next_care:
            self._next_care = take_care(self, steps)

    def _settle_evaluation(self, evaluating: bool) -> None:
        """Decides whose the gap after a gradient-free call was, now that the next event is known."""
        if not evaluating:
            self.evaluating = False
        if self.current == GAP_AFTER_EVALUATION:
            target = EVALUATION if evaluating else GAP_AFTER_REST
            self.current = GAP_AFTER_REST
            if self._begun:
                self.log.append(self.clock() * WIDTH + target + SETTLED)
        elif self.current == EVALUATION and not evaluating:
            self.run_into(GAP_AFTER_REST)

    def _drop_stale_optimizer(self) -> None:
        """Closes an optimizer span that an exception left open: no optimizer calls a model by itself."""
        self.in_step = 0
        self.leave(OPTIMIZER, GAP_AFTER_REST)

    # -- stopping

    def _stop_if_done(self) -> None:
        if self.stop_after and self.steps >= self.stop_after:
            raise SystemExit(0)

    def _stop_if_next_is_known(self) -> None:
        """A loop without a loader ends its last step where the next forward begins."""
        last = self.steps == self.stop_after - 1
        if last and not self.finder.asks and self.finder.looks_complete():
            self.finder.finish()
            raise SystemExit(0)
