"""The log that the training thread writes, and how the flusher's thread reads steps out of it.

What costs there is every bytecode, as the caches are cold; so it appends one number per event, and all
arithmetic is done here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from diagnose.core.ledger import (
    COMMUNICATION,
    DATA_WAIT,
    FIRST_GAP,
    GAP_AFTER_EVALUATION,
    GAP_AFTER_REST,
    SLOTS,
)
from diagnose.core.places import coded, place_of

WIDTH = 128
"""An entry of the log is `time_ns * WIDTH + code`; the code is the slot that time runs into from then on,
possibly plus one of these two."""
STEPPED = 64
"""An optimizer step ended here; the script may end before another does."""
SETTLED = 32
"""The gap after an evaluation, since the last mark, belongs to this slot; what follows to no hook."""
ARRIVED = 31
"""Instead of a slot: this rank's gradients are all there, and what follows waits for those of others."""


Seen = dict[int, tuple[int, int]]
"""Samples and tokens that each model has been called with, by its identity."""

Mark = tuple[int, int, int, int, Seen, bool]
"""A place in the log where a step may end: time, then totals: samples and tokens loaded, backward passes,
what the models have seen. The last says that it stands for the place where an optimizer step last ended."""

Sample = tuple[int, int, int, tuple[int, ...]]
"""When a sample was taken, the nanoseconds that it stands for, the ticks that it stands for, and slot and
stack; see `_frames`."""

MOST_SAMPLES = 100_000
"""Samples that wait to be read, or for their step to end: a step that never ends has no more of them."""

MOST_PLACES = 64
"""A sample that stands for a long time counts at so many moments of it."""

NEVER_NS = 1 << 200
"""Later than all times, also those of which `_device_ledger` makes two."""

Totals = tuple[int, int, int, int, int, list[int], Seen]
"""All totals at a mark: time, samples, tokens, backward passes, spans, nanoseconds by slot, models."""


