"""Readings of a real device: its driver, its allocator, and a run whose figures must agree with both."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from diagnose.analysis.profile import load_profile
from diagnose.hooks import _allocator as allocator
from diagnose.hooks.device_settings import device_now
from diagnose.launch.nvml import Nvml, Unreadable
from diagnose.launch.nvml_thread import NvmlThread
from diagnose.rules import diagnosed
from tests.running import recorded

SIZE = 4096


def busy_for(seconds: float, gpu: torch.device) -> None:
    """Multiplies matrices, so that kernels run all the time."""
    matrix = torch.randn(SIZE, SIZE, device=gpu)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            matrix = torch.tanh(matrix @ matrix)
        torch.cuda.synchronize()


@pytest.fixture
def device(gpu: torch.device) -> Nvml:
    import pynvml

    torch.zeros(1, device=gpu)
    pynvml.nvmlInit()
    try:
        return Nvml(pynvml, device_now())
    except Unreadable as refused:
        pytest.skip(str(refused))


def test_the_driver_finds_the_device_that_torch_computes_on(device: Nvml, gpu: torch.device) -> None:
    torch.cuda.empty_cache()  # else `large` is taken from what earlier tests have left in it
    before = _used_bytes(device)
    large = torch.zeros(1 << 30, dtype=torch.uint8, device=gpu)
    assert _used_bytes(device) - before >= 0.9 * large.numel()


def _used_bytes(device: Nvml) -> int:
    """What is in use of the memory of the device that was found, by anybody."""
    import pynvml

    return int(pynvml.nvmlDeviceGetMemoryInfo(device._handle).used)


def test_a_busy_device_is_read_as_busy_and_takes_power(device: Nvml, gpu: torch.device) -> None:
    idle = device.read()
    busy_for(3, gpu)
    reading, constants = device.read(), device.constants()
    assert reading["busy_share"] > 0.8
    assert 0.3 < reading["sm_hz"] / constants["max_sm_hz"] <= 1
    if "power_w" in idle:  # what the driver of a card behind a hypervisor refuses is left out
        assert reading["power_w"] > 1.2 * idle["power_w"]
    if "pcie_generation" in reading and "max_pcie_generation" in constants:
        assert reading["pcie_generation"] <= constants["max_pcie_generation"]
    assert reading.get("other_processes", 0) == 0, "nobody else may compute here for these tests to speak"


def test_rates_from_the_driver_are_those_of_the_data_sheet(device: Nvml) -> None:
    constants = device.constants()
    rates = {
        "A100": (19.5e12, (1.5e12, 2.1e12)),
        "H100": (67e12, (2.0e12, 3.5e12)),
        "H200": (67e12, (4.6e12, 5.0e12)),
    }
    name = next((name for name in rates if name in torch.cuda.get_device_name()), None)
    if name is None:
        pytest.skip("a card whose data sheet this test does not know")
    flops, (least, most) = rates[name]
    assert 2 * constants["num_cores"] * constants["max_sm_hz"] == pytest.approx(flops, rel=0.15)
    assert least < 2 * constants["max_memory_hz"] * constants["memory_bus_bits"] / 8 < most


def test_copies_to_the_device_show_in_the_links_traffic(device: Nvml, gpu: torch.device) -> None:
    rows = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    thread = NvmlThread(device_now())
    thread.start()
    readings = []
    end = time.monotonic() + 4
    while time.monotonic() < end:
        rows.to(gpu, non_blocking=True)
        torch.cuda.synchronize()
        readings.append(thread.take())
    thread.stop()
    rates = [r["to_device_bytes_per_s"] for r in readings if r and "to_device_bytes_per_s" in r]
    if any(readings) and not rates:
        pytest.skip("the driver tells nothing of the link's traffic")
    assert len(rates) >= 3
    assert max(rates) > 2e9


def test_the_allocators_figures_are_torchs_and_reading_them_resets_nothing(gpu: torch.device) -> None:
    torch.cuda.reset_peak_memory_stats()
    large = torch.zeros(1 << 28, device=gpu)
    peak = torch.cuda.max_memory_allocated()
    del large
    read = allocator.read(gpu.index or 0)
    assert read["peak_allocated_bytes"] == peak == torch.cuda.max_memory_allocated()
    assert read["allocated_bytes"] == torch.cuda.memory_allocated()
    assert read["reserved_bytes"] == torch.cuda.memory_reserved()
    begun = time.perf_counter()
    for _ in range(100):
        allocator.read(gpu.index or 0)
    assert (time.perf_counter() - begun) / 100 < 0.5e-3


RETRYING = """
import torch
torch.cuda.set_per_process_memory_fraction(2 * 2**30 / torch.cuda.mem_get_info()[1])
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
side = torch.cuda.Stream()
for step in range(4000):
    optimizer.zero_grad()
    loss = model(torch.ones(256, 256).to("cuda")).square().mean()
    if step % 200 > 100 and step > 1000:  # a stream cannot take what the other has cached; two do not fit
        with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()):
            torch.empty(1200 << 20, dtype=torch.uint8, device="cuda")
    loss.backward()
    optimizer.step()
    loss.item()
"""


def test_retries_and_copies_of_a_run_are_read(tmp_path: Path, gpu: torch.device) -> None:
    profile = diagnosed(load_profile(recorded(tmp_path, RETRYING)))
    assert profile.device.name == torch.cuda.get_device_name()
    assert (profile.device.alloc_retries or 0) > 100
    assert profile.device.peak_bytes is not None and profile.device.peak_bytes > 2**29
    assert profile.copies.to_device_bytes == 4 * 256 * 256
    assert profile.copies.pageable_share == 1.0
    # Of a hook; that a machine's driver tells nothing of its clocks is another test's matter.
    assert not [note for note in profile.notes if "is not measured" in note]


COMPILED = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
    def forward(self, x):
        return (x.to("cuda", torch.float64) @ self.linear.weight.to(torch.float64)).square().mean()
model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
for step in range(50):
    optimizer.zero_grad()
    compiled(torch.ones(64, 64)).backward()
    optimizer.step()
"""


def test_a_model_that_copies_compiles_as_a_whole_and_its_backward_pass_is_seen_to(
    tmp_path: Path, gpu: torch.device
) -> None:
    profile = load_profile(recorded(tmp_path, COMPILED))
    assert profile.events["compile"] == 2
    assert not [note for note in profile.notes if "failed" in note]
