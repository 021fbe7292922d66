"""The ledger by the device's clock: an event where the training thread changes its slot, read when passed.

An event takes its place in the main stream behind all that was launched before it. The device passes it
when that is done, and not before it was recorded. So of two neighbours, the time between them by the
device's clock is the time of what was launched between them, plus the time in which the device had nothing
to do *while the host was between them*: work is charged where it was launched, idleness to what the host
did meanwhile, and a backlog of the backward pass never to the wait for data in which it is worked off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from diagnose.core.ledger import COMMUNICATION, COPY, COUNTS
from diagnose.hooks._device import Device, Event
from diagnose.hooks._log import ARRIVED, NEVER_NS, STEPPED, WIDTH, Log, Mark, Seen

MAX_EVENTS = 16_384
"""Half a second, the time between two looks, of a step each millisecond; made as they are needed."""

MAX_WAITING = 8 * MAX_EVENTS
"""Entries that wait to be read. The device has not passed an event for so long: it hangs, or the stream is
one that nobody works through."""

SHORTEST_NS = 4_000
"""Torch launches nothing in less: of two changes of the slot with less between them, the second needs no
event of its own, save after what is in `WAITS`. Recording the first takes half of it."""

WAITS = frozenset(code + stepped for code in (COMMUNICATION, ARRIVED, COPY) for stepped in (0, STEPPED))
"""Codes of an entry after which all that happens may be that the stream is told to wait for another, in 1
to 2 us. Without an event of its own, what the device waits there is charged to what follows."""

LOOK_AHEAD = 64
"""Events on one stream are passed in order: if this one has been, so have all before it."""

APART = 10_000
"""The clocks run apart by one part in so many at most: two oscillators, each off by some 50 us a second."""

BESIDE = 64
"""A time of this log is the device's, plus the part in which that may have been idle, times two to this."""

NO_EVENT: Event = None
NO_MODELS: Seen = {}
Entry = int | Mark


