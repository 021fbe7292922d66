"""What only a GPU has: streams, graphs, memory, a queue that must not be waited for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnose.kernels import _build
from diagnose.kernels._device import Gpu
from diagnose.kernels._structs import PAIRS, Group, Row
from diagnose.kernels._swap import swap, unswap
from diagnose.kernels._table import Table
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile

MANY = (1 << 31) + 4_099
"""Elements of one tensor: more than 32 bits with a sign count, and no multiple of anything."""

SMALL_BYTES = 1 << 20
"""A step may take so much for itself: norms, factors and what a patch of pointers carries."""


def model_on(gpu: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512)).to(gpu)


def backward(model: nn.Module, number: int) -> None:
    generator = torch.Generator("cuda").manual_seed(number)
    model(torch.randn(8, 512, device="cuda", generator=generator)).square().mean().backward()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_a_step_waits_for_nothing(clip: Any, make: Callable[..., Any], gpu: torch.device) -> None:
    model = model_on(gpu)
    optimizer = make(model.parameters(), lr=1e-3)
    taken = swap(optimizer, clip=clip)
    for number in range(4):
        model.zero_grad()
        backward(model, number)
        if number < 2:  # lines up
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            continue
        with no_waiting():
            clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            optimizer.step()
    assert taken.stepper.left == []
    unswap(optimizer)


def launches_of(step: Callable[[], object]) -> list[str]:
    """The kernels that one call puts into the queue."""
    from torch.autograd import DeviceType

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
        and not event.name.startswith(("Optimizer.", "Mem", "Context Sync", "ProfilerStep"))
    ]


@pytest.mark.parametrize("clip, allowed", [("exact", 3), ("deferred", 2)])
def test_clipping_and_a_step_are_so_few_launches(clip: Any, allowed: int, gpu: torch.device) -> None:
    model = model_on(gpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    swap(optimizer, clip=clip)
    backward(model, 0)

    def step() -> None:
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()
    step()
    ours = {"gradient_norm", "scale", "adamw", "patch"}
    names = launches_of(step)
    assert len(names) <= allowed and set(names) <= ours, names
    unswap(optimizer)


def test_a_step_takes_no_memory_of_the_size_of_parameters(gpu: torch.device) -> None:
    params = [nn.Parameter(torch.randn(4096, 4096, device=gpu)) for _ in range(4)]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    swap(optimizer, clip="deferred")
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    states = sum(value.nbytes for each in optimizer.state.values() for value in each.values())
    assert states <= 2 * sum(param.nbytes for param in params) + 1024
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    clip_grad_norm_(params, 1.0)
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < SMALL_BYTES
    unswap(optimizer)


def test_a_captured_step_replays_as_the_step(gpu: torch.device) -> None:
    ends = []
    for captured in (False, True):
        model = model_on(gpu)
        rate = torch.tensor(1e-3, device=gpu)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True)
        taken = swap(optimizer)
        backward(model, 0)  # these gradients stay
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        for number in range(5):
            rate.fill_(1e-3 / (number + 1))
            if captured:
                graph.replay()
            else:
                optimizer.step()
        torch.cuda.synchronize()
        assert taken.stepper.left == []
        counts = {float(state["step"]) for state in optimizer.state.values()}
        assert counts == {8.0}
        ends.append([param.detach().clone() for param in model.parameters()])
        unswap(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_replay_has_its_own_gradients_after_a_step_with_others(gpu: torch.device) -> None:
    ends = []
    for captured in (False, True):
        model = model_on(gpu)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        params = list(model.parameters())
        theirs = [torch.ones_like(param) for param in params]
        backward(model, 0)
        own = [param.grad for param in params]
        clip_grad_norm_(params, 1e9)  # by torch, so that its kernels are loaded before the capture
        swap(optimizer)

        def step(grads: list[Any], on: list[Any] = params, by: Any = optimizer) -> None:
            for param, grad in zip(on, grads, strict=True):
                param.grad = grad
            by.step()

        step(own)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                clip_grad_norm_(params, 1e9)  # for the first time: torch does it
                step(own)
        for _ in range(3):
            step(theirs)
            if captured:
                graph.replay()
            else:
                step(own)
        torch.cuda.synchronize()
        ends.append([param.detach().clone() for param in params])
        unswap(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_step_on_a_side_stream_is_in_its_order(gpu: torch.device) -> None:
    ends = []
    for on_side in (False, True):
        model = model_on(gpu)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        swap(optimizer)
        stream = torch.cuda.Stream() if on_side else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for number in range(10):
                model.zero_grad()
                torch.cuda._sleep(2_000_000)  # a step on another stream would overtake the backward
                backward(model, number)
                clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        torch.cuda.synchronize()
        ends.append([param.detach().clone() for param in model.parameters()])
        unswap(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def needs_bytes(num: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 1.2 * num:
        pytest.skip(f"needs {num / 1e9:.0f} GB of free memory on the GPU; there are {free / 1e9:.0f}")


def test_a_tensor_with_more_than_2_to_the_31_elements_is_updated_to_its_end(gpu: torch.device) -> None:
    needs_bytes(5 * 2 * MANY)
    torch.cuda.empty_cache()
    param = nn.Parameter(torch.zeros(MANY, dtype=torch.bfloat16, device=gpu))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], lr=0.5, weight_decay=0.0)
    taken = swap(optimizer, clip="deferred")
    norm = clip_grad_norm_([param], 1e30)
    optimizer.step()
    assert taken.stepper.left == []
    assert float(norm) == pytest.approx(float(MANY) ** 0.5, rel=1e-2)  # torch's norms are of the dtype
    assert param[0].item() == pytest.approx(-0.5, rel=1e-2)
    assert bool((param == param[0]).all()), "every element once"
    unswap(optimizer)
    optimizer.state.clear()
    param.grad = None
    del param, optimizer, taken
    torch.cuda.empty_cache()


def test_the_norm_of_more_than_2_to_the_31_elements_counts_each(gpu: torch.device) -> None:
    needs_bytes(2 * MANY)
    torch.cuda.empty_cache()
    grad = torch.full((MANY,), 0.5, dtype=torch.bfloat16, device=gpu)
    table = Table(gpu, [Row(g=grad.data_ptr(), count=MANY, pair=PAIRS[(torch.bfloat16,) * 3])], [Group()])
    outcome_4 = torch.zeros(4, device=gpu)
    table.run("norm", "gradient_norm", outcome_4=outcome_4, max_norm=1.0)
    assert outcome_4[0].item() == pytest.approx(0.5 * float(MANY) ** 0.5, rel=3e-7)


def test_machine_code_is_kept_on_the_disk(
    gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = []
    for _ in range(2):
        device = Gpu(gpu.index or 0)
        device.resident_blocks("adamw", "adamw", block=256, defines={"PAIRS": 1, "FEATURES": 0})
        found += [image.from_cache for image in device.images.values()]
    assert found == [False, True]
    assert [path.suffix for path in _build.cache_folder().iterdir()] == [".cubin"]


def test_a_process_that_has_not_used_its_gpu_yet_is_told_that_it_is_supported(gpu: torch.device) -> None:
    """No context of the driver's is current there."""
    asks = "from diagnose import kernels; print(kernels.info())"
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert f"{torch.cuda.get_device_name(gpu)}: supported" in done.stdout
