"""A deep window of a job on a real GPU: silent, complete, and in agreement with what the device did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diagnose.analysis.profile import load_profile
from diagnose.core.deep_window import WorkClass
from diagnose.core.profile import Profile
from diagnose.launch.machine_rates import measure
from diagnose.store.machine import keep_rates
from tests.running import DIAGNOSE, PLAIN, only_run, run, write

TRAIN = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
data = torch.utils.data.TensorDataset(torch.randn(60 * 256, 2048))
total = 0.0
for (batch,) in torch.utils.data.DataLoader(data, batch_size=256):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(batch.cuda()).square().mean()
    loss.backward()
    optimizer.step()
    total += loss.item()
print(f"{total:.17g}")
"""
PRODUCTS = 8 + 8 + 7
"""Forward; the weights' gradients; the inputs' gradients, of all layers but the first."""


def windowed(folder: Path, gpu: torch.device) -> tuple[Profile, str]:
    script = write(folder / "train.py", TRAIN)
    plain = run(*PLAIN, script, cwd=folder)
    ended = run(*DIAGNOSE, "--quiet", "--deep-window", "30:3", script, cwd=folder)
    assert (ended.code, ended.stdout, ended.stderr) == (plain.code, plain.stdout, plain.stderr)
    return load_profile(only_run(folder)), str(script)


def test_kernels_are_recorded_and_the_script_is_the_same(
    tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIAGNOSE_STATE", str(tmp_path / "state"))
    keep_rates(measure(str(gpu)))
    profile, script = windowed(tmp_path, gpu)
    window = profile.deep_window
    assert window is not None and window.num_steps == 3 and window.trace.on_device
    trace = window.trace
    assert trace.device == torch.cuda.get_device_name(gpu)
    times = {each.work: each for each in trace.classes}
    assert times[WorkClass.MATRIX].count >= 3 * PRODUCTS
    assert {WorkClass.OPTIMIZER, WorkClass.COPY} <= set(times)
    assert trace.num_launches is not None and trace.num_launches >= trace.num_kernels
    assert 0 < trace.compute_ns <= trace.busy_ns <= window.wall_ns
    assert trace.tensor_core_ns > 0.5 * times[WorkClass.MATRIX].total_ns, "bfloat16 products use them"
    assert window.counted is not None and window.counted.dtype == "bfloat16"
    assert window.counted.flops == 2 * 256 * 2048 * 2048 * PRODUCTS
    assert window.mfu is not None and 0 < window.mfu < 1
    line = next(n for n, text in enumerate(TRAIN.splitlines(), start=1) if "loss.item()" in text)
    waits = [(sync.file, sync.line) for sync in (*trace.syncs, *window.counted.lines)]
    assert (script, line) in waits and trace.sync_ns > 0
    assert profile.device.num_kernels == trace.num_kernels / 3
    assert 0 < (profile.device.busy_share or 0) <= 1


def test_what_the_device_reaches_is_below_its_data_sheet_and_has_a_spread(gpu: torch.device) -> None:
    rates = measure(str(gpu))
    assert {"float32", "bfloat16", "float16"} <= set(rates.flops)
    assert rates.flops["bfloat16"].median > 2 * rates.flops["float32"].median
    for rate in (rates.copy_bytes, *rates.flops.values()):
        assert 0.7 * rate.median < rate.low <= rate.median <= rate.high < 1.4 * rate.median
