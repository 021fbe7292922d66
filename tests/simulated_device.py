"""A device that works through its streams while the host runs ahead, on a clock of the test's own.

It also keeps the truth that a ledger is to find: for each instant of the main stream, which of the host's
doings it was spent on.
"""

from __future__ import annotations

import random
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import FakeClock

US = 1_000
MS = 1_000_000


class WouldWait(AssertionError):
    """Something on the step's path waits for the device."""


@dataclass(eq=False)
class Stream:
    """A queue; `free_ns` is when its last work is done, by the host's clock."""

    name: str
    free_ns: int = 0


@dataclass(eq=False)
class Event:
    """A place in a stream; `passed_ns` is when the device comes to it, by the host's clock."""

    passed_ns: int | None = None


@dataclass
class SimulatedDevice:
    """In-order streams with a launch latency and a limit of what may be queued; see `hooks._device.Device`.

    Attributes:
        launch_ns: What a launch takes on the host.
        wait_ns: What telling a stream to wait for another takes there.
        latency_ns: Until the device sees it.
        event_ns: What an event takes in its stream.
        record_ns: What recording one takes on the host.
        depth: Launches that may be queued; the host is held up by one more.
        drift: By how much faster than the host's clock the device's runs.
        hangs_ns: From when on the device gets nothing done.
        capturing: Whether a graph is being captured.
        queries: How often somebody asked whether an event has passed.
        recorded: How many events have been recorded.
        refusals: Calls that a test has made fail.
    """

    launch_ns: int = 4 * US
    wait_ns: int = 4 * US
    latency_ns: int = 5 * US
    event_ns: int = 500
    record_ns: int = 1_500
    depth: int = 1_024
    drift: float = 0.0
    hangs_ns: int | None = None
    capturing: bool = False
    now_ns: int = 1_000_000_000
    queries: int = 0
    recorded: int = 0
    refusals: list[str] = field(default_factory=list)
    main: Stream = field(default_factory=lambda: Stream("main"))
    aside: Stream = field(default_factory=lambda: Stream("copies"))
    current: Stream = field(init=False)
    slot: Callable[[], int] = field(default=lambda: 0)

    def __post_init__(self) -> None:
        self.current = self.main
        self.reading = False
        self._queued: deque[int] = deque()
        self.work: list[tuple[int, int, int]] = []  # begin, end, slot of the main stream's work
        self.launched: list[int] = []  # when the host did
        self.host: list[tuple[int, int]] = []  # when the host went into which slot
        self._random = random.Random(0)

    # -- the host's clock

    def __call__(self) -> int:
        return self.now_ns

    def spend(self, time_ns: int) -> None:
        """The host does something else."""
        self.now_ns += time_ns

    # -- what a script does

    def launch(self, time_ns: int) -> None:
        """Puts a kernel into the current stream."""
        self.now_ns += self.launch_ns
        self._hold_up()
        self._queued.append(self._work(self.current, time_ns))

    def launch_many(self, count: int) -> None:
        """Small kernels, each done before the host has launched the next."""
        for _ in range(count):
            self.launch(3 * US)

    def launch_aside(self, time_ns: int) -> None:
        """Puts a copy into another stream."""
        self.now_ns += self.launch_ns
        self._work(self.aside, time_ns)

    def wait_for_aside(self, _: int) -> None:
        """What comes later in the current stream waits for the copies."""
        self.wait_stream(self.current, self.aside)

    def wait_stream(self, waits: Stream, waited_for: Stream) -> None:
        """What comes later in one stream waits for what is in another now."""
        self.now_ns += self.wait_ns
        begin_ns = max(waits.free_ns, self.now_ns + self.latency_ns)
        waits.free_ns = max(begin_ns, waited_for.free_ns)
        self._note(waits, begin_ns, waits.free_ns)

    def wait_on_host(self) -> None:
        """The script itself waits for the device, as `loss.item()` does."""
        self.now_ns = max(self.now_ns, self.current.free_ns) + self.latency_ns

    def synchronize(self) -> None:
        """What no one of ours may call."""
        raise WouldWait

    def _hold_up(self) -> None:
        queued = self._queued
        while queued and queued[0] <= self.now_ns:
            queued.popleft()
        if len(queued) >= self.depth:
            self.now_ns = queued[len(queued) - self.depth]

    def _work(self, stream: Stream, time_ns: int) -> int:
        begin_ns = max(stream.free_ns, self.now_ns + self.latency_ns)
        end_ns = begin_ns + time_ns
        if self.hangs_ns is not None and end_ns > self.hangs_ns:
            end_ns = 1 << 62
        stream.free_ns = end_ns
        self._note(stream, begin_ns, end_ns)
        return end_ns

    def _note(self, stream: Stream, begin_ns: int, end_ns: int) -> None:
        if stream is self.main and end_ns > begin_ns:
            self.work.append((begin_ns, end_ns, self.slot()))
            self.launched.append(self.now_ns)

    # -- what the device clock asks

    def current_stream(self) -> Stream:
        return self.current

    def new_event(self) -> Event:
        return Event()

    def record(self, event: Event, stream: Stream) -> None:
        assert not self.capturing, "recorded into a graph"
        self.now_ns += self.record_ns
        self.recorded += 1
        event.passed_ns = self._work_of_an_event(stream)

    def _work_of_an_event(self, stream: Stream) -> int:
        begin_ns = max(stream.free_ns, self.now_ns + self.latency_ns + self._random.randrange(US))
        stream.free_ns = begin_ns + self.event_ns
        return begin_ns

    def is_capturing(self) -> bool:
        return self.capturing

    def has_passed(self, event: Event) -> bool:
        assert self.reading, "asked before `begin_reading`"
        assert event.passed_ns is not None, "asked of an event that is nowhere"
        self.queries += 1
        return event.passed_ns <= self.now_ns

    def ms_between(self, earlier: Event, later: Event) -> float:
        assert earlier.passed_ns is not None and later.passed_ns is not None
        if max(earlier.passed_ns, later.passed_ns) > self.now_ns:
            raise WouldWait
        ms = (later.passed_ns - earlier.passed_ns) * (1 + self.drift) / MS
        (rounded,) = struct.unpack("f", struct.pack("f", ms))
        return float(rounded)

    def begin_reading(self) -> None:
        self.reading = True

    # -- the truth

    def enter(self, slot: int) -> None:
        """The host goes into a slot."""
        self.host.append((self.now_ns, slot))

    def truth(self, begin_ns: int, end_ns: int) -> dict[int, int]:
        """Returns what the main stream's time between two instants was spent on, by slot: work on the slot
        that launched it, idleness on the slot that the host was in."""
        spent: dict[int, int] = {}
        idle_from = begin_ns
        for begin, end, slot in self.work:
            begin, end = max(begin, begin_ns), min(end, end_ns)
            if end <= begin:
                continue
            self._idle(spent, idle_from, begin)
            spent[slot] = spent.get(slot, 0) + end - begin
            idle_from = end
        self._idle(spent, idle_from, end_ns)
        return spent

    def idle(self, begin_ns: int, end_ns: int) -> dict[int, int]:
        """Returns the idle part of `truth` alone."""
        spent: dict[int, int] = {}
        idle_from = begin_ns
        for begin, end, _ in self.work:
            if end > begin_ns and begin < end_ns:
                self._idle(spent, idle_from, max(begin, begin_ns))
                idle_from = min(end, end_ns)
        self._idle(spent, idle_from, end_ns)
        return spent

    def _idle(self, spent: dict[int, int], begin: int, end: int) -> None:
        at = bisect_right(self.host, (begin, 1 << 30)) - 1
        while begin < end:
            until = self.host[at + 1][0] if at + 1 < len(self.host) else end
            slot = self.host[at][1]
            spent[slot] = spent.get(slot, 0) + min(until, end) - begin
            begin = min(until, end)
            at += 1


def nothing_broke(function: Any) -> None:
    """Where a test expects no exception of ours."""
    raise AssertionError(f"{function} broke")


class SharedClock(FakeClock):
    """The time of the host's hooks and of the simulated device is one."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device

    def __call__(self) -> int:
        return self.device.now_ns

    def spend(self, time_ns: int) -> None:
        self.device.now_ns += time_ns
