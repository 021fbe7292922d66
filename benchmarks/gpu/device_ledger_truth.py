"""What a trace of torch's profiler says of each slot: work where launched, idleness where the host was.

The same question as the device's ledger answers from events, answered from every kernel.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

US = 1_000

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
CALLS = {"cuda_runtime", "cuda_driver"}

SLOT = "diagnose slot "
MARK = "diagnose mark "
"""Notes that the job leaves in the trace: the slot that the host goes into, and where a step may end."""


class Truth:
    """A trace, read.

    Attributes:
        syncs: How often the host waited for the device: calls of the runtime by name.
    """

    def __init__(self, path: Path) -> None:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        spans = [event for event in events if event.get("ph") == "X"]
        calls = {
            event["args"]["correlation"]: _ns(event["ts"])
            for event in spans
            if event.get("cat") in CALLS and "correlation" in event.get("args", {})
        }
        self.syncs = Counter(
            event["name"] for event in spans if event.get("cat") in CALLS and "Synchronize" in event["name"]
        )
        work = [event for event in spans if event.get("cat") in ON_DEVICE]
        busiest = Counter(event["args"]["stream"] for event in work).most_common(1)
        self._work = sorted(
            (_ns(event["ts"]), _ns(event["ts"] + event["dur"]), calls[event["args"]["correlation"]])
            for event in work
            if event["args"]["stream"] == busiest[0][0] and event["args"].get("correlation") in calls
        )
        # A note is there twice: on the host, and as a span over the kernels that are launched in it.
        notes = [event for event in spans if event.get("cat") == "user_annotation"]
        self._host = sorted(
            (_ns(event["ts"]), int(event["name"][len(SLOT) :]))
            for event in notes
            if event["name"].startswith(SLOT)
        )
        self._marks = {
            int(event["name"][len(MARK) :]): _ns(event["ts"])
            for event in notes
            if event["name"].startswith(MARK)
        }

    def between(self, begin_mark: int, end_mark: int) -> dict[int, int]:
        """Returns nanoseconds by slot from the device's end of one step to its end of another."""
        begin_ns, end_ns = self._end(begin_mark), self._end(end_mark)
        spent: dict[int, int] = {}
        idle_from = begin_ns
        for began, ended, launched in self._work:
            first, last = max(began, idle_from, begin_ns), min(ended, end_ns)
            if last > first:
                self._idle(spent, idle_from, first)
                slot = self._host[max(0, bisect_right(self._host, (launched, 1 << 30)) - 1)][1]
                spent[slot] = spent.get(slot, 0) + last - first
                idle_from = last
        self._idle(spent, idle_from, end_ns)
        return spent

    def _end(self, mark: int) -> int:
        """When the device came to what had been launched before a mark."""
        at_ns = self._marks[mark]
        return max([at_ns, *(ended for _, ended, launched in self._work if launched < at_ns)])

    def _idle(self, spent: dict[int, int], begin: int, end: int) -> None:
        at = max(0, bisect_right(self._host, (begin, 1 << 30)) - 1)
        while begin < end:
            until = self._host[at + 1][0] if at + 1 < len(self._host) else end
            spent[self._host[at][1]] = spent.get(self._host[at][1], 0) + min(until, end) - begin
            begin = min(until, end)
            at += 1


def _ns(us: Any) -> int:
    return round(float(us) * US)
