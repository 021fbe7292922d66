"""The ledger of the training thread: charges every nanosecond to one slot, and cuts it into steps.

Everything here runs on the training thread, inside the user's step, where the caches are cold and every
bytecode counts. So: running totals instead of sums per step, no locks, no input or output; the flusher's
thread takes what has gathered and does the arithmetic.
"""

from __future__ import annotations

import signal
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from types import TracebackType
from typing import Any

from diagnose.core.ledger import FIRST_GAP, GAP_AFTER, SLOT_OF, SLOTS
from diagnose.hooks._frames import user_frame
from diagnose.hooks._steps import StepFinder

EVALUATION = SLOT_OF["evaluation"]
OPTIMIZER = SLOT_OF["optimizer"]
GAP_AFTER_EVALUATION = SLOT_OF["gap_after_evaluation"]
GAP_AFTER_REST = SLOT_OF["gap_after_rest"]

UNSETTLED = (GAP_AFTER_EVALUATION, EVALUATION)
"""Slots in which no training event can begin: it ends the evaluation, and says whose the gap was."""

UNUSED, EVALUATED, TRAINED = range(3)

ROTATE_AT = frozenset((1, 2, 3, 5, 8, 12, 16, 20))
"""Steps before which the sampled lines begin a new bucket, so that a warm-up can be cut off there."""

INSPECT_AFTER = 10
"""Steps after which the live objects of the loop have all been seen, and are looked at once."""

EVERY_SITE_UNTIL = 64
"""Call sites are looked up in each of this many first calls, then in one of as many."""

COUNTERS = ("batches", "collates", "collate_ns", "collated_wait_ns", "asked", "ready")
"""Totals of the input pipeline: training batches asked for; batches whose collating was timed, the time it
took and the whole wait for them; batches asked of workers, and finished ones that were waiting then."""

Samples = dict[tuple[int, ...], int]
"""Sampled nanoseconds by slot and stack: the slot, then `id(code)` and instruction of each user frame."""

Mark = tuple[int, int, int, int, int, list[int], dict[int, tuple[int, int]]]
"""The running totals at one instant: time, samples and tokens loaded, backward passes, spans, nanoseconds
by slot, and samples and tokens that each model has seen."""


NOTHING_SEEN: dict[int, tuple[int, int]] = {}
"""What a mark holds of the models where a loader tells the samples; one for all, never written to."""


