"""Readings of the device: real `pynvml`, on a driver that answers as it is told."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from diagnose.analysis.profile import load_profile
from diagnose.hooks import _allocator as allocator
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.device_settings import DeviceSettingsHook, device_now
from diagnose.launch import nvml_thread
from diagnose.launch.device import DeviceReadings
from diagnose.launch.nvml import Nvml, Unreadable
from diagnose.launch.nvml_thread import NvmlThread
from diagnose.rules import diagnosed
from diagnose.rules.throttled_device import ThrottledDevice
from diagnose.store.reader import read_rank
from tests import nvml_stub
from tests.nvml_stub import IDENTITY, UUID, tell
from tests.running import DIAGNOSE, SCRIPTS, only_run, run

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("g++") is None,
    reason="needs Linux, and g++ to compile the driver's library that answers as it is told",
)

GIB = 2**30


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Tells the driver what to say, from a healthy device; `pynvml` finds it by its name."""
    if torch.cuda.is_available():
        pytest.skip("a real driver's library is loaded")
    driver = ctypes.CDLL(str(nvml_stub.folder() / nvml_stub.NAME))
    path = tmp_path / "driver"
    monkeypatch.setenv("NVML_STUB", str(path))
    yield lambda *lines, **changes: tell(path, *lines, **changes)
    assert driver.nvmlStubInitialised() == 0, "as often shut down as initialised"


@pytest.fixture
def opened(says: Callable[..., Path]) -> Iterator[Callable[..., Nvml]]:
    """Opens the device that was told of."""
    says()
    pynvml.nvmlInit()
    yield lambda **changes: Nvml(pynvml, {**IDENTITY, **changes})
    pynvml.nvmlShutdown()


def test_a_healthy_device_is_read_in_plain_units(opened, says):
    says("process self 80")
    device = opened()
    assert device.constants() == {
        "max_sm_hz": 1.41e9,
        "max_memory_hz": 1.215e9,
        "default_power_limit_w": 400,
        "max_pcie_generation": 4,
        "max_pcie_width": 16,
        "num_cores": 6912,
        "memory_bus_bits": 5120,
    }
    assert device.read() == {
        "busy_share": 0.93,
        "power_w": 390,
        "power_limit_w": 400,
        "sm_hz": 1.38e9,
        "reasons": [],
        "pcie_generation": 4,
        "pcie_width": 16,
        "to_device_bytes_per_s": 2_048_000_000,
        "uncorrected_errors": 0,
        "temperature_c": 61,
        "other_processes": 0,
        "other_sm_share": 0,
    }


def test_reasons_have_the_drivers_names(opened, says):
    says(reasons=0x04 | 0x40 | 0x01)
    assert opened().read()["reasons"] == ["GpuIdle", "SwPowerCap", "HwThermalSlowdown"]


def test_what_is_not_supported_leaves_only_its_own_figure_away_and_is_not_asked_again(opened, says):
    says("process self 80", without=("sm_mhz", "uncorrected_errors", "received_kib_per_s"))
    device = opened()
    first = device.read()
    assert {"sm_hz", "uncorrected_errors", "to_device_bytes_per_s"}.isdisjoint(first)
    assert (first["power_w"], first["busy_share"]) == (390, 0.93)
    says("process self 80")
    assert device.read() == first


def test_a_figure_that_fails_once_is_asked_for_again(opened, says):
    says("returns nvmlDeviceGetPowerUsage 999")
    device = opened()
    assert "power_w" not in device.read()
    says()
    assert device.read()["power_w"] == 390


def test_older_names_are_used_where_the_driver_or_the_library_has_no_newer(opened, says, monkeypatch):
    older = (
        "returns nvmlDeviceGetCurrentClocksEventReasons 13",
        "returns nvmlDeviceGetComputeRunningProcesses_v3 13",
        "process self 80",
    )
    says(*older, reasons=0x08)
    read = opened().read()
    assert (read["reasons"], read["other_processes"]) == (["HwSlowdown"], 0)
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetComputeRunningProcesses_v3")
    assert opened().read() == read


def test_neighbours_are_those_that_are_neither_ours_nor_our_childrens(opened, says):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    parent = os.getppid()
    says("process self 60", f"process {child.pid} 20", f"process {parent} 30", "process 999999999 9")
    try:
        read = opened().read()
    finally:
        child.communicate(b"\n")
    assert (read["other_processes"], read["other_sm_share"]) == (1, 0.3)


def test_whose_processes_are_is_not_told_from_inside_a_container(opened, says):
    says("process 4321 60", "process 4322 30")
    assert "other_processes" not in opened().read()


def test_the_only_process_on_the_device_is_this_one_where_its_number_is_of_outside(opened, says):
    says("process 999999999 60")
    assert opened().read()["other_processes"] == 0