class Log:
    """What the training thread has written and nobody has read yet.

    Attributes:
        append: Adds an entry: a number, or a `Mark`. Of the training thread.
        meetings: When this rank's gradients of a backward pass were there, and when those of all were, as
            far as has been read. The flusher takes them.
        batches: Training batches asked for, as far as has been read.
        sampled: What the sampler has taken and nobody has read.
        placed: Step, slot and place (see `core.places`), stack and nanoseconds of samples of finished
            steps. The flusher takes them.
    """

    __slots__ = (
        "_arrived_ns",
        "_base",
        "_cells",
        "_closed",
        "_current",
        "_entries",
        "_floor",
        "_last_ns",
        "_marked",
        "_standing",
        "_steps",
        "_switches",
        "_tail",
        "_times",
        "append",
        "batches",
        "close",
        "meetings",
        "placed",
        "sampled",
    )

    def __init__(self) -> None:
        self._entries: deque[int | Mark] = deque()
        self._closed: deque[Mark] = deque()
        self._cells: list[CellType] = []
        self.sampled: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self.append: Callable[[int | Mark], None] = self._entries.append
        self.close: Callable[[Mark], None] = self._closed.append
        self.clear()

    def kept_by(self, function: Callable[..., Any]) -> None:
        """Tells of a wrapper that keeps `append` in a variable `log` of its closure: what every call of it
        looks up would cost every step, so `divert` changes the variable."""
        assert isinstance(function, FunctionType) and function.__closure__ is not None
        self._cells.append(function.__closure__[function.__code__.co_freevars.index("log")])

    def divert(self, append: Callable[[int | Mark], None], close: Callable[[Mark], None]) -> None:
        """From now on `append` and `close` are these, wherever they are kept; each must call the one that
        it takes the place of. Lasts until `clear`."""
        self.append, self.close = append, close
        for cell in self._cells:
            cell.cell_contents = append

    def clear(self) -> None:
        """Forgets everything, a diversion too. The bound methods that others hold stay valid."""
        self.divert(self._entries.append, self._closed.append)
        self._entries.clear()
        self._closed.clear()
        self._marked: deque[tuple[Mark, Totals]] = deque()
        self._base: Totals | None = None
        self._times = [0] * len(SLOTS)
        self._current = GAP_AFTER_REST
        self._last_ns = 0
        self._floor = 0
        self._arrived_ns = 0
        self._switches = 0
        self.meetings: deque[tuple[int, int]] = deque()
        self._tail = (0, self._times.copy())
        self._steps = 0
        self._standing: deque[tuple[int, int, int, Sample]] = deque(maxlen=MOST_SAMPLES)
        self.batches = 0
        self.sampled.clear()
        self.placed: deque[tuple[int, int, tuple[int, ...], int]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def has_rows(self) -> bool:
        """Whether `take_rows` has any to return."""
        self._read()
        return len(self._closed) > (self._base is None)

    def take_rows(self, at_most: int) -> list[tuple[int, ...]]:
        """Returns the next finished steps, in the order of `core.ledger.COLUMNS`."""
        rows: list[tuple[int, ...]] = []
        closed = len(self._closed)  # before reading: what is closed now has been marked before
        self._read()
        while closed and len(rows) < at_most:
            closed -= 1
            totals = self._totals(self._closed.popleft())
            if self._base is not None:
                rows.append(_row(self._base, totals))
                self._place(self._base[5], totals[0])
                self._steps += 1
            self._base = totals
        return rows

    def _totals(self, closed: Mark) -> Totals:
        while True:
            mark, totals = self._marked.popleft()
            if mark is closed:
                return totals

    def _read(self) -> None:
        """Charges the time between any two entries to the slot that ran."""
        take, times = self._entries.popleft, self._times
        current, last_ns = self._current, self._last_ns
        sample_ns = self.sampled[0][0] if self.sampled else NEVER_NS
        for _ in range(len(self._entries)):
            entry = take()
            if isinstance(entry, tuple):
                now_ns = entry[0]
                if now_ns >= sample_ns:
                    sample_ns = self._stand(now_ns, current, last_ns)
                times[current] += now_ns - last_ns
                last_ns = now_ns
                # What lies before a mark may belong to a step that has ended: it is settled.
                self._floor = times[GAP_AFTER_EVALUATION]
                end_ns, until = self._tail if entry[5] else (now_ns, times.copy())
                self._marked.append((entry, (end_ns, *entry[1:4], self._switches // 2, until, entry[4])))
                continue
            now_ns = entry // WIDTH
            code = entry % WIDTH
            if now_ns >= sample_ns:
                sample_ns = self._stand(now_ns, current, last_ns)
            times[current] += now_ns - last_ns
            last_ns = now_ns
            if self._arrived_ns:
                self.meetings.append((self._arrived_ns, now_ns))
                self._arrived_ns = 0
            if code == ARRIVED:
                self._arrived_ns = now_ns
                code = COMMUNICATION
            if code < SETTLED:
                self._switches += 1
                if code == DATA_WAIT and current >= FIRST_GAP:
                    self.batches += 1
                current = code
            elif code >= STEPPED:
                self._switches += 1
                current = code - STEPPED
                self._tail = (now_ns, times.copy())
            else:
                self._move(code - SETTLED)
                times[code - SETTLED] += times[GAP_AFTER_EVALUATION] - self._floor
                times[GAP_AFTER_EVALUATION] = self._floor
                current = GAP_AFTER_REST
        self._current, self._last_ns = current, last_ns

    def _stand(self, now_ns: int, current: int, last_ns: int) -> int:
        """Notes of the samples taken until now how much time their slot had had by then; returns when the
        next one was taken."""
        sampled = self.sampled
        while sampled and sampled[0][0] <= now_ns:
            sample = sampled.popleft()
            slot = sample[3][0]
            own_ns = self._times[slot] + (max(0, sample[0] - last_ns) if slot == current else 0)
            self._standing.append((sample[0], slot, own_ns, sample))
        return sampled[0][0] if sampled else NEVER_NS

    def _move(self, target: int) -> None:
        """What was sampled in the gap after an evaluation since the last mark belongs to `target`."""
        more_ns = self._times[target] - self._floor
        for place, (time_ns, slot, own_ns, sample) in enumerate(self._standing):
            if slot == GAP_AFTER_EVALUATION and own_ns > self._floor:
                self._standing[place] = (time_ns, target, own_ns + more_ns, sample)

    def _place(self, base_ns: list[int], end_ns: int) -> None:
        """Places the samples of a step that has ended.

        Args:
            base_ns: Totals by slot where it began.
            end_ns: When it ended.
        """
        standing = self._standing
        while standing and standing[0][0] <= end_ns:
            _, slot, own_ns, (_, weight_ns, ticks, key) = standing.popleft()
            pieces = min(ticks, MOST_PLACES)
            for piece in range(pieces):
                place = place_of(own_ns - base_ns[slot] - piece * weight_ns // pieces)
                self.placed.append((self._steps, coded(slot, place), key[1:], weight_ns // pieces))


def _row(was: Totals, now: Totals) -> tuple[int, ...]:
    """Returns the step between two marks, in the order of `core.ledger.COLUMNS`."""
    samples, tokens = now[1] - was[1], now[2] - was[2]
    if not samples:
        # No loader told: a GAN shows its discriminator two batches a step and its generator one.
        seen: list[Any] = [
            (count - was[6].get(model, (0, 0))[0], ids - was[6].get(model, (0, 0))[1])
            for model, (count, ids) in now[6].items()
        ]
        samples, tokens = min((pair for pair in seen if pair[0]), default=(0, 0))
    times = (late - early for late, early in zip(now[5], was[5], strict=True))
    return (now[0], samples, tokens, now[3] - was[3], now[4] - was[4], *times)