class Recorder:
    """Charges the training thread's time to the slots of `core.ledger`.

    Attributes:
        thread: Identity of the training thread; others pass through unmeasured. 0 while measuring is off.
        current: The slot that time is running into.
        last: When `times` was last brought up to date.
        times: Nanoseconds by slot since the beginning.
        alert: Whether the next event has more to do than to be charged: an optimizer has stepped, an
            evaluation
            is or was on, no loader counts the samples. The hooks look at nothing else while it is off.
        in_step: Number of optimizer steps that are running; their closures' events end no step.
        spans: Number of spans opened.
        steps: Number of finished steps.
        samples: Samples that loaders have handed over for training, and likewise `tokens`.
        backward_passes: Number of outermost backward passes.
        evaluating: Whether the model is in evaluation mode between training steps.
        batch_use: What the last batch of a training loader was used for so far: `UNUSED`, `EVALUATED` or
            `TRAINED`.
        models: Identities of the modules that were called in training.
        counters: Running totals, see `COUNTERS`.
        pending: Sampled stacks of the unfinished step; the sampler adds to it.
        rotate_due: Set by the flusher: the next finished step hands its sampled stacks over.
        buckets: `(first step, samples)` of sampled stacks that belong to finished steps.
        sites: How often each line of the user's code asked for a batch, called a model, began a backward.
        events: `(time, step, kind, detail)` of what happened besides.
        notes: What went wrong with measuring, in words.
        facts: What hooks have learnt of the program besides times, by name; JSON's types only.
        modules: Weak references to the modules called outermost in training, in order of appearance.
        inspections: Called once each, on the training thread, after step `INSPECT_AFTER`: they look at
            live objects and add to `facts`.
        on_backward: Called with the arguments of some of the outermost backward passes, before them.
    """

    __slots__ = (
        "_base",
        "_begun",
        "_bucket",
        "_bucket_first",
        "_counted",
        "_floor",
        "_marks",
        "_seen",
        "alert",
        "backward_passes",
        "batch_use",
        "buckets",
        "clock",
        "counters",
        "current",
        "evaluating",
        "events",
        "facts",
        "finder",
        "in_step",
        "inspections",
        "last",
        "max_steps",
        "models",
        "modules",
        "notes",
        "on_backward",
        "on_begin",
        "pending",
        "rotate_at",
        "rotate_due",
        "samples",
        "sites",
        "spans",
        "steps",
        "stop_after",
        "thread",
        "times",
        "tokens",
    )

    def __init__(self, *, max_steps: int = 0, stop_after: int = 0, warmup: int | None = None) -> None:
        self.clock: Callable[[], int] = perf_counter_ns
        self.max_steps = max_steps
        self.stop_after = stop_after
        self.rotate_at = ROTATE_AT | ({warmup} if warmup is not None else set())
        self.thread = get_ident()
        self.on_begin: Callable[[], None] | None = None
        self.on_backward: Callable[[tuple[Any, ...]], None] | None = None
        self.inspections: list[Callable[[], None]] = []
        self.times: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forgets everything measured: a forked child begins with an empty ledger."""
        self.current = GAP_AFTER_REST
        self.last = 0
        self.times[:] = [0] * len(SLOTS)  # in place: the wrappers hold it
        self.alert = True
        self.in_step = 0
        self.spans = 0
        self.steps = 0
        self.samples = 0
        self.tokens = 0
        self.backward_passes = 0
        self.evaluating = False
        self.batch_use = TRAINED
        self.models: set[int] = set()
        self.modules: list[weakref.ref[Any]] = []
        self.facts: dict[str, Any] = {}
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.pending: Samples = {}
        self.rotate_due = False
        self.buckets: deque[tuple[int, Samples]] = deque()
        self.sites: dict[tuple[str, int, int], int] = {}
        self.events: deque[tuple[int, int, str, dict[str, Any]]] = deque()
        self.notes: deque[str] = deque()
        self.finder = StepFinder(self._mark, self._tail, self._close)
        self._begun = False
        self._marks: deque[Mark] = deque()
        self._base: Mark | None = None
        self._bucket: Samples = {}
        self._bucket_first = 0
        self._seen: dict[int, tuple[int, int]] = {}
        self._floor = 0
        self._counted = 0

    # -- spans

    def on_training_thread(self) -> bool:
        """Whether the calling thread is the one that is measured."""
        return get_ident() == self.thread

    def claim_thread(self) -> None:
        """Makes the calling thread the measured one if no other has trained: not all loops run in the main
        one."""
        if self.thread and not self._begun and get_ident() != self.thread:
            self.thread = get_ident()

    def push(self, slot: int) -> int:
        """Opens a span on the training thread; returns the slot it interrupts, which `leave` wants back."""
        now = self.clock()
        interrupted = self.current
        self.times[interrupted] += now - self.last
        self.last = now
        self.current = slot
        self.spans += 1
        return interrupted

    def leave(self, slot: int, interrupted: int) -> None:
        """Closes the span in `slot`, and any that an exception left open inside it."""
        now = self.clock()
        self.times[self.current] += now - self.last
        self.last = now
        self.current = GAP_AFTER[slot] if interrupted >= FIRST_GAP else interrupted

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
        if _from_signal_handler(sys.exc_info()[2]):
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
        self.finder.batch_asked()
        self.alert = True  # until a batch has come and told its size
        if self.stop_after:
            self._stop_if_done()

    def model_appears(self, model: Any) -> None:
        """A module is called for the first time. One in evaluation mode is a teacher, not in training."""
        if not model.training:
            return
        # `eval()` may be called on what DDP or `torch.compile` wraps.
        parts = (model, getattr(model, "module", None), getattr(model, "_orig_mod", None))
        self.models.update(id(part) for part in parts if part is not None)
        self.modules.append(weakref.ref(model))

    def forward_begins(self, model: Any, size: Callable[[], tuple[int, int]]) -> None:
        """The outermost training-mode call of a model begins. Needed only while `alert` is on.

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

    def work_begins(self) -> None:
        """A training forward, a backward or an optimizer step begins. Needed only while `alert` is on."""
        if self.evaluating or self.current in UNSETTLED:
            self._settle_evaluation(False)
        if not self._begun:
            self._begin()
        if not self.in_step:
            self.finder.work_begins()
            if self.finder.provisional is not None:
                self._counted = self.samples  # of the step that may begin here, no loader has told yet
            if self.stop_after:
                self._stop_if_next_is_known()

    def optimizer_stepped(self, optimizer: int) -> None:
        """The outermost `step()` of an optimizer ended, or a scaler skipped it."""
        self.finder.optimizer_stepped(optimizer)
        self.alert = True
        if self.stop_after:
            self._stop_if_done()

    def evaluation_begins(self) -> None:
        """A gradient-free model call, or a batch for one: the gap since the last one belongs to it too."""
        self.alert = True
        if self.batch_use == UNUSED:
            self.batch_use = EVALUATED
        if self.current == GAP_AFTER_EVALUATION:
            self._settle_evaluation(True)

    def evaluation_region(self, inside: bool) -> None:
        """The model was switched to or from evaluation mode: gaps belong to `evaluation` in between."""
        if inside == self.evaluating or not self._begun:
            return
        if inside and self.current >= FIRST_GAP:
            if self.current == GAP_AFTER_EVALUATION:
                self._settle_evaluation(True)
            self._advance()
            self.current = EVALUATION
            self.evaluating = self.alert = True
        elif not inside:
            self._advance()
            self.evaluating = False
            if self.current == EVALUATION:
                self.current = GAP_AFTER_REST

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
        """Notes that something happened in the present step."""
        self.events.append((self.clock(), self.steps, kind, detail))

    def site(self, kind: str) -> None:
        """Remembers which line of the user's code made this call.

        Args:
            kind: `next`, `forward`, `backward` or `optimizer`.
        """
        frame = user_frame(sys._getframe(1))
        if frame is not None:
            key = (kind, frame[0], frame[1])
            self.sites[key] = self.sites.get(key, 0) + 1

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
            self.thread = 0
            # What was sampled since the last step ended is not part of it.
            self.pending.clear()
            self.finder.finish(self._mark_at)
        self._take_bucket()

    def take_rows(self, at_most: int) -> list[tuple[int, ...]]:
        """Returns the next finished steps, in the order of `core.ledger.COLUMNS`. For the flusher's
        thread."""
        rows: list[tuple[int, ...]] = []
        base = self._base
        while self._marks and len(rows) < at_most:
            mark = self._marks.popleft()
            if base is not None:
                rows.append(_row(base, mark))
            base = self._base = mark
        return rows

    def has_rows(self) -> bool:
        """Whether `take_rows` has any to return."""
        return len(self._marks) > (self._base is None)

    def _begin(self) -> None:
        """The first training event: what went before belongs to no step."""
        self._begun = True
        self.last = self.clock()
        self.pending.clear()
        self._marks.append(self._mark())
        if self.on_begin is not None:
            self.on_begin()

    def _advance(self) -> int:
        now = self.clock()
        self.times[self.current] += now - self.last
        self.last = now
        return now

    def _mark(self) -> Mark:
        now = self.clock()
        times = self.times
        times[self.current] += now - self.last
        self.last = now
        self._floor = times[GAP_AFTER_EVALUATION]
        seen = self._seen.copy() if self._seen else NOTHING_SEEN
        return (now, self.samples, self.tokens, self.backward_passes, self.spans, times.copy(), seen)

    def _tail(self) -> tuple[int, list[int]]:
        """The instant just charged to, and the time by slot: all that still changes after the last step."""
        return self.last, self.times.copy()

    def _mark_at(self, tail: tuple[int, list[int]]) -> Mark:
        return (tail[0], *self._mark()[1:5], tail[1], self._seen)

    def _close(self, mark: Mark) -> None:
        self._marks.append(mark)
        self.steps = steps = self.steps + 1
        self._counted = mark[1]
        if self.pending:
            pending, self.pending = self.pending, {}
            bucket = self._bucket
            for key, weight in pending.items():
                bucket[key] = bucket.get(key, 0) + weight
        if self.rotate_due or steps in self.rotate_at:
            self.rotate_due = False
            self._take_bucket()
        if steps == INSPECT_AFTER:
            for inspect in self.inspections:
                self.guarded(inspect)
        if steps == self.max_steps:
            self.thread = 0

    def _take_bucket(self) -> None:
        """Hands the sampled stacks of finished steps over to the flusher."""
        if self._bucket:
            self.buckets.append((self._bucket_first, self._bucket))
            self._bucket = {}
        self._bucket_first = self.steps

    def _settle_evaluation(self, evaluating: bool) -> None:
        """Decides whose the gap after a gradient-free call was, now that the next event is known."""
        if self.current == GAP_AFTER_EVALUATION:
            self._advance()
            self.current = GAP_AFTER_REST
            target = EVALUATION if evaluating else GAP_AFTER_REST
            # What lies before the last mark may belong to a step that has ended.
            self.times[target] += self.times[GAP_AFTER_EVALUATION] - self._floor
            self.times[GAP_AFTER_EVALUATION] = self._floor
            # `list` first: the sampler's signal may add a key at any moment.
            for key in [key for key in list(self.pending) if key[0] == GAP_AFTER_EVALUATION]:
                moved = (target, *key[1:])
                self.pending[moved] = self.pending.get(moved, 0) + self.pending.pop(key)
        elif self.current == EVALUATION and not evaluating:
            self._advance()
            self.evaluating = False
            self.current = GAP_AFTER_REST

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
            self.finder.finish(self._mark_at)
            raise SystemExit(0)


def _from_signal_handler(trace: TracebackType | None) -> bool:
    """Whether an exception came out of a handler, not ours, that is installed for a signal."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [
        getattr(handler, "__code__", None)
        for handler in handlers
        if not getattr(handler, "__module__", "").startswith("diagnose.")
    ]
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _row(was: Mark, now: Mark) -> tuple[int, ...]:
    """Returns the step between two marks, in the order of `core.ledger.COLUMNS`."""
    samples, tokens = now[1] - was[1], now[2] - was[2]
    if not samples:
        # No loader told: a GAN shows its discriminator two batches a step and its generator one.
        seen = [
            (count - was[6].get(model, (0, 0))[0], ids - was[6].get(model, (0, 0))[1])
            for model, (count, ids) in now[6].items()
        ]
        samples, tokens = min((pair for pair in seen if pair[0]), default=(0, 0))
    times = (late - early for late, early in zip(now[5], was[5], strict=True))
    return (now[0], samples, tokens, now[3] - was[3], now[4] - was[4], *times)
