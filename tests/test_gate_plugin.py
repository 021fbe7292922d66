"""What a marker may hold, and what becomes of a test session whose gate a signal ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gates import commit, repository
from tests.running import REPOSITORY
from tests.test_pytest_plugin import CONFTEST, run_tests

TRAIN = 'print(open("data/step_ms").read())\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository whose script needs data that git does not hold."""
    top = repository(tmp_path / "project", TRAIN)
    (top / "conftest.py").write_text(CONFTEST.format(repository=str(REPOSITORY)))
    commit(top, TRAIN)
    (top / "data").mkdir()
    (top / "data" / "step_ms").write_text("10")
    return top


@pytest.mark.extended
@pytest.mark.parametrize("link", ['"data"', '["data"]'], ids=["one", "several"])
def test_the_data_of_a_link_is_there(project: Path, link: str) -> None:
    test = f"import pytest\n@pytest.mark.diagnose_gate(base='main', link={link})\n"
    code, text = run_tests(project, test + "def test_it(diagnose_gate):\n    diagnose_gate('train.py')\n")
    assert code == 0, text


def test_a_signal_that_ends_the_gate_ends_the_session(project: Path) -> None:
    (project / "conftest.py").write_text(
        "import os, signal\nfrom diagnose.gate import measure\n"
        "measure.measured_run = lambda *plan: os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    test = "def test_it(diagnose_gate):\n    diagnose_gate('train.py')\n\ndef test_another():\n    pass\n"
    code, text = run_tests(project, test, DIAGNOSE_GATE_BASE="HEAD")
    assert code == 143, text
    assert "a signal ended the gate" in text
    assert "failed" not in text and "1 passed" not in text
