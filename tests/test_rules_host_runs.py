"""Rules about the host on real runs with a fault in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from diagnose.analysis.profile import load_profile, load_series
from diagnose.core.profile import Profile
from diagnose.rules._engine import ask
from tests.findings import MAX_FOREIGN_CPUS, RULES, undisturbed
from tests.running import DIAGNOSE, only_run, recorded, run, write

pytestmark = pytest.mark.alone

JOB = """
import json, sys, time
import torch
from torch import nn

fault = sys.argv[1]
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
spent = []


def clip(limit):
    for _ in range(60):
        total = 0.0
        for p in model.parameters():
            total += p.grad.norm().item() ** 2
        for p in model.parameters():
            p.grad.mul_(min(1.0, limit / (total**0.5 + 1e-6)))


for step in range(150):
    x = torch.randn(16, 32)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    begun = time.perf_counter()
    if fault == "clip":
        clip(1.0)
    clipped = time.perf_counter() - begun
    optimizer.step()
    begun = time.perf_counter()
    if fault == "sleep":
        time.sleep(0.01)
    elif fault == "busy":
        order = sorted(str(i) for i in range(20000))
    elif fault == "log":
        for _ in range(800):
            print(json.dumps({"step": step, "loss": 0.5}), file=sys.stderr, flush=True)
    elif fault == "save" and step % 10 == 9:
        for _ in range(40):
            torch.save(model.state_dict(), sys.argv[2] + "/model.pt")
    spent.append(clipped + time.perf_counter() - begun)
with open(sys.argv[2] + "/spent.json", "w") as file:
    json.dump(spent, file)
"""


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("sleep", "blocking-call"),
        pytest.param("busy", "python-overhead", marks=pytest.mark.extended),
        pytest.param("log", "logging-io", marks=pytest.mark.extended),
        pytest.param("clip", "slow-clipping", marks=pytest.mark.extended),
        pytest.param("save", "checkpoint-stall", marks=pytest.mark.extended),
    ],
)
def test_a_fault_in_a_real_run_is_named_with_its_line_and_its_size(fault: str, rule: str, tmp_path: Path):
    seen = load_profile(recorded(tmp_path, JOB, fault, tmp_path))
    findings = {finding.rule: finding for finding in ask(RULES, seen)[0]}
    assert rule in findings, list(findings)
    found = findings[rule]
    assert found.file == str(tmp_path / "train.py")
    spent = json.loads((tmp_path / "spent.json").read_text())[seen.steps.warmup :]
    true_ns = 1e9 * sum(spent) / len(spent)
    assert found.lost_ns_per_step == pytest.approx(true_ns, rel=0.3)
    assert rule == next(iter(findings)), "the fault takes more than everything else"


SMALL_OPERATIONS = """
import torch
from torch import nn

torch.set_num_threads(2)
layers = [module for _ in range(24) for module in (nn.Linear(256, 256), nn.Tanh())]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(64, 256)
for step in range(150):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.extended
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two threads want two CPUs")
def test_threads_that_sleep_between_operations_are_told_by_what_waking_them_costs(tmp_path: Path):
    script = write(tmp_path / "train.py", SMALL_OPERATIONS)
    quickest_ns = {}
    for policy in ("active", "passive"):

        def measured(name: str, policy: str = policy) -> Profile:
            folder = tmp_path / policy / name
            folder.mkdir(parents=True)
            ended = run(
                *DIAGNOSE, "--quiet", script, cwd=folder, OMP_WAIT_POLICY=policy, GOMP_SPINCOUNT=None
            )
            assert ended.code == 0, ended.stderr[-2000:]
            # What else runs here makes steps longer, and those whose threads stay awake by more.
            quickest_ns[policy] = float(np.quantile(load_series(only_run(folder)).step_time_ns, 0.05))
            return load_profile(only_run(folder))

        seen = undisturbed(measured)
        if policy == "active" and (seen.foreign_cpus or 0.0) > MAX_FOREIGN_CPUS:
            pytest.skip("what else runs here takes CPUs: threads that stay awake are no faster then")
        found = {finding.rule: finding for finding in ask(RULES, seen)[0]}.get("sleeping-threads")
        assert (found is not None) is (policy == "passive"), seen.host
    assert found is not None
    truth = 1 - quickest_ns["active"] / quickest_ns["passive"]
    low, high = (ns / seen.step_time_ns for ns in (found.low_ns, found.high_ns))
    assert low / 1.3 < truth < 1.3 * high
