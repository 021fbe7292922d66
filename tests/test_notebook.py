"""Runs recorded in a notebook, whose cells lie in no file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from diagnose.analysis.profile import load_profile
from diagnose.core.phases import Phase
from diagnose.core.profile import Status
from tests.running import TIMEOUT_S, environment

SCRIPT = Path(__file__).parent / "scripts" / "notebook.py"


@pytest.mark.extended
def test_lines_of_cells_are_read_and_an_earlier_cell_that_failed_is_not_this_run(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path / "run")]
    subprocess.run(command, env=environment(), check=True, timeout=TIMEOUT_S)
    profile = load_profile(tmp_path / "run")
    assert profile.status is Status.OK
    for phase in (Phase.DATA_WAIT, Phase.FORWARD):
        assert profile.phase_time_ns[phase] > max(4e6, 2 * profile.phase_time_ns.get(Phase.OTHER, 0.0))
        assert "time.sleep(0.004)" in {line.text for line in profile.where if line.phase is phase}
