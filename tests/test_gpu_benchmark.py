"""The scripts for a GPU, as far as they can be run without one: the same code, on the emulated device."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU = Path(__file__).parents[1] / "benchmarks" / "gpu"


def test_the_shell_script_parses_and_refuses_a_part_that_it_does_not_have(tmp_path: Path) -> None:
    script = str(GPU / "run.sh")
    subprocess.run(["bash", "-n", script], check=True)
    environment = os.environ | {"OUT": str(tmp_path)}
    done = subprocess.run(
        ["bash", script, "optimisers"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no part optimisers" in done.stderr


def test_the_table_of_optimizers_is_rehearsed_on_the_emulated_device(tmp_path: Path) -> None:
    """Behind a case that ends its process in the middle, as a kernel that breaks the device would."""
    command = [sys.executable, str(GPU / "optimizers.py"), "--dry-run", "--out", str(tmp_path)]
    command += ["--minutes", "3", "--cases", "no-such-row/tiny", "B0/tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1, "a case failed"

    broken, measured = json.loads((tmp_path / "optimizers.json").read_text())["cases"]
    assert broken["case"] == "no-such-row/tiny" and "exited with 1" in broken["failure"]
    found = {each["name"]: each for each in measured["contenders"]}
    assert {name: each["status"] for name, each in found.items() if name != "DeepSpeed FusedAdam"} == {
        "torch default": "measured",
        "torch fused": "measured",
        "ours, exact clip": "measured",
        "ours, deferred clip": "measured",
        "ours, deferred, moving": "measured",
    }, done.stderr
    launches = {
        name: each["launches"]["kernels"] for name, each in found.items() if name.startswith("ours")
    }
    assert launches == {"ours, exact clip": 3, "ours, deferred clip": 2, "ours, deferred, moving": 2}
    assert found["ours, exact clip"]["error"] < 1e-5

    text = (tmp_path / "optimizers.md").read_text()
    assert "A rehearsal on a CPU: nothing was timed." in text
    assert " ms (" not in text and " us (" not in text


def test_a_trace_is_charged_to_where_work_was_launched_and_to_what_the_host_did_while_there_was_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots 1 and 2; a kernel launched in the first runs until the host is far into the second."""
    monkeypatch.syspath_prepend(str(GPU))
    truth = importlib.import_module("device_ledger_truth")

    def span(cat: str, name: str, ts: float, dur: float, **args: int) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        span("user_annotation", f"{truth.SLOT}1", 0, 0),
        span("user_annotation", f"{truth.MARK}7", 0, 0),
        span("cuda_runtime", "cudaLaunchKernel", 10, 2, correlation=1),
        span("kernel", "a", 20, 100, correlation=1, stream=7),
        span("kernel", "elsewhere", 20, 50, correlation=1, stream=9),
        span("user_annotation", f"{truth.SLOT}2", 30, 0),
        span("cuda_runtime", "cudaStreamSynchronize", 100, 20, correlation=2),
        span("cuda_runtime", "cudaLaunchKernel", 140, 2, correlation=3),
        span("kernel", "b", 150, 40, correlation=3, stream=7),
        span("user_annotation", f"{truth.MARK}8", 160, 0),
        span("kernel", "c", 190, 1, correlation=3, stream=7),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    trace = truth.Truth(path)
    assert trace.between(7, 8) == {1: 120_000, 2: 71_000}
    assert trace.syncs == {"cudaStreamSynchronize": 1}


def test_the_byte_model_in_the_readme_is_what_the_script_prints() -> None:
    command = [sys.executable, str(GPU / "optimizers.py"), "--byte-model"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    readme = (GPU.parents[1] / "kernels" / "README.md").read_text(encoding="utf-8")
    assert readme.partition("<!-- bytes -->")[2].partition("<!-- /bytes -->")[0].strip() == printed
