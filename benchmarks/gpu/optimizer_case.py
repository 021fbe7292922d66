"""Measures all contenders of one row on one set of parameters: correctness first, then in turn."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from optimizer_clock import Clock, Pipeline, Times
from optimizer_contenders import Contender, Work
from optimizer_rows import BenchRow
from optimizer_shapes import SHAPES, Shape
from torch import Tensor

TURNS = 4
"""So often each contender comes round, so that a drift of the machine meets all alike."""

WARM_STEPS = 3
CHECK_STEPS = 3
MOST_STEPS, LEAST_STEPS = 13, 3
"""In one turn, by the time there is."""

WALL_STEPS = 5

READY_S, COMPILING_S, TURN_S = 60.0, 150.0, 45.0
"""A contender that takes longer is taken for hung. Ready: checked, built, and a few steps; ours compile for
up to ten seconds. Compiling: a graph of hundreds of tensors, or an extension. Of a turn, by far."""

WEIGHT_SIZE, GRAD_SIZE = 0.02, 0.1
"""Standard deviations. Zeros would be computed faster and hide mistakes."""


@dataclass(kw_only=True, slots=True)
class Bench:
    """What all cases of one process share.

    Attributes:
        clock: The device.
        tell: Takes what a process that watches this one should know at once.
        without: Contenders that broke a process before, as they are known there: not tried again.
        errors: Of contenders that were checked before, by their row and name.
    """

    clock: Clock
    tell: Callable[..., object]
    without: frozenset[str] = frozenset()
    errors: dict[tuple[str, str], float] = field(default_factory=dict)


def run_case(
    row: BenchRow, shape: str, bench: Bench, seconds: float, *, with_compiled: bool
) -> dict[str, Any]:
    """Measures one row on one set of parameters, and tells after each round what is known by then.

    Args:
        row: What is done.
        shape: On what.
        bench: The device, and who watches.
        seconds: How long it may take, without compiling.
        with_compiled: Whether those that compile are measured, beside torch's fused step and ours; if not,
            all others are.

    Raises:
        RuntimeError: If the device is of no more use to this process.
    """
    clock = bench.clock
    taking_part = [each for each in row.contenders if takes_part(each, with_compiled=with_compiled)]
    work = make_work(row, SHAPES[shape], clock, seed=1)
    elements = sum(math.prod(each) for each in SHAPES[shape])
    found = [
        {
            "name": contender.name,
            "ours": contender.ours,
            "note": contender.note,
            "bytes_per_element": contender.bytes_per_element,
            "status": "measured",
        }
        for contender in taking_part
    ]
    case = {
        "row": row.letter,
        "title": row.title,
        "shape": shape,
        "tensors": len(SHAPES[shape]),
        "elements": elements,
        "contenders": found,
    }
    ready: list[tuple[Contender, dict[str, Any], Pipeline, Times]] = []
    for contender, entry in zip(taking_part, found, strict=True):
        if contender.known_as(row.letter) in bench.without:
            entry |= {"status": "failed", "reason": "a process that tried it hung or broke"}
            continue
        bench.tell(trying=contender.known_as(row.letter), patience_s=patience_s(contender))
        prepared = attempt(entry, clock, functools.partial(prepare, row, contender, work, bench))
        if prepared is not None:
            ready.append((contender, entry, prepared, Times()))
    share = seconds / TURNS / max(1, len(ready))
    for number in range(TURNS):
        for contender, entry, pipeline, times in ready if number % 2 == 0 else ready[::-1]:
            if entry["status"] == "measured":
                bench.tell(trying=contender.known_as(row.letter), patience_s=TURN_S)
                point(work)  # another may have left the parameters at copies that nobody refreshes
                attempt(entry, clock, functools.partial(take_turn, pipeline, times, clock, share))
                if entry["status"] == "measured":
                    entry |= {
                        name: quartiles(getattr(times, name)) for name in ("gpu_ns", "wall_ns", "host_ns")
                    }
        if number < TURNS - 1:
            bench.tell(so_far=case | {"rounds": number + 1})
    return case


def takes_part(contender: Contender, *, with_compiled: bool) -> bool:
    """Whether a contender is in a case."""
    if with_compiled:
        return contender.compiled or contender.ours or contender.name == "torch fused"
    return not contender.compiled


def patience_s(contender: Contender) -> float:
    """How long it may take to get ready before it is taken for hung."""
    return COMPILING_S if contender.compiled or contender.builds else READY_S


def release(clock: Clock) -> None:
    """Gives back what contenders held that failed, maybe for want of memory, or whose case is over: some
    libraries' optimizers are freed by the collector alone."""
    gc.collect()
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()


def attempt(entry: dict[str, Any], clock: Clock, act: Any) -> Any:
    """Does something for one contender; what goes wrong is its own, and is noted."""
    try:
        result = act(entry)
        clock.wait()
    except ImportError as error:
        entry |= {"status": "not installed", "reason": str(error)}
    except Exception as error:  # noqa: BLE001 - any library's may be raised here, and the others go on
        entry |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:600]}
        traceback.print_exc()
        traceback.clear_frames(error.__traceback__)
        release(clock)
        clock.wait()  # raises where the device itself is broken: then this process has to end
    else:
        return result
    return None


