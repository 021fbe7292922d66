"""Compiles what contenders compile, each in a process of its own, so that measuring finds it on the disk.

Graphs go to inductor's cache and extensions to torch's; both folders are told by the environment.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

AT_ONCE = 3
"""Processes: a graph of the largest model takes 30 GB, and other parts of `run.sh` use the GPU as well."""


def wanted(cases: list[str]) -> list[tuple[str, str]]:
    """What compiles in these cases: the case, and the contender. An extension is built once for all."""
    from optimizer_rows import ROWS

    rows = {row.letter: row for row in ROWS}
    extensions, graphs = {}, []
    for case in cases:
        letter, _, shape = case.partition("/")
        for contender in rows[letter].contenders:
            if contender.builds:
                extensions["FusedAdam"] = f"{letter}/tiny", contender.name
            elif contender.compiled and shape.endswith("/compiled"):
                graphs.append((case, contender.name))
    return [*extensions.values(), *graphs]


def prepare_all(cases: list[str], deadline: float, *, dry_run: bool) -> int:
    """Has everything compiled; says how long each took, or why it failed."""
    jobs = wanted(cases)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda job: apart(*job, deadline, dry_run=dry_run), jobs))
    print(f"{sum(found)} of {len(jobs)} compiled; what is missing is tried again when it is measured")
    return 0


def apart(case: str, name: str, deadline: float, *, dry_run: bool) -> bool:
    """One of them in a process of its own; whether it went well."""
    begun = time.monotonic()
    command = [sys.executable, str(Path(__file__).with_name("optimizers.py"))]
    command += ["--prepare", name, "--cases", case, *(["--dry-run"] if dry_run else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1, deadline - begun), check=False
        )
        said = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]
    except subprocess.TimeoutExpired:
        said = "out of time"
    print(f"{case}, {name}: {said or 'compiled'}, {time.monotonic() - begun:.0f} s", flush=True)
    return not said


def prepare_one(case: str, name: str, *, dry_run: bool) -> None:
    """Checks one contender and takes a step with it."""
    from optimizer_case import error_of, make_work
    from optimizer_clock import clock_for
    from optimizer_rows import ROWS
    from optimizer_shapes import SHAPES

    letter, _, shape = case.partition("/")
    [row] = [row for row in ROWS if row.letter == letter]
    [contender] = [each for each in row.contenders if each.name == name]
    with clock_for(dry_run=dry_run) as clock:
        error_of(row, contender, clock)
        work = make_work(row, SHAPES[shape.removesuffix("/compiled")], clock, seed=1)
        pipeline: Any = contender.build(work)
        with pipeline.turn():
            pipeline.step()
            pipeline.after()
            pipeline.step()  # once more: the second may be another graph
            clock.wait()
