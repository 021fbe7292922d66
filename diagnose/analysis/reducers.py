"""Processes that read and summarize the files of many ranks, one for each CPU.

Not of `multiprocessing`: its processes import the script that runs, which in a notebook or behind
`diagnose.detach()` is the user's training, and a process of a dashboard may have none of them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import diagnose
from diagnose.analysis.rank_summary import Window
from diagnose.analysis.reduction import Reduced, reduce_files
from diagnose.analysis.script import Script
from diagnose.core.errors import DiagnoseError

BLOCK = 16
"""Ranks that are asked for at once: a summary of each, and one comparison of their steps, come back."""

MAX_PROCESSES = 16
"""More wait for the disk, and for this process, which takes in what they send."""

PROGRAM = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry] + [{root!r}]; "
    "from diagnose.analysis.reducers import serve; serve()"
)
"""The current folder may hold a `queue.py` of the user's, so it is taken off the path first."""

Block = list[tuple[int, Path]]
Process = subprocess.Popen[bytes]


class Reducers:
    """Processes that have been started, and import while the first rank is read.

    Args:
        processes: All of them.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes

    def reduce(self, files: Sequence[tuple[int, Path]], window: Window) -> Reduced:
        """Summarizes ranks, each given by its place and its file.

        What a process that is killed was asked for is read here instead.

        Raises:
            DiagnoseError: If a file was written by a newer version.
        """
        blocks: SimpleQueue[Block] = SimpleQueue()
        for first in range(0, len(files), BLOCK):
            blocks.put(list(files[first : first + BLOCK]))
        reduced = Reduced()
        with ThreadPoolExecutor(len(self._processes)) as threads:
            try:
                for part in threads.map(lambda process: _drain(process, blocks, window), self._processes):
                    reduced.fold(part)
            finally:  # after Ctrl-C, or a file of a newer version: the rest is not read first
                with contextlib.suppress(Empty):
                    while True:
                        blocks.get_nowait()
        return reduced


@contextmanager
def reducers(num_files: int) -> Iterator[Reducers]:
    """Starts as many processes as there are CPUs and blocks of files; ends them on leaving."""
    blocks = -(-num_files // BLOCK)
    count = min(_cpus(), blocks, MAX_PROCESSES)
    with ExitStack() as processes:
        yield Reducers([processes.enter_context(_process()) for _ in range(count)])


def serve() -> None:
    """Answers the process that started this one until it goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is that process's
    script = Script()
    while True:
        try:
            block, window = pickle.load(sys.stdin.buffer)  # noqa: S301 (from the process that started this)
        except EOFError:
            return
        answer: Reduced | DiagnoseError
        try:
            answer = reduce_files(block, window, script)
        except DiagnoseError as error:
            answer = error
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(answer, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
            sys.stdout.buffer.flush()


def _drain(process: Process, blocks: SimpleQueue[Block], window: Window) -> Reduced:
    """Has one process summarize blocks until there are no more."""
    reduced = Reduced()
    while True:
        try:
            block = blocks.get_nowait()
        except Empty:
            return reduced
        answer = _answer(process, block, window)
        if answer is None:
            answer = reduce_files(block, window, Script())
        if isinstance(answer, DiagnoseError):
            raise answer
        reduced.fold(answer)


def _answer(process: Process, block: Block, window: Window) -> Any:
    """Returns what a process answers; `None` if it is no more."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump((block, window), process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)  # noqa: S301 (from a process of ours)
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):
        return None


@contextmanager
def _process() -> Iterator[Process]:
    root = str(Path(diagnose.__file__).parents[1])
    environ = {name: value for name, value in os.environ.items() if name != "DIAGNOSE_RUN"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(root=root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what it fails at is read here, and fails here in words
        # One thread each: there are as many processes as CPUs.
        env={**environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(OSError), process:  # closes the pipes; one of a killed process is broken
            pass
        process.wait()


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