class DeviceLedger:
    """Records events beside the entries of a log, and reads from them the same steps by the device's clock.

    One thread records, the training thread, which makes this, too; one reads, the flusher's.

    Args:
        device: The device.
        log: The host's log, which this diverts.
        now_ns: The host's time.
        steps: Steps that have ended.
        between: Whether one has ended just now. In a loop that asks no loader that is known only where the
            next has stepped: then the first row is of the step after that one, whose beginning is seen.
        broke: Told which function an exception ended that is being handled.

    Attributes:
        events: Events recorded.
        event_ns: What recording one takes that has been used before, on average over the first of them.
        new_events: How many were made, which the driver does where one is first recorded.
        new_event_ns: What recording one takes then.
        on: Whether events are recorded. Nothing turns it on again.
        gave_up: Why not, in words; empty where nothing went wrong.
    """

    def __init__(
        self,
        device: Device,
        log: Log,
        broke: Callable[[Callable[..., Any]], None],
        *,
        now_ns: int,
        steps: int,
        between: bool,
    ) -> None:
        self.events = 0
        self.event_ns = 0.0
        self.new_events = 0
        self.new_event_ns = 0.0
        self._timed = 0
        self.on = True
        self.gave_up = ""
        self._device = device
        self._broke = broke
        self._log = log
        self._next = steps if between else steps + 1
        self._waiting: deque[list[Any]] = deque()  # of an entry and its event
        self._ends: deque[Mark] = deque()
        self._free: deque[Event] = deque()
        self._by_device = Log()  # of times as `_unpacked` reads them
        self._pairs: deque[tuple[Mark, Mark]] = deque()
        self._reading = False
        self._last: Event = NO_EVENT
        self._last_ns = 0
        self._now_ns = 0
        self._dry_ns = 0
        self._holes = 0
        self._offset = _Offset()
        self._host = log.append, log.close
        log.divert(self._recording(now_ns, between), self._close)

    # -- the training thread

    def _recording(self, begun_ns: int, between: bool) -> Callable[[Entry], None]:
        device, wait, free = self._device, self._waiting.append, self._free
        record, is_capturing = device.record, device.is_capturing
        keep = self._host[0]
        stream = device.current_stream()
        last, last_ns = device.new_event(), begun_ns
        self.new_events = 1
        running = 0  # the code of the last entry that was no mark: any that is not in `WAITS`
        begin: Mark = (begun_ns, 0, 0, 0, NO_MODELS, False)
        record(last, stream)
        wait([begin, last])
        if between:
            self._ends.append(begin)

        def append(entry: Entry) -> None:
            nonlocal stream, last, last_ns, running
            keep(entry)
            try:
                event = NO_EVENT
                # First what is allocated: that may start the collector, whose pause comes in here, too, and
                # would put an event that is already chosen into two places.
                waiting = [entry, NO_EVENT]
                ended = running
                if isinstance(entry, tuple):
                    now_ns = entry[0]
                else:
                    now_ns, running = entry // WIDTH, entry % WIDTH
                    if running >= STEPPED:
                        # Optimizers step in the main stream; a batch may be asked for in that of copies.
                        current = device.current_stream()
                        if current != stream and not is_capturing():
                            # Two streams have no common order: a hole, and on with the new one.
                            wait(waiting)
                            stream, last = current, NO_EVENT
                            return
                if last is not NO_EVENT and now_ns - last_ns < SHORTEST_NS and ended not in WAITS:
                    event = last
                elif is_capturing():
                    last = NO_EVENT
                else:
                    is_new = not free
                    if not is_new:
                        event = free.popleft()
                    elif self.new_events < MAX_EVENTS:
                        event = device.new_event()
                        self.new_events += 1
                    if event is not NO_EVENT:
                        if is_new or self._timed < LOOK_AHEAD:
                            before_ns = perf_counter_ns()
                            record(event, stream)
                            self._learn(perf_counter_ns() - before_ns, is_new)
                        else:
                            record(event, stream)
                        self.events += 1
                        last_ns = now_ns
                    last = event
                waiting[1] = event
                wait(waiting)
                if len(self._waiting) > MAX_WAITING:
                    self._give_up("the device has passed no event for too long")
            except Exception:  # noqa: BLE001 (a hook meets the script, which goes on by the host's clock)
                self._give_up("an event could not be recorded")
                self._broke(append)

        return append

    def _learn(self, took_ns: int, is_new: bool) -> None:
        if is_new:
            self.new_event_ns += (took_ns - self.new_event_ns) / (self.new_events - 1)  # not of the first
        else:
            self._timed += 1
            self.event_ns += (took_ns - self.event_ns) / self._timed

    def _close(self, mark: Mark) -> None:
        self._host[1](mark)
        self._ends.append(mark)

    def _give_up(self, why: str) -> None:
        self.gave_up = self.gave_up or why
        self.stop()

    def stop(self) -> None:
        """Ends the recording; any thread may call it. What was recorded can still be read."""
        if self.on:
            self.on = False
            self._log.divert(*self._host)

    # -- the flusher's thread

    def facts(self) -> dict[str, Any]:
        """Returns what is known of the recording itself, for the run's metadata."""
        return {
            "events": self.events,
            "event_ns": round(self.event_ns),
            "new_events": self.new_events,
            "new_event_ns": round(self.new_event_ns),
            "gave_up": self.gave_up,
        }

    def take_rows(self, at_most: int) -> tuple[int, list[tuple[int, ...]]]:
        """Returns the next steps by the device's clock, and the number of the first of them.

        A row is in the order of `core.ledger.DEVICE_COLUMNS`. Steps before the first row have none; from
        then on each gets one when the device has passed its end.
        """
        try:
            if self._waiting and not self._reading:
                self._device.begin_reading()
                self._reading = True
            self._read()
        except Exception:  # noqa: BLE001 (the script meets the driver's errors itself, and better)
            self._give_up("the device's events could not be read")
            self._waiting.clear()
            self._broke(self.take_rows)
        self._end_steps()
        rows = self._by_device.take_rows(at_most)
        self._by_device.meetings.clear()
        first, self._next = self._next, self._next + len(rows)
        return first, [_unpacked(row) for row in rows]

    def _read(self) -> None:
        waiting = self._waiting
        while waiting:
            event = waiting[0][1]
            passed = 1 if event is NO_EVENT or event is self._last else self._passed()
            if not passed:
                return
            self._charge(passed)

    def _passed(self) -> int:
        """How many of the waiting entries the device has passed for certain, at least."""
        has_passed = self._device.has_passed
        waiting = self._waiting  # by number: the training thread adds to it, which no iterator survives
        ahead = [waiting[place][1] for place in range(min(len(waiting), LOOK_AHEAD))]
        # The last may have been recorded before those of a collection that stand before it; see `_charge`.
        if NO_EVENT not in ahead and all(map(has_passed, ahead[-2:])):
            return len(ahead)
        return int(has_passed(ahead[0]))

    def _charge(self, count: int) -> None:
        """Charges the first of the waiting entries, which the device has passed. A script whose step the
        interpreter holds up waits for this thread meanwhile: so all of them in one loop."""
        take, free, append = self._waiting.popleft, self._free.append, self._by_device.append
        offset, ms_between = self._offset, self._device.ms_between
        last, last_ns, now_ns, dry_ns = self._last, self._last_ns, self._now_ns, self._dry_ns
        for _ in range(count):
            entry, event = take()
            host_ns = entry[0] if isinstance(entry, tuple) else entry // WIDTH
            if event is NO_EVENT or last is NO_EVENT:
                # Without both of its ends nothing is known of the time between: the step is the host's.
                self._holes += 1
                now_ns += max(0, host_ns - last_ns)
                last_ns = host_ns
                if event is not NO_EVENT:
                    offset.forget()
                    offset.see(host_ns, now_ns)
                if event is not last:
                    if last is not NO_EVENT:
                        free(last)
                    last = event
            elif event is not last:
                took_ns = round(1e6 * ms_between(last, event))
                now_ns += took_ns
                # Idleness ends at the host's next change of the slot at the latest, and begins when the
                # device has come to the one before.
                idle_ns = min(took_ns, host_ns - last_ns - offset.lag_ns)
                if idle_ns > 0:
                    dry_ns += idle_ns
                elif took_ns < 0:
                    # A collection that began between an event and its entry has events of its own, which
                    # then stand before it: the next time is longer by as much as this is negative.
                    self._holes += 1
                free(last)
                last = event
                last_ns = host_ns
                offset.see(host_ns, now_ns)
            time = now_ns + (dry_ns << BESIDE)
            if isinstance(entry, tuple):
                # Where the host's log counts samples, this counts holes.
                on_device = (time, self._holes, 0, 0, NO_MODELS, entry[5])
                append(on_device)
                self._pairs.append((entry, on_device))
            else:
                append(time * WIDTH + entry % WIDTH)
        self._last, self._last_ns, self._now_ns, self._dry_ns = last, last_ns, now_ns, dry_ns

    def _end_steps(self) -> None:
        """Closes the marks that have been read and that end steps on the host."""
        ends, pairs = self._ends, self._pairs
        while ends and pairs:
            mark, on_device = pairs[0]
            if mark is ends[0]:
                self._by_device.close(on_device)
                ends.popleft()
                pairs.popleft()
            else:
                pairs.popleft()  # marked, and not an end