def test_whose_processes_are_is_not_told_where_a_server_has_the_device_for_all_of_them(opened, says):
    """As NVIDIA's MPS: it is the only process that the driver sees, whoever computes."""
    says(f"process {os.getppid()} 60")
    assert "other_processes" not in opened().read()


def test_a_share_without_meaning_is_left_out(opened, says):
    says("process self 60", f"process {os.getppid()} 2000000000")
    assert opened().read()["other_sm_share"] == 0


@pytest.mark.parametrize(
    "identity",
    [{}, {"uuid": UUID}, {"uuid": None}, {"uuid": None, "pci_address": None}],
    ids=["by its identity", "with the prefix", "by its address", "as the only one"],
)
def test_the_device_is_found(opened, identity):
    assert opened(**identity).read()["busy_share"] == 0.93


def test_a_number_alone_finds_nothing_among_several_devices_unless_the_order_is_the_same(
    opened, says, monkeypatch
):
    says(count=2)
    nameless = {"uuid": None, "pci_address": None}
    with pytest.raises(Unreadable, match="NVML knows no device 0"):
        opened(**nameless)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert opened(**nameless).read()


def test_a_device_that_the_driver_does_not_know_is_not_taken_for_another(opened):
    with pytest.raises(Unreadable, match="NVML knows no device 00000000"):
        opened(uuid="00000000-0000-0000-0000-000000000000", pci_address=None)


def test_slices_of_a_device_are_refused_in_words(opened, says):
    says(mig=1)
    with pytest.raises(Unreadable, match="divided by MIG"):
        opened()
    says(uuid=UUID.replace("GPU", "MIG"))
    with pytest.raises(Unreadable, match="slice made by MIG"):
        opened()


# -- the thread


def until(condition: Callable[[], Any], within_s: float = 20) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return value


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlThread]:
    monkeypatch.setattr(nvml_thread, "EVERY_S", 0.01)
    thread = NvmlThread(IDENTITY)
    yield thread
    thread.stop()
    until(lambda: "diagnose-nvml" not in {one.name for one in threading.enumerate()})


def test_each_reading_is_handed_over_once_with_its_time_and_its_cost(says, thread):
    says()
    begun_ns = time.perf_counter_ns()
    thread.start()
    first = until(thread.take)
    second = until(thread.take)
    assert begun_ns < first["time_ns"] < second["time_ns"] < time.perf_counter_ns()
    assert thread.constants["max_pcie_width"] == 16
    assert thread.note == ""
    assert 0 < thread.spent_ns < time.perf_counter_ns() - begun_ns


def test_a_device_that_is_lost_ends_the_readings_with_a_note(says, thread):
    says(lost_after=2)
    thread.start()
    until(lambda: thread.note)
    assert thread.note == "clocks, power, link and neighbours of the device are not measured: GPU is lost"
    assert thread.take()["busy_share"] == 0.93
    assert thread.take() is None


@pytest.mark.parametrize(
    "line, why",
    [
        ("returns nvmlInitWithFlags 9", "Driver Not Loaded"),
        ("returns nvmlInitWithFlags 18", "RM has detected an NVML/RM version mismatch."),
        ("returns nvmlDeviceGetHandleByUUID 4", "NVML knows no device"),
    ],
)
def test_a_driver_that_refuses_is_a_note_and_no_reading(says, thread, line, why):
    says(line, "returns nvmlDeviceGetHandleByPciBusId_v2 4")
    thread.start()
    assert why in until(lambda: thread.note)
    assert thread.take() is None


def test_a_machine_without_a_driver_is_a_note_and_no_thread(monkeypatch):
    monkeypatch.setattr(nvml_thread, "LIBRARY", "libnvidia-ml-of-no-driver.so.1")
    thread = NvmlThread(IDENTITY)
    thread.start()
    assert thread.note.startswith(
        "clocks, power, link and neighbours of the device are not measured: libnvidia"
    )
    thread.stop()


def test_a_process_without_a_device_reads_none_and_says_nothing_of_it():
    recorder = Recorder()
    with DeviceSettingsHook().install(recorder):
        (inspect,) = recorder.looks.inspections
        inspect()
    assert "device" not in recorder.facts
    readings = DeviceReadings()
    assert readings.read(recorder.facts) == {}
    assert (readings.notes, readings.spent_ns) == ([], 0)
    readings.stop()


def test_a_device_of_another_vendor_is_a_note_and_no_thread(says):
    thread = NvmlThread({**IDENTITY, "hip": True})
    thread.start()
    assert thread.note.endswith("its driver is not NVIDIA's")
    thread.stop()


