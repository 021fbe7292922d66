"""A run is analysed by the source that ran, whatever has become of the files since."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.analysis.profile import load_profile, load_series
from diagnose.core.phases import Phase
from diagnose.rules import diagnosed
from diagnose.store.reader import read_rank
from tests.running import DIAGNOSE, only_run, run, write

DATA = """
import time
import torch


def batch():
    time.sleep(0.004)
    return torch.randn(8, 4)
"""

TRAIN = """
import torch
from data import batch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(80):
    x = batch()
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.extended
def test_an_edited_script_changes_nothing_of_a_run(tmp_path: Path) -> None:
    write(tmp_path / "data.py", DATA)
    script = write(tmp_path / "train.py", TRAIN)
    ended = run(*DIAGNOSE, "--quiet", "train.py", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    folder = only_run(tmp_path)
    before, series = diagnosed(load_profile(folder)), load_series(folder)
    assert before.share(Phase.DATA_WAIT) > 0.5
    assert read_rank(folder / "rank0.sqlite").sources == {
        str(tmp_path / "data.py"): DATA,
        str(script): TRAIN,
    }
    for path in (script, tmp_path / "data.py"):
        path.write_text("# a line more\n" * 3 + path.read_text())
    after, later = diagnosed(load_profile(folder)), load_series(folder)
    assert repr(after) == repr(before)  # NaN, for what was not measured, equals nothing
    assert {phase: ns.sum() for phase, ns in later.phase_time_ns.items()} == {
        phase: ns.sum() for phase, ns in series.phase_time_ns.items()
    }
    script.unlink()
    assert diagnosed(load_profile(folder)) == before