def _unpacked(row: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a row of `DEVICE_COLUMNS`: holes, the device's time by slot, and what was idle of that."""
    both = row[len(COUNTS) :]
    half = 1 << BESIDE - 1  # times may be negative, by the events of a collection
    times = [(slot + half) % (1 << BESIDE) - half if slot else 0 for slot in both]
    return row[1], *times, *(slot - time >> BESIDE for slot, time in zip(both, times, strict=True))


class _Offset:
    """How far the device is behind the host.

    Their clocks have no common zero, but no event is passed before it is recorded: the least difference
    seen is that of an event which met a device with nothing to do. By now it may have grown by what the
    clocks run apart. So the lag is what this says at least; where the device always had something to do, it
    is larger.
    """

    def __init__(self) -> None:
        self.lag_ns = 0
        self._least_ns = NEVER_NS
        self._at_ns = 0

    def see(self, host_ns: int, device_ns: int) -> None:
        """An event was recorded and passed at these times."""
        apart_ns = device_ns - host_ns
        least_ns = self._least_ns + (host_ns - self._at_ns) // APART
        if apart_ns < least_ns:
            least_ns = self._least_ns = apart_ns
            self._at_ns = host_ns
        self.lag_ns = apart_ns - least_ns

    def forget(self) -> None:
        """What was seen is of another count of the device's time."""
        self._least_ns = NEVER_NS
