"""Lines that wait are told by that they use no CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diagnose.analysis.profile import load_profile
from diagnose.analysis.standing import LEAST_SEEN_NS, MAX_RUNNABLE, with_waits
from diagnose.core.host import HostStats, PythonThread
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase
from diagnose.core.profile import SourceLine
from diagnose.rules.blocking_call import BlockingCall
from diagnose.store.reader import RankLog
from tests.running import DIAGNOSE, only_run, run, write

FILE = "/home/me/train.py"
FRAME = (FILE, 7, "main")
NOBODY = ("", 0, "")
QUIET = HostStats(runnable_share=0.05, read_bytes_per_s=0.0)
LINE = SourceLine(phase=Phase.OTHER, file=FILE, line=7, function="main", share=0.3, between=0.3)


def log_of(off_cpu: float, device: str = "cpu", seen_ns: int = 2 * LEAST_SEEN_NS) -> RankLog:
    standing = [
        ((NOBODY, FRAME), seen_ns // 2, int(seen_ns // 2 * off_cpu)),
        ((NOBODY, FRAME, FRAME), seen_ns // 2, int(seen_ns // 2 * off_cpu)),
    ]
    return RankLog(
        path=Path("rank"), meta={"device": device}, steps=np.empty((0, len(COLUMNS))), standing=standing
    )


def test_a_line_that_uses_no_cpu_waits_whatever_it_calls():
    (line,) = with_waits([replace(LINE, idiom=("python-loop",))], log_of(0.95), QUIET)
    assert line.off_cpu == pytest.approx(0.95)
    assert line.idiom == ("wait",)


def test_a_line_that_was_hardly_seen_to_stand_does_not_wait():
    (line,) = with_waits([LINE], log_of(0.95, seen_ns=LEAST_SEEN_NS // 2), QUIET)
    assert line.off_cpu is None
    assert line.idiom == ()


@pytest.mark.parametrize("share, via", [(0.3, ""), (0.06, "redis/client.py:9 get")])
def test_so_does_one_that_makes_a_batch(share: float, via: str):
    before = replace(LINE, phase=Phase.DATA_WAIT, share=share, between=share, via=via)
    (line,) = with_waits([before], log_of(0.95), QUIET)
    assert line.idiom == ("wait",)


def test_a_thread_that_computes_for_less_time_than_a_line_waits_does_not_hold_it_up():
    host = replace(QUIET, python_threads=(PythonThread(name="server", cpus=0.08),))
    (line,) = with_waits([LINE], log_of(0.95), host)
    assert line.idiom == ("wait",)


OF_A_BATCH = {"phase": Phase.DATA_WAIT, "share": 0.06, "between": 0.06}


@pytest.mark.parametrize(
    ("changes", "off_cpu", "host", "device"),
    [
        ({}, 0.6, QUIET, "cpu"),
        ({}, 0.95, QUIET, "cuda"),
        ({}, 0.95, HostStats(), "cpu"),
        ({}, 0.95, replace(QUIET, runnable_share=0.4), "cpu"),
        ({}, 0.95, replace(QUIET, python_threads=(PythonThread(name="t", cpus=0.2),)), "cpu"),
        ({"idiom": ("log",)}, 0.95, QUIET, "cpu"),
        ({"between": 0.1}, 0.95, QUIET, "cpu"),
        ({"phase": Phase.DATA_WAIT}, 0.95, replace(QUIET, read_bytes_per_s=1e7), "cpu"),
        ({"phase": Phase.FORWARD}, 0.95, QUIET, "cpu"),
        ({**OF_A_BATCH}, 0.95, QUIET, "cpu"),
        (
            {**OF_A_BATCH, "via": "torchvision/transforms/_functional_tensor.py:467 resize"},
            0.95,
            QUIET,
            "cpu",
        ),
    ],
)
def test_a_line_with_another_reason_to_stand_still_keeps_its_idiom(changes, off_cpu, host, device):
    before = replace(LINE, **changes)
    (line,) = with_waits([before], log_of(off_cpu, device), host)
    assert line.idiom == before.idiom


SCRIPT = """
import os, select, threading, time
import torch

asked, answered = os.pipe(), os.pipe()

def serve():
    while request := os.read(asked[0], 8):
        time.sleep(float(request))
        os.write(answered[1], b"!")

threading.Thread(target=serve, daemon=True).start()

def look_up(seconds):
    {}

def count(seconds):
    total = 0
    for i in range(int(seconds * 1e7)):
        total += i * i

model = torch.nn.Linear(64, 64)
opt = torch.optim.SGD(model.parameters(), 0.1)
waited = 0.0
for step in range(120):
    loss = model(torch.ones(64, 64)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    begun = time.perf_counter()
    look_up(0.015)
    waited += time.perf_counter() - begun
    count(0.015)
print("waited", 1e3 * waited / 120)
"""


@pytest.mark.extended
@pytest.mark.alone
@pytest.mark.parametrize(
    ("wait", "line"),
    [
        ("select.select([], [], [], seconds)", "select.select([], [], [], seconds)"),
        (
            "os.write(asked[1], str(seconds).encode())\n    os.read(answered[0], 1)",
            "os.read(answered[0], 1)",
        ),
    ],
)
def test_a_wait_that_has_no_name_is_a_blocking_call(tmp_path, wait, line):
    script = write(tmp_path / "train.py", SCRIPT.format(wait))
    ended = run(*DIAGNOSE, script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    found = load_profile(only_run(tmp_path))
    if (found.host.runnable_share or 0.0) > MAX_RUNNABLE:
        pytest.skip("CPUs are short: no line is said to wait")
    by_text = {line.text: line for line in found.where}
    waits = by_text[line]
    assert waits.off_cpu is not None and waits.off_cpu > 0.85
    assert waits.idiom == ("wait",)
    computes = [line for line in found.where if line.function == "count"]
    assert computes and all("wait" not in line.idiom for line in computes)
    finding = BlockingCall().check(found)
    assert finding is not None
    waited_ms = float(ended.stdout.partition("waited")[2].split()[0])
    assert sum(finding.lost_ns.values()) / 1e6 == pytest.approx(waited_ms, rel=0.25)
