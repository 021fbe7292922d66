"""Asks, in a process of its own, whether a rule of a running job misses what a deep window tells."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from diagnose.tuner.diagnosis import NICENESS, PACKAGE

TOLD = (
    "device.busy_share",
    "device.num_kernels",
    "device.tensor_core_share",
    "device.matmul_share",
    "device.layout_share",
)
"""The readings of `core.profile` that a window is one source of. A rule whose `needs` name one declares by
that that a window would help it."""

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from diagnose.launch.deep_window_rules import main
main(sys.argv[2])
"""


class Unsure:
    """The question under way. Asked once.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)

    def names(self) -> list[str] | None:
        """Returns the rules that a window would help, or `None` while that is not known yet."""
        if self._process is None:
            ours = ("DIAGNOSE_RUN", "DIAGNOSE_SUPERVISOR", "PYTHONPATH", "PYTHONSTARTUP")
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(PACKAGE), str(self._folder.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=self._answer,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={
                    **{key: value for key, value in os.environ.items() if key not in ours},
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "OMP_NUM_THREADS": "1",
                },
            )
        if self._process.poll() is None:
            return None
        self._answer.seek(0)
        try:
            names = [str(name) for name in json.loads(self._answer.read())]
        except ValueError:
            names = []
        self.close()
        return names

    def close(self) -> None:
        """Gives the question up."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._answer.close()


def main(folder: str) -> None:
    """Prints the names of the rules that abstain for want of what a window tells, as JSON."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICENESS)
    from diagnose.analysis.profile import load_profile
    from diagnose.rules import diagnosed
    from diagnose.rules._engine import reading, rules

    profile = diagnosed(load_profile(Path(folder)))
    told = {name for name in TOLD if reading(profile, name) is None}
    known = rules()
    print(
        json.dumps([each.rule for each in profile.abstained if told.intersection(known[each.rule].needs)])
    )
