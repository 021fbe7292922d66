"""Memory that goes back to the system in each step: seen, named, and kept, on a script that does it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diagnose.actions import _memory
from diagnose.actions._malloc import library
from diagnose.actions.base import CannotApply
from diagnose.actions.keep_freed_memory import STATEMENT, KeepFreedMemory
from diagnose.core.job import Job
from tests.running import environment
from tests.toggled import ConvNet, assert_equal, images, train, tuned, weights

MAPPED = 12 << 20
"""Floats of a block larger than any that glibc keeps by itself."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def why_not() -> str:
    """Says why pages are not fetched one by one here."""
    try:
        library()
    except CannotApply as reason:
        return str(reason)
    return "pages are huge" if "[always]" in HUGE_PAGES.read_text() else ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")


IN_A_PROCESS_OF_ITS_OWN = f"""
import resource, threading, torch
from diagnose.actions._malloc import FINER, library, mapped_from
from diagnose.actions.base import CannotApply
from diagnose.actions.keep_freed_memory import KeepFreedMemory
from diagnose.core.job import Job

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones({MAPPED})
    pages = {4 * MAPPED // resource.getpagesize()}
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / pages

job, action = Job(), KeepFreedMemory()
"""


def alone(code: str) -> None:
    """Runs code in a process in which no other test has set up the allocator."""
    subprocess.run([sys.executable, "-c", IN_A_PROCESS_OF_ITS_OWN + code], check=True, env=environment())


@pytest.mark.extended
def test_pages_are_fetched_once_while_it_is_in_force_and_in_every_step_after_it() -> None:
    alone("""
action.check(job)
before = action.state(job)
assert faults() > 0.9
with action.prepare(job, None) as ready:
    for _ in range(2):
        with action.apply(job, ready):
            for _ in range(10):  # small blocks take a part of the first large ones that are free
                faults()
            assert sorted(faults() for _ in range(9))[4] < 0.1
        faults()  # of what is free in the heap
        assert sorted(faults() for _ in range(9))[4] > 0.9
action.verify_undone(job, before)
""")


def test_the_limit_of_what_is_kept_is_found_and_put_back() -> None:
    alone("""
glibc = library()
glibc.free(glibc.malloc(20 << 20))  # raises it
before = mapped_from(glibc)
assert 20 << 20 <= before <= FINER**2 * (20 << 20)
for _ in range(2):
    with action.prepare(job, None) as ready, action.apply(job, ready):
        try:
            mapped_from(glibc)
        except CannotApply as reason:
            assert "set the allocator up itself" in str(reason)
        else:
            raise AssertionError("nothing that is probed is mapped")
assert before / FINER <= mapped_from(glibc) <= FINER**4 * before
""")


def test_a_thread_whose_memory_lies_elsewhere_is_refused() -> None:
    alone("""
reasons = []

def train():
    try:
        action.check(job)
    except CannotApply as reason:
        reasons.append(str(reason))

thread = threading.Thread(target=train)
thread.start()
thread.join()
assert "does not lie in the heap" in reasons[0]
""")


def test_training_ends_with_the_same_bits() -> None:
    ends = []
    for action in (None, KeepFreedMemory()):
        torch.manual_seed(0)
        model = ConvNet()
        with tuned(action):
            train(model, torch.optim.SGD(model.parameters(), lr=0.01), images())
        ends.append(weights(model))
    assert_equal(ends[1], ends[0])


def test_it_is_refused_where_it_would_do_nothing_or_undo_what_the_user_did(monkeypatch: Any) -> None:
    with pytest.raises(CannotApply, match="of a device"):
        KeepFreedMemory().check(Job(device="cuda"))
    with monkeypatch.context() as short:
        short.setattr(_memory, "_free_of_host", lambda: 0.05)
        with pytest.raises(CannotApply, match="memory is short"):
            KeepFreedMemory().check(Job())
        assert "memory is short" in KeepFreedMemory().why_not_stay(None)
    assert not KeepFreedMemory().why_not_stay(None)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.hwcaps=none")
    library()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")
    with pytest.raises(CannotApply, match="GLIBC_TUNABLES is set"):
        library()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    with pytest.raises(CannotApply, match="is set"):
        KeepFreedMemory().check(Job())


SCRIPT = f"""
import torch
{{line}}
torch.manual_seed(0)
model = torch.nn.Linear(64, {MAPPED // 64})
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(45):
    optimizer.zero_grad()
    model(torch.randn(1, 64)).pow(2).mean().backward()
    optimizer.step()
"""


def found(folder: Path, line: str) -> list[str]:
    """Rules that find a fault in the script with a line of its own, the most costly first."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT.format(line=line))
    command = [sys.executable, "-m", "diagnose", "run", "--quiet", "--json", "out.json", "train.py"]
    subprocess.run(command, cwd=folder, check=True, env={**environment(), "OMP_NUM_THREADS": "1"})
    return [finding["rule"] for finding in json.loads((folder / "out.json").read_text())["findings"]]


@pytest.mark.extended
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="read from /proc")
def test_a_script_that_fetches_its_gradients_anew_in_each_step_is_told_and_the_line_mends_it(
    tmp_path: Path,
) -> None:
    assert found(tmp_path / "plain", "")[0] == "page-faults"
    assert "page-faults" not in found(tmp_path / "mended", STATEMENT)
