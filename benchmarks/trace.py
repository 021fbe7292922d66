"""Reading traces of torch's profiler: ours beside Holistic Trace Analysis (HTA), on the same files.

    python benchmarks/trace.py [TRACE ...] [--size-mb 200] [--hta-python PATH] [--markdown PATH]

The first table is of a trace made here, of a GPU's training step said over and over: how long we take and
in how much memory. The second compares the breakdown of each given trace with HTA's, in a process of its
own under an interpreter that has HTA (`pip install HolisticTraceAnalysis`). HTA looks only at kernels whose
launch the trace holds: for the comparison the others are left out of ours, as the table says. It rounds to
microseconds unless told otherwise, and here it is.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from diagnose.analysis.trace import read_trace, summarize
from diagnose.analysis.trace_events import CALL, FILL, Events, read_events

HTA = """
import json, os, sys, time, warnings, logging
os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
warnings.filterwarnings("ignore"); logging.disable(50)
from hta.trace_analysis import TraceAnalysis
path = sys.argv[1]
begun, cpu = time.perf_counter(), time.process_time()
found = TraceAnalysis(
    trace_files={0: path}, trace_dir=os.path.dirname(path), include_last_profiler_step=True
)
row = found.get_temporal_breakdown(visualize=False).to_dict("records")[0]
took = time.perf_counter() - begun, time.process_time() - cpu
overlap = found.get_comm_comp_overlap(visualize=False).to_dict("records")[0]["comp_comm_overlap_pctg"]
print("ANSWER" + json.dumps([row, overlap, took]))
"""

KERNELS = (
    "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>>",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, cutlass::half_t>>",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>",
    "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
)
PLACE = '"pid": {pid}, "tid": {tid},\n    "ts": {ts:.3f}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="*")
    parser.add_argument("--size-mb", type=int, default=200)
    parser.add_argument("--hta-python", default=sys.executable)
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    lines = [f"{platform.machine()}, Python {platform.python_version()}, one thread", ""]
    lines += large(args.size_mb)
    if args.traces:
        lines += ["", *compared(args.traces, args.hta_python)]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


def large(size_mb: int) -> list[str]:
    """Returns the table of the trace made here."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.json"
        write_large(path, size_mb * 1_000_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun, cpu = time.perf_counter(), time.process_time()
        trace = read_trace(path)
        took, busy = time.perf_counter() - begun, time.process_time() - cpu
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        size = path.stat().st_size / 1e6
    return [
        "| trace | events | wall | CPU time | memory beyond the interpreter's |",
        "|---|---|---|---|---|",
        f"| {size:,.0f} MB | {trace.num_events:,} | {took:.1f} s | {busy:.1f} s"
        f" | {memory / 1024:,.0f} MB |",
    ]


def write_large(path: Path, num_bytes: int) -> None:
    """Writes a trace in Kineto's form: operations, their launches, their kernels, the arrows between."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{"name": "made"}], "traceEvents": [\n')
        number = 0
        while file.tell() < num_bytes:
            ts = 4433276676525.222 + 12.5 * number
            file.write(_events(ts, number))
            number += 1
        file.write('  {"ph": "i", "name": "Record Window End", "ts": 1}\n  ],"traceName": "made" }')


def _events(ts: float, number: int) -> str:
    name = KERNELS[number % len(KERNELS)]
    host = PLACE.format(pid=1, tid=1, ts=ts)
    call = PLACE.format(pid=1, tid=1, ts=ts + 2)
    stream = 20 if name.startswith("nccl") else 7
    device = PLACE.format(pid=0, tid=stream, ts=ts + 9)
    return f"""  {{
    "ph": "X", "cat": "cpu_op", "name": "aten::op{number % 40}", {host}, "dur": 7.125,
    "args": {{
      "External id": {number},"Sequence number": {number}, "Fwd thread id": 0, "Ev Idx": {number}
    }}
  }},
  {{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", {call}, "dur": 4.210,
    "args": {{
      "External id": {number}, "cbid": 211, "correlation": {number}
    }}
  }},
  {{
    "ph": "X", "cat": "kernel", "name": "{name}", {device}, "dur": {6 + number % 9}.375,
    "args": {{
      "External id": {number}, "queued": 0, "device": 0, "context": 1, "stream": {stream},
      "correlation": {number}, "registers per thread": 32, "shared memory": 0,
      "blocks per SM": 1.2, "warps per SM": 9.6, "grid": [128, 1, 1], "block": [256, 1, 1],
      "est. achieved occupancy %": 15
    }}
  }},
  {{
    "ph": "s", "id": {number}, {call}, "cat": "ac2g", "name": "ac2g"
  }},
  {{
    "ph": "f", "id": {number}, {device}, "cat": "ac2g", "name": "ac2g", "bp": "e"
  }},
"""


def compared(traces: list[Path], python: str) -> list[str]:
    """Returns the table of the given traces."""
    lines = [
        "| trace | | compute, ms | other kernels alone, ms | idle, ms | overlap | wall | CPU time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in traces:
        begun, cpu = time.perf_counter(), time.process_time()
        events = read_events(path)
        summarize(events)
        took = time.perf_counter() - begun, time.process_time() - cpu
        kept, dropped = with_launches(events)
        trace = summarize(kept)
        other = (trace.busy_ns - trace.compute_ns) / 1e6
        idle = (trace.kernels_span_ns - trace.busy_ns) / 1e6
        overlap = 1 - trace.exposed_ns / trace.communication_ns if trace.communication_ns else float("nan")
        mine = (trace.compute_ns / 1e6, other, idle, 100 * overlap)
        note = f" ({dropped:,} kernels without a launch left out)" if dropped else ""
        lines.append(row(f"{path.name[:48]}{note}", "ours", mine, took))
        answer = asked(path, python)
        if isinstance(answer, str):
            lines.append(f"| | HTA | {answer} | | | | | |")
            continue
        found, its_overlap, its_took = answer
        times = [found[f"{name}_time(us)"] / 1e3 for name in ("compute", "non_compute", "idle")]
        lines.append(row("", "HTA", (*times, its_overlap), its_took))
        whole = found["kernel_time(us)"] / 1e3
        worst = max(abs(a - b) / whole for a, b in zip(mine, times, strict=False))
        lines.append(f"| | largest difference | {worst:.2%} of the time | | | | | |")
    return lines


def with_launches(events: Events) -> tuple[Events, int]:
    """Returns the events without kernels and copies whose launch is not there, and how many those are."""
    on_device = events.kind <= FILL
    launched = events.correlation[(events.kind == CALL) & (events.correlation >= 0)]
    kept = ~on_device | np.isin(events.correlation, launched)
    columns = {
        each.name: getattr(events, each.name)[kept]
        for each in fields(events)
        if isinstance(getattr(events, each.name), np.ndarray)
    }
    return replace(events, **columns), int((~kept).sum())


def asked(path: Path, python: str) -> str | list[Any]:
    """Returns HTA's breakdown, overlap and times, or why there is none."""
    done = subprocess.run(
        [python, "-c", HTA, str(path.absolute())], capture_output=True, text=True, check=False
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    if not answers:
        return "no answer: " + (done.stderr.strip().splitlines() or ["?"])[-1][:100]
    answer: list[Any] = json.loads(answers[0].removeprefix("ANSWER"))
    return answer


def row(name: str, who: str, figures: tuple[float, float, float, float], took: tuple[float, float]) -> str:
    shown = " | ".join(f"{figure:,.1f}" for figure in figures[:3])
    overlap = "" if figures[3] != figures[3] else f"{figures[3]:.1f} %"
    return f"| {name} | {who} | {shown} | {overlap} | {took[0]:.1f} s | {took[1]:.1f} s |"


if __name__ == "__main__":
    main()
