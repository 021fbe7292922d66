"""Traces of torch's profiler, made by hand, with what they must say to the nanosecond."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from diagnose.analysis import trace_events
from diagnose.analysis.deep_window import device_readings
from diagnose.analysis.trace import read_trace
from diagnose.core.deep_window import OURS, DeepWindow, Hot, Sync, WorkClass
from diagnose.core.errors import DiagnoseError

C = WorkClass
GEMM = "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_tn"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, "
    "at::native::(anonymous namespace)::launch()::{lambda(float)})"
)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(
    category: str, name: str, start_us: float, took_us: float, *, on: Any = 1, call: int = -1
) -> dict:
    made = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": on, "ts": start_us, "dur": took_us}
    return made if call < 0 else {**made, "args": {"correlation": call}}


def kernel(name: str, start_us: float, took_us: float, *, stream: int = 7, call: int = -1) -> dict:
    return event("kernel", name, start_us, took_us, on=stream, call=call)


def written(folder: Path, *events: dict, name: str = "t.json", **header: Any) -> Path:
    text = json.dumps({"schemaVersion": 1, **header, "traceEvents": list(events), "traceName": "t"})
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


# -- kernels


def test_busy_time_counts_an_instant_once_whatever_streams_run(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        kernel(GEMM, 0, 10),
        kernel(ADD, 5, 10, stream=8),
        kernel(ADD, 30, 5),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 34, 4, on=9),
        deviceProperties=[{"name": "NVIDIA Any"}],
    )
    trace = read_trace(path)
    assert trace.on_device and trace.device == "NVIDIA Any"
    assert (trace.busy_ns, trace.compute_ns, trace.kernel_ns) == (23_000, 20_000, 25_000)
    assert (trace.num_kernels, trace.kernels_span_ns, trace.tensor_core_ns) == (3, 38_000, 10_000)
    assert [(each.work, each.count, each.total_ns) for each in trace.classes] == [
        (C.ELEMENTWISE, 2, 15_000),
        (C.MATRIX, 1, 10_000),
        (C.COPY, 1, 4_000),
    ]
    assert trace.top[1] == Hot(name=GEMM, work=C.MATRIX, count=1, total_ns=10_000, tensor_core=True)


def test_kernels_of_few_blocks_leave_multiprocessors_without_work(tmp_path: Path) -> None:
    def launched(begun_us: float, took_us: float, blocks_per_sm: Any) -> dict:
        return {
            **kernel(GEMM, begun_us, took_us),
            "args": {"blocks per SM": blocks_per_sm, "correlation": 3},
        }

    small, large = launched(0, 30, 0.25), launched(30, 10, 7.5)
    assert read_trace(written(tmp_path, small, large)).sm_share == pytest.approx((0.25 * 30 + 10) / 40)
    assert read_trace(written(tmp_path, small, kernel(ADD, 50, 20))).sm_share is None, "most do not say"
    assert read_trace(written(tmp_path, launched(0, 5, "?"))).sm_share is None


def test_a_collectives_few_blocks_are_no_small_kernels_and_its_time_is_no_busier(tmp_path: Path) -> None:
    def launched(name: str, begun_us: float, took_us: float, blocks_per_sm: float, stream: int) -> dict:
        made = kernel(name, begun_us, took_us, stream=stream)
        return {**made, "args": {"blocks per SM": blocks_per_sm}}

    turned = "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>"
    trace = read_trace(
        written(
            tmp_path,
            launched(GEMM, 0, 60, 4.0, 7),
            launched(turned, 60, 40, 4.0, 7),
            launched(NCCL, 0, 100, 0.2, 20),
        )
    )
    assert trace.sm_share == 1.0
    readings = device_readings(DeepWindow(rank=0, first_step=4, num_steps=1, trace=trace))
    assert (readings["matmul_share"], readings["layout_share"]) == (0.6, 0.4), "of 100 us, not of 200"


def test_communication_is_exposed_where_nothing_computes(tmp_path: Path) -> None:
    trace = read_trace(
        written(
            tmp_path,
            kernel(GEMM, 0, 10),
            kernel(NCCL, 5, 20, stream=20),
            kernel(GEMM, 12, 3),
            kernel(NCCL, 40, 2, stream=20),
            event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 16, 2),
        )
    )
    assert trace.communication_ns == 22_000
    assert trace.exposed_ns == 14_000, "10 to 12, 15 to 25, 40 to 42: a copy hides none of it"


def test_launch_bound_is_an_idle_device_while_the_host_works_and_does_not_wait(tmp_path: Path) -> None:
    trace = read_trace(
        written(
            tmp_path,
            kernel(GEMM, 10, 10, call=1),  # idle from 20 to 60
            kernel(ADD, 60, 10, call=2),
            event("cuda_runtime", "cudaLaunchKernel", 8, 2, call=1),
            event("cpu_op", "aten::item", 15, 20),
            event("cuda_runtime", "cudaStreamSynchronize", 16, 14),  # until 30
            event("cpu_op", "aten::add", 50, 20),
            event("cuda_runtime", "cudaLaunchKernel", 55, 4, call=2),
        )
    )
    assert trace.num_launches == 2
    assert trace.launch_bound_ns == 15_000, "30 to 35 in item, 50 to 60 in add; 35 to 50 is the script's"
    assert trace.sync_ns == 14_000
    assert trace.syncs == (Sync(what="cudaStreamSynchronize in aten::item", count=1, blocked_ns=14_000),)


@pytest.mark.parametrize("category", ["cpu_op", "user_annotation"])
def test_a_wait_of_ours_is_not_the_scripts(tmp_path: Path, category: str) -> None:
    trace = read_trace(
        written(
            tmp_path,
            kernel(GEMM, 0, 10),
            kernel(GEMM, 60, 5),
            event("cuda_runtime", "cudaStreamSynchronize", 5, 6),
            event(category, OURS, 20, 50),
            event("cuda_runtime", "cudaDeviceSynchronize", 21, 48),
            event("cuda_runtime", "cudaStreamSynchronize", 30, 2, on=2),  # another thread's
        )
    )
    assert trace.sync_ns == 8_000
    assert trace.syncs == (Sync(what="cudaStreamSynchronize", count=2, blocked_ns=8_000),)
    assert trace.launch_bound_ns is not None and trace.launch_bound_ns <= 2_000, "nor is it a launch"


def test_without_the_hosts_side_nothing_is_said_of_launches(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, kernel(GEMM, 0, 10), kernel(GEMM, 20, 10)))
    assert trace.launch_bound_ns is None and trace.num_launches is None


def test_kernels_launched_inside_the_optimizers_step_are_its_own_but_for_products(tmp_path: Path) -> None:
    trace = read_trace(
        written(
            tmp_path,
            event("user_annotation", "Optimizer.step#AdamW.step", 10, 10),
            event("cuda_runtime", "cudaLaunchKernel", 5, 1, call=1),
            event("cuda_runtime", "cudaLaunchKernel", 12, 1, call=2),
            event("cuda_runtime", "cudaLaunchKernel", 14, 1, call=3),
            kernel(ADD, 30, 3, call=1),
            kernel(ADD, 33, 5, call=2),
            kernel(GEMM, 38, 7, call=3),
        )
    )
    assert {each.work: each.total_ns for each in trace.classes} == {
        C.ELEMENTWISE: 3_000,
        C.OPTIMIZER: 5_000,
        C.MATRIX: 7_000,
    }


def test_launches_without_a_kernel_say_that_the_device_was_behind(tmp_path: Path) -> None:
    launches = [event("cuda_runtime", "cudaLaunchKernel", 10 * i, 4, call=i) for i in range(900)]
    kernels = [kernel(GEMM, 90 * i + 2, 80, call=i) for i in range(100)]
    trace = read_trace(written(tmp_path, *launches, *kernels))
    assert (trace.num_launches, trace.num_kernels) == (900, 100)
    assert trace.launched_share == pytest.approx(1 / 9) and not trace.is_whole
    window = DeepWindow(rank=0, first_step=4, num_steps=3, wall_ns=9_000_000, trace=trace)
    readings = device_readings(window)
    assert readings["num_kernels"] is None and readings["busy_share"] is None
    assert readings["tensor_core_share"] == 1.0, "of the kernels that were seen"
    whole = read_trace(written(tmp_path, *launches[:100], *kernels))
    assert whole.launched_share == 1.0 and whole.is_whole


def test_a_call_of_the_driver_inside_one_of_the_runtime_is_the_same_launch(tmp_path: Path) -> None:
    trace = read_trace(
        written(
            tmp_path,
            event("cuda_runtime", "cudaLaunchKernelExC", 0, 9, call=1),
            event("cuda_driver", "cuLaunchKernelEx", 2, 5, call=2),
            event("cuda_runtime", "cudaLaunchKernel", 0, 9, on=2, call=3),
            event("cuda_driver", "cuLaunchKernel", 20, 9, call=4),
            kernel(GEMM, 30, 5, call=1),
            kernel(GEMM, 35, 5, call=3),
            event("gpu_memset", "Memset (Device)", 40, 1, call=4),
        )
    )
    assert trace.launched_share == 1.0
    alone = read_trace(written(tmp_path, event("cuda_runtime", "cudaLaunchKernel", 0, 9, call=1)))
    assert alone.launched_share is None and alone.is_whole


def test_a_copy_to_memory_that_is_not_pinned_is_a_wait_whatever_its_call_is_named(tmp_path: Path) -> None:
    trace = read_trace(
        written(
            tmp_path,
            event("cpu_op", "aten::to", 0, 30),
            event("cuda_runtime", "cudaMemcpyAsync", 5, 20, call=1),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 20, 4, on=7, call=1),
            event("cuda_runtime", "cudaMemcpyAsync", 40, 3, call=2),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 50, 4, on=7, call=2),
            event("cuda_runtime", "cudaMemcpyAsync", 60, 3),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 70, 4, on=7),
            kernel(GEMM, 80, 9),
        )
    )
    assert trace.sync_ns == 20_000
    assert trace.syncs == (Sync(what="cudaMemcpyAsync in aten::to", count=1, blocked_ns=20_000),)


def test_the_device_is_the_one_that_most_kernels_ran_on(tmp_path: Path) -> None:
    def on(device: Any, begun_us: float) -> dict:
        return {**kernel(GEMM, begun_us, 5), "args": {"device": device}}

    cards = [{"id": 0, "name": "the first"}, {"id": 1, "name": "the second"}]
    path = written(tmp_path, on(0, 0), on(1, 10), on(1, 20), deviceProperties=cards)
    assert read_trace(path).device == "the second"
    assert read_trace(written(tmp_path, on(7, 0), deviceProperties=cards)).device == "the first"
    assert read_trace(written(tmp_path, on(0, 0), deviceProperties=[3])).device == ""


# -- operations of a CPU


def test_an_operation_has_the_time_of_none_inside_it(tmp_path: Path) -> None:
    trace = read_trace(
        written(
            tmp_path,
            event("cpu_op", "aten::linear", 0, 100),
            event("cpu_op", "aten::addmm", 10, 80),
            event("cpu_op", "aten::copy_", 20, 5),
            event("cpu_op", "aten::addmm", 50, 10, on=2),  # another thread's
            event("user_annotation", "Optimizer.step#SGD.step", 100, 10),
            event("cpu_op", "aten::add_", 101, 4),
        )
    )
    assert not trace.on_device and trace.busy_ns == 0 and trace.launch_bound_ns is None
    assert {each.work: each.total_ns for each in trace.classes} == {
        C.MATRIX: 105_000,
        C.COPY: 5_000,
        C.OPTIMIZER: 4_000,
    }
    assert trace.top[0].name == "aten::addmm" and trace.top[0].total_ns == 85_000


# -- files


def test_a_packed_trace_says_the_same_and_names_are_any_text(tmp_path: Path) -> None:
    events = (kernel('カーネル<\u2028>"\\', 0, 1.25), kernel(ADD, 4_433_276_676_525.222, 0.001))
    plain, packed = (read_trace(written(tmp_path, *events, name=name)) for name in ("a.json", "a.json.gz"))
    assert plain == packed
    assert plain.top[0].name == 'カーネル<\u2028>"\\' and plain.kernel_ns == 1_251


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_trace_that_ends_in_the_middle_is_read_as_far_as_it_goes(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, *(kernel(GEMM, 10 * index, 4) for index in range(2000)), name=name)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    trace = read_trace(path)
    assert trace.damaged and 100 < trace.num_kernels < 2000
    assert trace.busy_ns == 4_000 * trace.num_kernels


def test_pieces_may_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, *(kernel("ö" * 9, 10 * index, 4) for index in range(40)))
    whole = read_trace(path)
    for piece in (7, 64, 193):
        monkeypatch.setattr(trace_events, "PIECE", piece)
        assert read_trace(path) == whole


def test_a_bare_list_of_events_is_a_trace_too_and_odd_ones_are_left_out(tmp_path: Path) -> None:
    odd = [
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "kernel", "name": GEMM},
        {"ph": "X", "cat": "kernel", "name": GEMM, "ts": "soon", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 1, "dur": -1},
        {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 1, "dur": float("nan")},
        {"ph": "X", "cat": 5, "name": None, "ts": 1, "dur": 1, "args": []},
        7,
        kernel(GEMM, 3, 2),
    ]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(odd))
    trace = read_trace(path)
    assert trace.num_kernels == 1 and trace.busy_ns == 2_000 and not trace.damaged


def test_a_trace_without_events_says_nothing(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path))
    assert (trace.span_ns, trace.classes, trace.damaged) == (0, (), False)


@pytest.mark.parametrize("text", ["", "{}", '{"a": 1}', "\0\0", "hello"])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DiagnoseError, match=r"x\.json: no trace"):
        read_trace(path)


def test_what_is_not_packed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_text("{}")
    with pytest.raises(DiagnoseError, match="unpacked"):
        read_trace(path)


def test_events_after_the_end_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, kernel(GEMM, 0, 4), kernel(GEMM, 10, 4), kernel(GEMM, 20, 4))
    assert read_trace(path, until_ns=20_000).num_kernels == 2


def test_steps_that_the_trace_marks_are_counted_once(tmp_path: Path) -> None:
    marks = [event("user_annotation", f"ProfilerStep#{index // 2}", 10 * index, 5) for index in range(6)]
    assert read_trace(written(tmp_path, kernel(GEMM, 0, 1), *marks)).num_steps == 3
