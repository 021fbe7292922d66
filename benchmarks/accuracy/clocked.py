"""Runs a script with a clock of our own at its optimizer: `clocked.py TIMES SCRIPT [ARGS]`."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

WARMUP = 10
"""As in `server.py`, which a job does not import."""


def main() -> None:
    _, times, script, *arguments = sys.argv
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    ended_ns: list[int] = []
    register_optimizer_step_post_hook(lambda *_: ended_ns.append(time.perf_counter_ns()))
    runpy.run_path(script, run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        measured = ended_ns[WARMUP:]
        Path(times).write_text(str((measured[-1] - measured[0]) / (len(measured) - 1) / 1e6))


if __name__ == "__main__":
    main()
