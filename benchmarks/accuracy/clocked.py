"""Runs a script with a clock of our own at its optimizer: `clocked.py TIMES SCRIPT [ARGS]`."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

WARMUP = 10
"""As in `server.py`, which a job does not import."""


def on_rounds(note: Callable[[], None]) -> None:
    """Calls `note` whenever an optimizer steps that has stepped since the last time: several optimizers,
    such as one per parameter, make one step of the training together."""
    stepped: set[int] = set()

    def after(optimizer: Any, *_: Any) -> None:
        if id(optimizer) in stepped:
            stepped.clear()
            note()
        stepped.add(id(optimizer))

    register_optimizer_step_post_hook(after)


def main() -> None:
    _, times, script, *arguments = sys.argv
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    ended_ns: list[int] = []
    on_rounds(lambda: ended_ns.append(time.perf_counter_ns()))
    runpy.run_path(script, run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        measured = ended_ns[WARMUP:]
        Path(times).write_text(str((measured[-1] - measured[0]) / (len(measured) - 1) / 1e6))


if __name__ == "__main__":
    main()