def test_a_call_that_hangs_holds_nobody_up(says, thread):
    says("takes nvmlDeviceGetPowerUsage 1500")
    begun = time.monotonic()
    thread.start()
    assert thread.take() is None
    thread.stop()
    assert time.monotonic() - begun < 1.2, "starting, taking and stopping do not wait for the driver"


# -- the allocator


def stats(**changes: int) -> dict[str, Any]:
    """What torch returns on a device, but for what nobody reads."""
    levels = {"allocated_bytes": 40, "reserved_bytes": 44, "inactive_split_bytes": 2}
    levels |= {name: changes[name] for name in levels if name in changes}
    return {
        "num_alloc_retries": changes.get("retries", 0),
        "num_ooms": 0,
        **{name: {"all": {"current": n * GIB, "peak": (n + 2) * GIB}} for name, n in levels.items()},
    }


def test_the_allocator_is_asked_nothing_before_cuda_is_there():
    assert not torch.cuda.is_initialized()
    assert allocator.read(0) == {}
    assert not torch.cuda.is_initialized()


def test_levels_and_counts_of_the_allocator_are_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda index: stats(retries=7))
    read = allocator.read(0)
    assert (read["retries"], read["ooms"]) == (7, 0)
    assert (read["reserved_bytes"], read["peak_reserved_bytes"]) == (44 * GIB, 46 * GIB)


def test_settings_that_torch_refuses_to_tell_by_their_old_names_are_told_by_the_new(monkeypatch):
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has the old names only")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        told = device_now()
    finally:
        matmul.fp32_precision = before
    assert told["tf32"] is True
    assert (told["uuid"], told["pci_address"]) == (None, None)


class Properties:
    """What an old torch tells of a device."""

    name, major, minor, total_memory = "a card", 9, 0, 80 * GIB


# -- a run


def recorded(folder: Path, seconds: float, states: list[dict[str, Any]], **environment: str) -> Path:
    """Runs a script that has a device by its settings; returns the run's folder."""
    (folder / "allocator.json").write_text(json.dumps(states))
    ended = run(
        *DIAGNOSE,
        SCRIPTS / "on_a_device.py",
        seconds,
        "allocator.json",
        UUID.removeprefix("GPU-"),
        cwd=folder,
        **environment,
    )
    assert ended.code == 0, ended.stderr
    return only_run(folder)


@pytest.mark.extended
def test_a_reduced_power_limit_a_bad_slot_and_a_death_of_the_driver_are_told_of_a_run(tmp_path):
    driver = tell(
        tmp_path / "driver",
        "process self 90",
        reasons=0x04,
        power_limit_mw=250_000,
        sm_mhz=846,
        pcie_width=4,
        pcie_generation=1,
        lost_after=5,
    )
    library = str(nvml_stub.folder())
    states = [stats(), stats(retries=3, reserved_bytes=70)]
    folder = recorded(tmp_path, 5, states, LD_LIBRARY_PATH=library, NVML_STUB=str(driver))
    profile = diagnosed(load_profile(folder))
    device, copies = profile.device, profile.copies
    assert (device.name, device.capability) == ("NVIDIA A100-SXM4-80GB", (8, 0))
    assert device.clock_share == pytest.approx(0.6)
    assert device.throttle_reasons == {"SwPowerCap": 1.0}
    assert (device.power_limit_share, device.busy_share, device.other_processes) == (0.625, 0.93, 0)
    assert device.fp32_flops_per_s == pytest.approx(19.5e12, rel=0.01)
    assert device.bandwidth_bytes_per_s == pytest.approx(1.555e12, rel=0.01)
    assert (device.alloc_retries, device.reserved_bytes, device.peak_bytes) == (3, 72 * GIB, 42 * GIB)
    assert (copies.link_generation, copies.link_max_generation) == (1, 4)
    assert (copies.link_width, copies.link_limit_bytes_per_s) == (4, 1e9)
    finding = ThrottledDevice().check(profile)  # itself: a busy machine here may explain the same time
    assert finding is not None and "its power limit is set to 62 % of the default" in finding.summary
    missing = {one.rule: one.missing for one in profile.abstained}
    assert missing["degraded-link"] == "copies.to_device_ns", "the slot is bad; what it costs is not known"
    (note,) = (note for note in profile.notes if "not measured" in note)
    assert note == "clocks, power, link and neighbours of the device are not measured: GPU is lost"
    rows: list[Any] = [row for _, _, row in read_rank(folder / "rank0.sqlite").vitals]
    times_s = [row["device"]["time_ns"] / 1e9 for row in rows if "device" in row]
    assert len(times_s) == 4, "until it was lost"
    assert all(later - sooner > 0.9 for sooner, later in pairwise(times_s)), "once a second"
