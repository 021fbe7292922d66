"""Measures one pipeline of an optimizer: its time on the GPU, on the host, its launches and its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

COPY_BYTES = 4 << 30
"""Read by the copy that the bandwidth is taken from, and as much written: many times the L2 of any GPU."""

SLEEP_CYCLES_PER_NS = 2
"""Of the multiprocessors' clock, which is a little slower: the queue is held longer rather than shorter."""

LONGEST_SLEEP_NS = 60_000_000

NOT_KERNELS = ("Memcpy", "Memset", "Context Sync", "Optimizer.", "ProfilerStep")
"""What the profiler lists beside kernels; copies and fills are counted on their own."""


def nothing() -> None:
    """What most pipelines do after a step."""


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """What one contender does at each step, on tensors of its own or those that all share.

    Attributes:
        step: What is timed.
        after: What is not: it makes the next step find what this one found.
        turn: Entered while it is this pipeline's turn: kernels that are swapped in change torch for all.
        weights: What it updates, to be compared with the reference.
    """

    step: Callable[[], object]
    weights: list[torch.Tensor]
    after: Callable[[], object] = nothing
    turn: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(slots=True, kw_only=True)
class Times:
    """Nanoseconds of each step.

    Attributes:
        gpu_ns: Between two events on the stream, with the queue full.
        wall_ns: From an idle queue to an idle queue.
        host_ns: Of that, until the call came back.
    """

    gpu_ns: list[float] = field(default_factory=list)
    wall_ns: list[float] = field(default_factory=list)
    host_ns: list[float] = field(default_factory=list)


class Clock(Protocol):
    """Measures on one device."""

    device: torch.device

    def wait(self) -> None:
        """Returns when the device has done all that is queued; raises what went wrong there."""

    def walls(self, pipeline: Pipeline, num: int, into: Times) -> None:
        """Times steps with an idle queue."""

    def gpu(self, pipeline: Pipeline, num: int, into: Times) -> None:
        """Times steps with a full queue."""

    def launches(self, pipeline: Pipeline) -> dict[str, Any]:
        """Counts what one step puts into the queue."""

    def extra_bytes(self, pipeline: Pipeline) -> int | None:
        """The most memory that one step takes beyond what was taken before it."""

    def copy_bytes_per_s(self) -> float | None:
        """How fast this device copies within its memory, bytes read plus bytes written."""


class CudaClock:
    """Measures on a GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def wait(self) -> None:
        """See `Clock.wait`."""
        torch.cuda.synchronize()

    def walls(self, pipeline: Pipeline, num: int, into: Times) -> None:
        """See `Clock.walls`."""
        for _ in range(num):
            torch.cuda.synchronize()
            begun = time.perf_counter_ns()
            pipeline.step()
            returned = time.perf_counter_ns()
            torch.cuda.synchronize()
            into.wall_ns.append(time.perf_counter_ns() - begun)
            into.host_ns.append(returned - begun)
            pipeline.after()

    def gpu(self, pipeline: Pipeline, num: int, into: Times) -> None:
        """See `Clock.gpu`: before each step the GPU sleeps for as long as the host needs to queue it."""
        needed_ns = statistics.median(into.host_ns) if into.host_ns else LONGEST_SLEEP_NS
        cycles = int(SLEEP_CYCLES_PER_NS * min(1.5 * needed_ns + 50_000, LONGEST_SLEEP_NS))
        events = []
        for _ in range(num):
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(cycles)
            begun.record()
            pipeline.step()
            ended.record()
            pipeline.after()
            events.append((begun, ended))
        torch.cuda.synchronize()
        into.gpu_ns += [begun.elapsed_time(ended) * 1e6 for begun, ended in events]

    def launches(self, pipeline: Pipeline) -> dict[str, Any]:
        """See `Clock.launches`."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            pipeline.step()
            torch.cuda.synchronize()
        pipeline.after()
        events = [
            event
            for event in profiler.events()
            if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        ]
        kernels = [event.name for event in events if not event.name.startswith(NOT_KERNELS)]
        copies = [event.name for event in events if event.name.startswith(("Memcpy", "Memset"))]
        return {"kernels": len(kernels), "copies": len(copies), "names": sorted(set(kernels))[:8]}

    def extra_bytes(self, pipeline: Pipeline) -> int | None:
        """See `Clock.extra_bytes`."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        pipeline.step()
        torch.cuda.synchronize()
        pipeline.after()
        return torch.cuda.max_memory_allocated() - before

    def copy_bytes_per_s(self) -> float | None:
        """See `Clock.copy_bytes_per_s`."""
        source = torch.randn(COPY_BYTES // 4, device=self.device)
        target = torch.empty_like(source)
        times = Times()
        self.gpu(Pipeline(step=lambda: target.copy_(source), weights=[]), 12, times)
        return 2 * COPY_BYTES / (statistics.median(times.gpu_ns[2:]) / 1e9)


class DryClock:
    """Goes through the same motions on a CPU. Its times say nothing."""

    device = torch.device("cpu")

    def __init__(self, launched: list[str]) -> None:
        self._launched = launched

    def wait(self) -> None:
        """See `Clock.wait`."""

    def walls(self, pipeline: Pipeline, num: int, into: Times) -> None:
        """See `Clock.walls`."""
        for _ in range(num):
            begun = time.perf_counter_ns()
            pipeline.step()
            into.wall_ns.append(time.perf_counter_ns() - begun)
            into.host_ns.append(into.wall_ns[-1])
            pipeline.after()

    def gpu(self, pipeline: Pipeline, num: int, into: Times) -> None:
        """See `Clock.gpu`."""
        for _ in range(num):
            begun = time.perf_counter_ns()
            pipeline.step()
            into.gpu_ns.append(time.perf_counter_ns() - begun)
            pipeline.after()

    def launches(self, pipeline: Pipeline) -> dict[str, Any]:
        """See `Clock.launches`: of our own kernels, which the emulated device counts."""
        before = len(self._launched)
        pipeline.step()
        names = self._launched[before:]
        pipeline.after()
        return {"kernels": len(names), "copies": 0, "names": sorted(set(names))}

    def extra_bytes(self, pipeline: Pipeline) -> int | None:
        """See `Clock.extra_bytes`: not measured."""
        pipeline.step()
        pipeline.after()
        return None

    def copy_bytes_per_s(self) -> float | None:
        """See `Clock.copy_bytes_per_s`: not measured."""
        return None


@contextmanager
def clock_for(*, dry_run: bool, seed: int = 0) -> Iterator[Clock]:
    """The clock of this run. On a CPU the tests' emulation takes the part of a GPU while it is open."""
    if not dry_run:
        yield CudaClock()
        return
    from tests.kernels_on_cpu import kernels_on_cpu

    with kernels_on_cpu(seed) as device:
        yield DryClock(device.launched)
