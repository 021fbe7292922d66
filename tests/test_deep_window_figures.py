"""What is read off a deep window, and the steps around it that no other figure is of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnose.analysis.deep_window import (
    TO_THE_END,
    deep_window_of,
    device_readings,
    spoilt_steps,
    untold_window,
    without_steps,
)
from diagnose.core.deep_window import (
    TOLD,
    ClassTime,
    Counted,
    DeepWindow,
    Rates,
    Sync,
    Trace,
    Work,
    WorkClass,
)
from diagnose.core.device import Device
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.core.program import Model, Program
from diagnose.report.base import Table
from diagnose.report.deep_window import DeepWindowSection, roofline
from diagnose.rules._engine import ask, built_in
from diagnose.rules._examples import profile
from diagnose.rules.launch_bound import EXPECTED
from diagnose.store.reader import RankLog

# -- which steps no figure is of


def log_of(num_steps: int, *events: tuple[int, str, dict[str, Any]]) -> RankLog:
    steps = np.zeros((num_steps, len(COLUMNS)), dtype=np.int64)
    steps[:, 0] = np.arange(num_steps)
    return RankLog(
        path=Path("rank0.sqlite"),
        steps=steps,
        samples=[(step, 0, (), 1) for step in range(num_steps)],
        events=[(0, step, kind, detail) for step, kind, detail in events],
        vitals=[(step, step, {}) for step in range(num_steps)],
    )


def test_the_steps_of_windows_are_gone_and_the_others_keep_their_order() -> None:
    log = log_of(
        12,
        (2, "deep-window", {"state": "begun", "first": 3}),
        (5, "deep-window", {"state": "ended", "last": 5}),
        (8, "checkpoint", {}),
        (8, "deep-window", {"state": "begun", "first": 8}),
        (8, "deep-window", {"state": "undone", "last": 9}),
    )
    assert spoilt_steps(log) == ((3, 5), (8, 9))
    rest = without_steps(log, spoilt_steps(log))
    assert rest.steps[:, 0].tolist() == [0, 1, 2, 6, 7, 10, 11]
    assert [step for step, *_ in rest.samples] == [step for _, step, _ in rest.vitals] == list(range(7))
    assert [step for _, step, kind, _ in rest.events if kind == "checkpoint"] == [5]
    part = without_steps(log_of(6), spoilt_steps(log), first=4)
    assert part.steps[:, 0].tolist() == [2, 3], "4 and 5, then 8 and 9 of the run"


def test_a_process_that_did_not_live_to_end_its_window_has_no_step_after_it() -> None:
    log = log_of(6, (4, "deep-window", {"state": "begun", "first": 4}))
    assert spoilt_steps(log) == ((4, TO_THE_END),)
    assert len(without_steps(log, spoilt_steps(log)).steps) == 4
    assert untold_window(log, is_over=False) == []
    [note] = untold_window(log, is_over=True)
    assert "ended in the deep window that began at step 4;" in note


def test_a_window_that_is_there_ends_where_its_file_says(tmp_path: Path) -> None:
    """The events of its end, and in the second case of its beginning too, were lost."""
    told = {"rank": 0, "first_step": 5, "num_steps": 2, "trace_file": "t", "counted": None}
    begun = (4, "deep-window", {"state": "begun", "first": 4})
    file = tmp_path / "deep-rank0-step5.window.json"
    for events in ((begun,), ()):
        log = replace(log_of(12, *events), path=tmp_path / "rank0.sqlite", meta={"pid": 7})
        file.write_text(json.dumps({**told, "pid": 7, "spoilt": [4, 8]}))
        assert spoilt_steps(log) == ((4, 8),)
        assert untold_window(log, is_over=True) == []
        assert deep_window_of(log) is not None
    other = replace(log, meta={"pid": 8})
    assert deep_window_of(other) is None and spoilt_steps(other) == (), "another process of that rank"
    file.write_text(json.dumps(told))
    assert deep_window_of(log) is None, "an older version said in an event alone that it had ended"
    ended = (8, "deep-window", {"state": "ended", "last": 9})
    assert deep_window_of(replace(log, events=log_of(1, begun, ended).events)) is not None


def test_a_window_that_was_taken_after_all_is_not_said_to_be_missing() -> None:
    undone = (2, "deep-window", {"state": "undone", "last": 3, "reason": "the script started a process"})
    begun = (4, "deep-window", {"state": "begun", "first": 4})
    ended = (5, "deep-window", {"state": "ended", "last": 6})
    assert untold_window(log_of(8, undone), is_over=True) == [
        "There is no deep window: the script started a process."
    ]
    assert untold_window(log_of(8, undone, begun, ended), is_over=True) == []


# -- what a window says


def window(**changes: Any) -> DeepWindow:
    made: dict[str, Any] = {"rank": 0, "first_step": 4, "num_steps": 2, "wall_ns": 2_000_000, **changes}
    return DeepWindow(**made)


def test_the_readings_of_the_device_are_those_of_the_trace() -> None:
    trace = Trace(
        num_kernels=30,
        busy_ns=500_000,
        kernel_ns=400_000,
        tensor_core_ns=100_000,
        layout_ns=40_000,
        sm_share=0.5,
        classes=(
            ClassTime(work=WorkClass.MATRIX, count=3, total_ns=150_000),
            ClassTime(work=WorkClass.ATTENTION, count=1, total_ns=50_000),
        ),
    )
    assert device_readings(window(trace=trace)) == {
        "busy_share": 0.25,
        "launch_bound_ns": None,
        "num_kernels": 15.0,
        "tensor_core_share": 0.25,
        "matmul_share": 0.4,
        "layout_share": 0.08,
        "sm_share": 0.5,
    }
    assert device_readings(window()) == device_readings(None) == {}, "a CPU has no kernels"


def test_shares_of_the_time_are_of_a_usual_step_and_not_of_one_that_recording_slows_down() -> None:
    counted = Counted(
        work=(Work(work=WorkClass.MATRIX, count=2, flops=3_000_000, num_bytes=1_000),), dtype="float32"
    )
    made = window(
        trace=Trace(num_kernels=30, busy_ns=800_000, kernel_ns=800_000, launch_bound_ns=900_000),
        counted=counted,
        rates=Rates(device="a card", copy_bytes_per_s=1e9, flops_per_s=1e10),
    )
    slowed, usual = (replace(made, usual_step_ns=step_ns) for step_ns in (0.0, 500_000.0))
    assert (device_readings(slowed)["busy_share"], device_readings(usual)["busy_share"]) == (0.4, 0.8)
    assert device_readings(slowed)["launch_bound_ns"] == 450_000
    assert device_readings(usual)["launch_bound_ns"] == 100_000, "what kernels leave of a usual step"
    assert device_readings(replace(usual, usual_step_ns=300_000.0))["busy_share"] == 1.0
    assert (slowed.mfu, usual.mfu) == (pytest.approx(0.3), pytest.approx(0.6))
    drawn = roofline(usual)
    assert drawn is not None and drawn.points[-1].flops_per_s == pytest.approx(6e9)
    untold = replace(made, trace=replace(made.trace, launched_share=0.1))
    assert device_readings(untold)["launch_bound_ns"] is None


def test_what_a_window_reads_is_enough_for_the_rules_of_idleness() -> None:
    trace = Trace(num_kernels=6_000, busy_ns=80_000_000, kernel_ns=80_000_000, launch_bound_ns=150_000_000)
    made = window(trace=trace, wall_ns=300_000_000, usual_step_ns=100e6)
    readings = device_readings(made)
    assert set(readings) >= {name.removeprefix("device.") for name in TOLD}
    told = Device(name="a card", capability=(8, 0), **readings)
    rules = {name: built_in()[name] for name in ("launch-bound", "data-parallel")}
    (found,), abstained = ask(rules, profile(device=told))
    assert not abstained and found.rule == "launch-bound"
    assert sum(found.lost_ns.values()) == pytest.approx(EXPECTED * 60e6), "of 100 ms 40 are kernels'"
    assert set(found.lost_ns) == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    fed_slowly, _ = ask(rules, profile(device=told, data_wait_ms=55))
    assert not fed_slowly, "most of the idleness is the wait for data"
    replicas = Model(kind="Net", device="cuda", is_data_parallel=True, num_replicas=2)
    driven, _ = ask(rules, profile(device=told, program=Program(models=(replicas,))))
    assert "data-parallel" in {finding.rule for finding in driven}


def test_utilisation_is_the_products_over_the_roof_and_unknown_without_one() -> None:
    counted = Counted(
        work=(Work(work=WorkClass.MATRIX, count=2, flops=3_000_000, num_bytes=1_000),), dtype="float32"
    )
    rates = Rates(device="cpu", copy_bytes_per_s=1e9, flops_per_s=1e10)
    assert window(counted=counted).mfu is None and roofline(window(counted=counted)) is None
    assert window(counted=counted, rates=rates).mfu == pytest.approx(0.3)
    trace = Trace(classes=(ClassTime(work=WorkClass.MATRIX, count=4, total_ns=1_000_000),))
    drawn = roofline(window(counted=counted, rates=rates, trace=trace))
    assert drawn is not None
    assert [(point.label, point.flops_per_byte) for point in drawn.points] == [
        ("matrix", 3000.0),
        ("whole step", 3000.0),
    ]
    assert [point.flops_per_s for point in drawn.points] == pytest.approx([6e9, 3e9])


def test_a_trace_without_most_of_its_kernels_gives_no_figure_per_step() -> None:
    counted = Counted(
        work=(Work(work=WorkClass.MATRIX, count=2, flops=3_000_000, num_bytes=1_000),), dtype="float32"
    )
    rates = Rates(device="a card", copy_bytes_per_s=1e9, flops_per_s=1e10)
    classes = (ClassTime(work=WorkClass.MATRIX, count=4, total_ns=1_000_000),)
    for share, is_whole in ((0.95, True), (0.94, False)):
        trace = Trace(
            num_kernels=4, busy_ns=9, kernel_ns=10, span_ns=99, classes=classes, launched_share=share
        )
        made = window(counted=counted, rates=rates, trace=trace)
        readings = device_readings(made)
        assert readings["matmul_share"] == 1
        for figure in (readings["num_kernels"], readings["busy_share"], made.mfu, roofline(made)):
            assert (figure is not None) is is_whole
        section = DeepWindowSection().blocks(replace(profile(), deep_window=made))
        assert ("has the kernels of 94 % of the launches alone" in section[0].text) is not is_whole
        labels = {fact.label for fact in section[1].items}
        assert ({"kernels", "busy", "utilisation"} <= labels) is is_whole
        (cells,) = (row.cells for block in section if isinstance(block, Table) for row in block.rows)
        assert (cells[-1] != "") is is_whole


def kept(folder: Path, *events: dict[str, Any], **more: Any) -> RankLog:
    """A rank with a window whose products were counted, and this trace; `more` was counted too."""
    counted = {
        "work": [
            {"work": "matrix", "count": 1, "flops": 1_000, "num_bytes": 10},
            {"work": "attention", "count": 1, "flops": 0, "num_bytes": 10},
        ][: 1 + any(each["name"] == "uncounted" for each in events)],
        "dtype": "bfloat16",
        "lines": [{"what": "aten::item", "count": 1, "blocked_ns": 5, "file": "a.py", "line": 3}],
    }
    told = {"rank": 0, "first_step": 5, "num_steps": 1, "wall_ns": 1_000, "trace_file": "t.json"}
    (folder / "t.json").write_text(json.dumps({"traceEvents": events}))
    file = folder / "deep-rank0-step5.window.json"
    file.write_text(json.dumps({**told, "counted": {**counted, **more}, "pid": 7, "spoilt": [4, 8]}))
    meta = {"pid": 7, "device_name": "the first", "facts": {"device": {"name": "the second"}}}
    return replace(log_of(12), path=folder / "rank0.sqlite", meta=meta)


def ran(category: str, name: str) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": 1, "dur": 2}


GEMM = ran("kernel", "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_tn")


@pytest.mark.parametrize(
    "events, why",
    [
        ((GEMM,), ""),
        ((GEMM, ran("cuda_runtime", "cudaGraphLaunch")), "launch graphs"),
        ((GEMM, ran("kernel", "flash_fwd_kernel")), "attention of a kind"),
        ((GEMM, ran("cpu_op", "uncounted")), "attention of a kind"),
    ],
    ids=["counted", "a graph", "attention that nobody saw", "attention without a formula"],
)
def test_products_that_were_not_all_counted_give_no_utilisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: tuple[dict[str, Any], ...], why: str
) -> None:
    asked = []

    def rates(device: str, dtype: str) -> Rates:
        asked.append((device, dtype))
        return Rates(device=device, copy_bytes_per_s=1e9, flops_per_s=1e9)

    monkeypatch.setattr("diagnose.analysis.deep_window.read_rates", rates)
    log = kept(tmp_path, *events)
    for _ in range(2):  # of the trace, then of its summary
        found = deep_window_of(log)
        assert found is not None and found.counted is not None
        assert found.mfu == (None if why else 1.0)
        assert (why in found.why_not_counted) if why else not found.why_not_counted
        assert found.counted.lines[0].line == 3, "where it waited is known all the same"
    assert asked == [("the second", "bfloat16")] * 2, "the model's device, not the first in use"


def test_products_without_a_formula_are_named_and_give_no_utilisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Rates(device="a card", copy_bytes_per_s=1e9, flops_per_s=1e9)
    monkeypatch.setattr("diagnose.analysis.deep_window.read_rates", lambda device, dtype: known)
    found = deep_window_of(kept(tmp_path, GEMM, unknown="aten::_cudnn_rnn"))
    assert found is not None and found.mfu is None and roofline(found) is None
    assert found.why_not_counted == "the steps call aten::_cudnn_rnn, whose products cannot be counted"


def test_a_trace_of_a_job_on_a_device_that_has_no_kernel_is_not_read_as_one_of_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Rates(device="a card", copy_bytes_per_s=1e9, flops_per_s=1e9)
    monkeypatch.setattr("diagnose.analysis.deep_window.read_rates", lambda device, dtype: known)
    on_cpu = kept(tmp_path, ran("cpu_op", "aten::mm"))
    facts = {**on_cpu.meta["facts"], "accelerator": "cuda"}
    for log, is_told in ((on_cpu, True), (replace(on_cpu, meta={**on_cpu.meta, "facts": facts}), False)):
        found = deep_window_of(log)
        assert found is not None
        section = DeepWindowSection().blocks(replace(profile(), deep_window=found))
        assert ("It has no kernel, though the model is on a device" in section[0].text) is not is_told
        tables = [block.caption for block in section if isinstance(block, Table)]
        assert any("Operations on the CPU" in caption for caption in tables) is is_told
        assert (found.mfu is not None) is (roofline(found) is not None) is is_told


def test_the_report_names_the_line_that_waits() -> None:
    counted = Counted(
        work=(),
        lines=(Sync(what="aten::item", count=1, blocked_ns=7_000, file="/a/train.py", line=9),),
    )
    trace = Trace(
        num_kernels=2,
        span_ns=2_000_000,
        classes=(ClassTime(work=WorkClass.MATRIX, count=2, total_ns=9),),
        syncs=(Sync(what="cudaStreamSynchronize", count=2, blocked_ns=8_000),),
    )
    made = DeepWindowSection().blocks(replace(profile(), deep_window=window(trace=trace, counted=counted)))
    cells = [row.cells for row in getattr(made[-1], "rows", ())]
    assert ("cudaStreamSynchronize", "", "1", "4.0 us") in cells
    assert any(cell[1].endswith("train.py:9") for cell in cells)
