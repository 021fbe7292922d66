"""What becomes of readings of the device: what is known of it and of copies, and what rules make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diagnose.analysis.copies import CALL_NS, SLOWEST_BYTES_PER_S, copies_of
from diagnose.analysis.device import device_of
from diagnose.analysis.device_ledger import BY_DEVICE
from diagnose.analysis.retries import retry_ns
from diagnose.core.copies import Copies
from diagnose.core.device import Device
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.hooks._copies import SENT
from diagnose.hooks._curious import CURIOUS_UNTIL
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.copy_to_device import CopyToDeviceHook
from diagnose.report.base import Facts
from diagnose.report.device import DeviceReadings
from diagnose.rules._engine import ask, built_in
from diagnose.rules._examples import profile
from diagnose.rules._traps import traps
from diagnose.store.reader import RankLog

RULES = built_in()
GIB = 2**30
MS = 1_000_000

CONSTANTS = {
    "max_sm_hz": 1.4e9,
    "default_power_limit_w": 400,
    "max_pcie_generation": 4,
    "max_pcie_width": 16,
}

READING = {
    "busy_share": 0.9,
    "sm_hz": 1.4e9,
    "reasons": [],
    "power_limit_w": 400,
    "pcie_generation": 4,
    "pcie_width": 16,
    "to_device_bytes_per_s": 2e9,
    "other_processes": 0,
    "other_sm_share": 0.0,
}


def log(
    readings: Sequence[Mapping[str, Any]] = (),
    *,
    allocator: Sequence[Mapping[str, int]] = (),
    step_ns: np.ndarray | None = None,
    **facts: Any,
) -> RankLog:
    """A rank's records: a reading of each kind every ten steps of 100 ms."""
    count = 10 * max(len(readings), len(allocator), 1)
    steps = np.zeros((count, len(COLUMNS)), dtype=np.int64)
    steps[:, COLUMNS.index("forward")] = 100 * MS if step_ns is None else step_ns
    rows: list[Any] = []
    for index in range(count // 10):
        kinds = {"device": readings[index : index + 1], "allocator": allocator[index : index + 1]}
        vitals = {kind: one[0] for kind, one in kinds.items() if one}
        rows.append((index, 10 * (index + 1), vitals))
    known = {"device": {"name": "a card", "capability": [8, 0], "total_bytes": 80 * GIB}, "nvml": CONSTANTS}
    return RankLog(path=Path("rank0.sqlite"), meta={"facts": {**known, **facts}}, steps=steps, vitals=rows)


def reading(**changes: Any) -> dict[str, Any]:
    return {**READING, **changes}


# -- the driver's


def test_a_run_that_has_no_readings_knows_nothing_of_its_device():
    old = replace(log(), meta={})
    assert device_of(old, 0) == Device()
    assert copies_of(old, 0) == Copies()


def test_shares_of_the_time_are_parts_of_the_readings():
    capped, hot = reading(reasons=["SwPowerCap"]), reading(reasons=["HwSlowdown", "HwThermalSlowdown"])
    idle = reading(reasons=["GpuIdle"], busy_share=0.0, sm_hz=0.2e9)
    device = device_of(log([capped, hot, hot, idle]), 0)
    assert device.throttle_reasons == {"SwPowerCap": 0.25, "HwSlowdown": 0.5, "HwThermalSlowdown": 0.5}
    assert device.throttle_share == 0.75
    assert device.clock_share == 1.0, "the clock of an idle device costs nobody anything"
    assert device.busy_share == pytest.approx(0.675)


def test_readings_of_the_warm_up_do_not_count():
    device = device_of(log([reading(sm_hz=0.7e9), *[reading()] * 3]), 15)
    assert device.clock_share == 1.0


def test_a_reading_that_looks_back_to_before_the_first_measured_step_is_no_share_of_its_time():
    starting = reading(busy_share=0.2, time_ns=500 * MS)
    training = [reading(time_ns=(1_500 + 1_000 * second) * MS) for second in range(3)]
    device = device_of(log([starting, *training]), 0)
    assert (device.busy_share, device.utilisation_share) == (0.9, 0.9)
    assert device_of(log([starting, *training[:2]]), 0).utilisation_share is None


def test_two_readings_are_no_share_of_the_time():
    device = device_of(log([reading(reasons=["HwSlowdown"])] * 2), 0)
    assert (device.throttle_reasons, device.clock_share, device.busy_share) == (None, None, None)


def test_kernels_of_a_neighbour_are_not_taken_for_ours():
    device = device_of(log([reading(other_processes=1, other_sm_share=0.4)] * 4), 0)
    assert (device.busy_share, device.utilisation_share) == (None, 0.9)
    assert (device.other_processes, device.other_sm_share) == (1, 0.4)
    unknown = {name: value for name, value in READING.items() if not name.startswith("other")}
    assert device_of(log([unknown] * 4), 0).busy_share is None


def test_what_others_have_measured_comes_first():
    whole = log([reading()] * 4)
    device = device_of(whole, 0, {"busy_share": 0.5, "idle_ns": {Phase.COPY: 2.0}, "num_kernels": None})
    assert (device.busy_share, device.num_kernels) == (0.5, None)


def test_a_link_is_read_under_load():
    idle = reading(busy_share=0.0, pcie_generation=1)
    assert copies_of(log([idle] * 5), 0).link_generation is None
    copies = copies_of(log([idle, *[reading(pcie_width=8)] * 3]), 0)
    assert (copies.link_generation, copies.link_width, copies.link_max_width) == (4, 8, 16)
    assert copies.link_limit_bytes_per_s == pytest.approx(8 * 1.969e9)
    assert copies.link_bytes_per_s == 2e9


# -- the allocator's


def state(retries: int, reserved: int = 44, **changes: int) -> dict[str, int]:
    levels = {"allocated_bytes": 40, "reserved_bytes": reserved, "inactive_split_bytes": 2, **changes}
    return {"retries": retries, "ooms": 0, **{name: n * GIB for name, n in levels.items()}}


def test_levels_are_those_of_the_moment_when_most_was_reserved():
    states = [state(0), state(0, 76, allocated_bytes=50, inactive_split_bytes=24), state(0, 60)]
    device = device_of(log(allocator=states), 0)
    assert (device.reserved_bytes, device.allocated_bytes) == (76 * GIB, 50 * GIB)
    assert (device.inactive_split_bytes, device.peak_bytes) == (24 * GIB, 50 * GIB)


def test_a_count_that_the_script_sets_back_goes_on_from_there():
    assert device_of(log(allocator=[state(5), state(9), state(2)]), 0).alloc_retries == 11


def stepped(retries_per_interval: Sequence[int], cost_ns: float, noise_ns: float = MS) -> RankLog:
    """A run in which each retry makes one step longer, and every step is a little off."""
    chance = np.random.default_rng(3)
    lengths = 100 * MS + chance.normal(0, noise_ns, 10 * (len(retries_per_interval) + 1))
    for index, retries in enumerate(retries_per_interval):
        lengths[10 * (index + 1)] += retries * cost_ns
    totals = np.concatenate([[0], np.cumsum(retries_per_interval)])
    return log(allocator=[state(int(total)) for total in totals], step_ns=lengths.astype(np.int64))


def test_retries_cost_what_steps_with_them_take_longer():
    whole = stepped([0, 3, 0, 0, 5, 1, 0, 4, 0, 2, 0, 6, 0], 40 * MS)
    assert retry_ns(whole, 0) == pytest.approx(21 * 40 * MS / 130, rel=0.15)


def test_retries_whose_cost_is_not_seen_have_none_told():
    assert retry_ns(stepped([0, 1] * 10, 0.0), 0) is None
    assert retry_ns(stepped([2] * 20, 40 * MS), 0) is None, "nothing to compare them with"
    assert retry_ns(stepped([0] * 20, 0.0), 0) == 0.0
    assert retry_ns(log(), 0) is None


# -- copies


def by_device(host: RankLog, copying_ns: int) -> RankLog:
    """The records of a run whose steps are by the device's clock."""
    steps = host.steps.copy()
    steps[:, COLUMNS.index("copy")] = copying_ns
    return replace(host, steps=steps, meta={**host.meta, BY_DEVICE: True})


@contextmanager
def steps_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A recorder of a loop whose tensors are copied to `meta`, in place of a device, and from there."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    recorder = Recorder()
    with CopyToDeviceHook().install(recorder):
        yield recorder
    assert not recorder.notes


def told(recorder: Recorder) -> Copies:
    for look in recorder.looks.flushed:
        look()
    return copies_of(by_device(log(copies=recorder.facts["copies"]), 8 * MS), 0)


def test_bytes_to_the_device_are_counted_by_how_they_are_sent(monkeypatch):
    with steps_on(monkeypatch) as recorder:
        for recorder.steps in range(12):
            torch.ones(300).to("meta")
            torch.ones(100).to("meta", non_blocking=True)
            torch.empty(25, device="meta").copy_(torch.ones(25), True)
            torch.ones(1000).to(torch.float64)
        copies = told(recorder)
    assert copies.to_device_bytes == 4 * 425
    assert copies.pageable_share == 1.0, "no build of torch for the CPU has pinned memory"
    assert (copies.constant_bytes, copies.constant_ns, copies.constant_file) == (0, 0.0, "")


def test_the_same_tensor_unchanged_is_a_constant_with_its_line(monkeypatch):
    mask, moving = torch.ones(1000), torch.ones(1000)
    with steps_on(monkeypatch) as recorder:
        for recorder.steps in range(CURIOUS_UNTIL + 20):
            torch.ones(1000).to("meta")  # perhaps where the last one lay
            moving.to("meta")
            moving.add_(1)
            mask[:500].to("meta")  # a view made anew
        copies = told(recorder)
    assert copies.to_device_bytes == 4 * 2500
    assert copies.constant_bytes == pytest.approx(4 * 500, rel=0.02)
    assert copies.constant_file == __file__
    assert "mask[:500]" in Path(__file__).read_text().splitlines()[copies.constant_line - 1]
    at_most_ns = 3 * CALL_NS + 10_000 / SLOWEST_BYTES_PER_S * 1e9
    assert at_most_ns < 8 * MS, "which the device spent between the events, on other programs then"
    assert 0 < copies.constant_ns < copies.to_device_ns == at_most_ns


def test_bytes_from_the_device_are_counted_with_their_line(monkeypatch):
    class There(torch.Tensor):
        """A tensor that says that it is on a device, and can be fetched."""

        device = torch.device("meta")  # type: ignore[assignment]

    with steps_on(monkeypatch) as recorder:
        rows = torch.ones(500).as_subclass(There)
        for recorder.steps in range(12):
            rows.cpu()
            torch.ones(500).cpu()
        copies = told(recorder)
    assert copies.to_host_bytes == 4 * 500
    assert copies.to_host_ns is not None and copies.to_host_ns > 0
    assert "rows.cpu()" in Path(copies.to_host_file).read_text().splitlines()[copies.to_host_line - 1]


def test_a_loop_of_a_few_steps_tells_nothing_of_its_copies(monkeypatch):
    with steps_on(monkeypatch) as recorder:
        for recorder.steps in range(4):
            torch.ones(300).to("meta")
        assert told(recorder).to_device_bytes is None


def test_a_loop_that_copies_nothing_is_known_to_copy_nothing(monkeypatch):
    with steps_on(monkeypatch) as recorder:
        for recorder.steps in range(12):
            torch.ones(300).to(torch.float64)
        copies = told(recorder)
    assert (copies.to_device_bytes, copies.pageable_share, copies.constant_bytes) == (0, 0, 0)
    names = ("pageable-copies", "repeated-upload", "device-to-host-copies")
    assert ask({name: RULES[name] for name in names}, profile(device="cuda", copies=copies)) == ((), ())


# -- the rules on what can be read

NOTHING = Copies()


def found(device: Device, copies: Copies = NOTHING, **phases: float) -> set[str]:
    names = (
        "throttled-device",
        "degraded-link",
        "saturated-link",
        "pageable-copies",
        "repeated-upload",
        "device-to-host-copies",
        "allocator-retries",
        "memory-fragmentation",
    )
    rules = {name: RULES[name] for name in names}
    return {finding.rule for finding in ask(rules, profile(device=device, copies=copies, **phases))[0]}


def test_heat_is_found_from_readings_alone():
    hot = [reading(reasons=["SwThermalSlowdown"], sm_hz=0.8e9)] * 5
    assert found(device_of(log(hot), 0)) == {"throttled-device"}
    assert found(device_of(log([reading()] * 5), 0)) == set()


def test_a_bad_slot_is_found_where_the_device_waits_for_copies():
    slow = [reading(pcie_width=4, pcie_generation=1)] * 5
    large = {**dict.fromkeys(SENT, 0), "bytes": 400_000_000, "ns": 9}
    sites = [{"kind": "sent", "file": "", "line": 0, **large}]
    whole = log(slow, copies={"num_steps": 10, "sites": sites})
    for copying_ms, expected in ((30, {"degraded-link"}), (1, set())):
        copies = copies_of(by_device(whole, copying_ms * MS), 0)
        assert found(device_of(whole, 0), copies, copy_ms=copying_ms) - {"saturated-link"} == expected
    assert copies_of(whole, 0).to_device_ns is None, "the host's clock cannot tell"


def test_retries_are_found_from_the_allocators_counts_and_the_steps():
    whole = stepped([0, 3, 0, 0, 5, 1, 0, 4, 0, 2, 0, 6, 0] * 4, 60 * MS)
    device = device_of(whole, 0)
    assert found(device) == {"allocator-retries"}
    torn = replace(device, inactive_split_bytes=24 * GIB, reserved_bytes=76 * GIB)
    assert found(torn) == {"memory-fragmentation"}


def test_errors_of_the_devices_memory_are_a_note():
    (note,) = traps(profile(device=device_of(log([reading(uncorrected_errors=2)] * 3), 0)))
    assert note.startswith("the device's memory had 2 errors that ECC could not correct")
    assert traps(profile(device=device_of(log([reading(uncorrected_errors=0)] * 3), 0))) == ()


# -- the report


def test_the_report_says_what_the_device_said_and_nothing_of_what_it_did_not():
    device = Device(
        name="an A100",
        utilisation_share=0.93,
        clock_share=0.6,
        throttle_share=0.95,
        throttle_reasons={"HwSlowdown": 0.05, "SwPowerCap": 0.95},
        power_limit_share=0.625,
        power_w=248.7,
        other_processes=1,
        other_sm_share=0.2,
        total_bytes=80 * GIB,
        peak_bytes=42 * GIB,
        alloc_retries=3,
    )
    copies = Copies(
        to_device_bytes=19e6,
        pageable_share=1.0,
        link_generation=1,
        link_width=4,
        link_max_generation=4,
        link_max_width=16,
    )
    (facts,) = DeviceReadings().blocks(profile(device=device, copies=copies))
    assert isinstance(facts, Facts)
    assert [" ".join(filter(None, (item.label, item.value, item.detail))) for item in facts.items] == [
        "device an A100",
        "kernels running 93 % of the time, as the driver counts",
        "clock 60 % of the highest, while kernels ran",
        "held down 95 % of the time: SwPowerCap 95 %, HwSlowdown 5.0 %",
        "power limit 62 % of the card's default",
        "power 249 W on average",
        "processes of others 1 computing 20 % of the time",
        "memory of tensors 42.0 GiB of 80.0 GiB",
        "allocator retries 3 in the run",
        "link PCIe 1 x4 of 4 x16",
        "sent to it 18.1 MiB per step, 100 % from unpinned memory",
    ]
    assert DeviceReadings().blocks(profile()) == []
    assert DeviceReadings().blocks(profile(device="cuda")) == []