def prepare(
    row: BenchRow, contender: Contender, work: Work, bench: Bench, entry: dict[str, Any]
) -> Pipeline | None:
    """Checks a contender, builds it, and measures what takes one step."""
    clock, checked = bench.clock, (row.letter, contender.name)
    if checked not in bench.errors:
        bench.errors[checked] = error_of(row, contender, clock)
    entry["error"] = error = bench.errors[checked]
    if not error <= row.worst_error:
        entry |= {
            "status": "wrong",
            "reason": f"off by {error:.2g} of the way; {row.worst_error:g} is allowed",
        }
        return None
    before = allocated(clock)
    point(work)
    pipeline = contender.build(work)
    with pipeline.turn():
        for _ in range(WARM_STEPS):
            pipeline.step()
            pipeline.after()
        clock.wait()
        entry["state_bytes"] = allocated(clock) - before
        entry["extra_bytes"] = clock.extra_bytes(pipeline)
        entry["launches"] = launches(pipeline, clock)
    return pipeline


def launches(pipeline: Pipeline, clock: Clock) -> dict[str, Any] | None:
    """What one step launches. `None` where the profiler cannot tell: drivers may refuse it, and times are
    worth having without it."""
    try:
        counted = clock.launches(pipeline)
    except RuntimeError:
        traceback.print_exc()
        return None
    return counted if counted["kernels"] or clock.device.type == "cpu" else None


def take_turn(
    pipeline: Pipeline, times: Times, clock: Clock, seconds: float, entry: dict[str, Any]
) -> None:
    """Times some steps of one contender, in about so many seconds."""
    with pipeline.turn():
        pipeline.step()  # swapped in anew, the kernels line up again
        pipeline.after()
        clock.walls(pipeline, 2, times)
        each_ns = 2.5 * statistics.median(times.wall_ns) + 100_000
        steps = max(LEAST_STEPS, min(MOST_STEPS, int(seconds * 1e9 / each_ns)))
        clock.walls(pipeline, min(steps, WALL_STEPS), times)
        clock.gpu(pipeline, steps, times)


def error_of(row: BenchRow, contender: Contender, clock: Clock) -> float:
    """How far a contender's weights are from the reference in the end, in parts of how far they moved."""
    work = make_work(row, SHAPES["tiny"], clock, seed=2)
    start = [param.detach().double() for param in work.params]
    generator = torch.Generator(clock.device).manual_seed(3)
    given: list[list[Tensor]] = []
    pipeline = contender.build(work)
    with pipeline.turn():
        for _ in range(CHECK_STEPS):
            grads = [
                torch.randn(p.shape, device=p.device, generator=generator) * GRAD_SIZE for p in work.params
            ]
            grads = [grad.to(row.grad_dtype) for grad in grads]
            norm = float(torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt())
            limit = row.clip_norm or (work.max_norm if row.clip_share is not None else math.inf)
            given.append([grad.double() * min(1.0, limit / norm) for grad in grads])
            for param, grad in zip(work.params, grads, strict=True):
                assert param.grad is not None
                param.grad.copy_(grad * row.loss_scale)
            pipeline.step()
            clock.wait()
            weights = [weight.detach().double() for weight in pipeline.weights]
            pipeline.after()
    point(work)
    if len(weights) != len(start):  # the norm
        [norm_found], [expected] = weights, row.reference(start, given)
        return float((norm_found - expected).abs() / expected)
    expected64 = row.reference([param.clone() for param in start], given)
    off = distance(weights, expected64)
    way = distance(start, expected64)
    return off / way


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    """Between two lists of tensors."""
    squares = [(a - b).square().sum() for a, b in zip(some, others, strict=True)]
    return float(torch.stack(squares).sum().sqrt())


def make_work(row: BenchRow, shapes: list[Shape], clock: Clock, seed: int) -> Work:
    """Parameters and gradients of random numbers."""
    generator = torch.Generator(clock.device).manual_seed(seed)

    def random(shape: Shape, size: float, dtype: torch.dtype) -> Tensor:
        numbers = torch.randn(shape, device=clock.device, generator=generator)
        return numbers.mul_(size).to(dtype)

    params = [random(shape, WEIGHT_SIZE, row.dtype).requires_grad_() for shape in shapes]
    grads = [random(shape, GRAD_SIZE * row.loss_scale, row.grad_dtype) for shape in shapes]
    norm = float(torch.stack([grad.float().square().sum() for grad in grads]).sum().sqrt()) / row.loss_scale
    work = Work(
        params=params,
        grads=grads,
        kept=[grad.clone() for grad in grads] if row.clip_share is not None or row.loss_scale != 1 else [],
        max_norm=(row.clip_share or 1.0) * norm,
        dry_run=clock.device.type == "cpu",
    )
    point(work)
    return work


def point(work: Work) -> None:
    """Gives each parameter its gradient."""
    for param, grad in zip(work.params, work.grads, strict=True):
        param.grad = grad


def allocated(clock: Clock) -> int:
    """Bytes of the device that tensors take."""
    return torch.cuda.memory_allocated() if clock.device.type == "cuda" else 0


def quartiles(times_ns: list[float]) -> dict[str, float]:
    """The median and the quartiles."""
    first, median, third = statistics.quantiles(times_ns, n=4)
    return {"q1": first, "median": median, "q3": third, "num": len(times_ns)}
