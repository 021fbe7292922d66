"""Asks something about a run in progress in a process of its own: reading and judging the records takes a
second of CPU time, which the training process does not have to spare.

Its priority is that of the training. Measured where two threads of torch's train on two CPUs: an answer of
0.6 s of CPU time came after 0.7 to 1 s and cost the training 0.6 s; at a niceness of 10 it came after 4 to
7 s and cost 0.5 to 0.9 s, as each of its short turns makes both threads wait.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2]
"""The folder that holds `diagnose`, for a child that need not find it installed."""

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from diagnose.tuner.question import answer
answer(*sys.argv[2:])
"""


class Question:
    """A question under way.

    Args:
        module: Name of the module whose function `answer` is asked; it returns what JSON can hold.
        arguments: What that gets.

    Attributes:
        cpu_s: CPU time that the answer took; the time it was waited for where the process failed.

    Raises:
        OSError: If no process could be started.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self.cpu_s = 0.0
        self._begun_s = time.monotonic()
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        ours = ("DIAGNOSE_RUN", "DIAGNOSE_SUPERVISOR", "PYTHONPATH", "PYTHONSTARTUP")
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(PACKAGE), module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._answer,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={
                **{key: value for key, value in os.environ.items() if key not in ours},
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                # One thread: numpy must not take the cores that training is measured on.
                "OMP_NUM_THREADS": "1",
            },
        )

    def answer(self) -> list[Any] | None:
        """Returns the answer, `None` while it is not known yet. A process that failed, or was given up in
        another thread, has found nothing."""
        if self._process.poll() is None:
            return None
        try:
            self._answer.seek(0)
            found, self.cpu_s = json.loads(self._answer.read())
        except ValueError:
            found, self.cpu_s = [], time.monotonic() - self._begun_s
        self.close()
        return list(found)

    def close(self) -> None:
        """Gives it up."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._answer.close()


def answer(module: str, *arguments: str) -> None:
    """Prints what a module answers, as JSON. Runs in the process that was started."""
    found = importlib.import_module(module).answer(*arguments)
    print(json.dumps([found, time.process_time()]))
