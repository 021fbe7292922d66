"""torch's profiler for a few steps: silent, alone, and out of the way of the script's own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import ProfilerActivity
from torch.autograd import profiler

from diagnose.core.deep_window import OURS
from diagnose.hooks.base import around, replaced

AUTOGRAD: Any = torch._C._autograd
"""torch annotates but a part of it."""

NSIGHT = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NV_NSIGHT_INJECTION_TRANSPORT_TYPE")
"""Set by Nsight for what it starts. The driver's tracing takes one client only; a second spoils both."""

SEVERITY = "_ZN9libkineto6Logger14severityLevel_E"
"""The level from which Kineto prints on stderr: an `int` of its library, with no function to set it."""

NOTHING_IS_SO_SEVERE = 1_000

LEVEL = "KINETO_LOG_LEVEL"
"""The variable that Kineto takes its level from when it is first used. It serves where a torch should hide
`SEVERITY`, which 2.11+cu130 and 2.13+cpu do not."""


def why_not() -> str:
    """Says why the profiler must not be started in this process now; empty where it may."""
    if profiler._is_profiler_enabled or AUTOGRAD._profiler_enabled():
        return "the script's own profiler is on"
    present = [name for name in NSIGHT if os.environ.get(name)]
    if present:
        return f"another profiler is there ({present[0]} is set)"
    if os.environ.get("KINETO_USE_DAEMON") or os.environ.get(LEVEL):
        return "KINETO_USE_DAEMON or KINETO_LOG_LEVEL is set: somebody else uses torch's profiler"
    if not AUTOGRAD.kineto_available():
        return "this torch was built without Kineto"
    if torch.cuda.is_initialized() and not _records_kernels():  # asking before would initialise it
        return "this torch was built without CUPTI: it records no kernels"
    return ""


def _records_kernels() -> bool:
    return ProfilerActivity.CUDA in AUTOGRAD._supported_activities()


def _severity() -> Any:
    """Returns Kineto's level as a variable; `None` where its library does not show it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.c_int.in_dll(library, SEVERITY)
    except (OSError, ValueError):
        return None


@contextmanager
def silent() -> Iterator[None]:
    """Keeps Kineto from printing on stderr inside.

    When it is first used it chooses the level itself, and that stays: it is what the script would have.
    Where the level is hidden, it is silent for good from its first use on if that is ours, else not at all.
    """
    level = _severity()
    if level is None:
        os.environ[LEVEL] = str(NOTHING_IS_SO_SEVERE)
        try:
            yield
        finally:
            os.environ.pop(LEVEL, None)
        return
    before = level.value
    level.value = NOTHING_IS_SO_SEVERE
    try:
        yield
    finally:
        if level.value == NOTHING_IS_SO_SEVERE:
            level.value = before


class Profiler:
    """One recording. Every method but `save` belongs to the training thread.

    Args:
        index: Number of the CUDA device that the model is on; `None` without one.
    """

    def __init__(self, index: int | None = None) -> None:
        self._index = index
        device = "cuda" if torch.cuda.is_initialized() else None
        self._profile = profiler.profile(use_cpu=True, use_device=device, use_kineto=True)
        self._config = self._profile.config()
        self._results: Any = None
        self._ready = self._on = False

    def prepare(self) -> None:
        """Makes everything ready, a step ahead: the first time it takes long on a device."""
        self._ready = True
        with silent():
            AUTOGRAD._prepare_profiler(self._config, self._profile.kineto_activities)

    def wait(self) -> None:
        """Waits until the model's device has done what it was given: kernels that end after the recording
        are not in it, and those of earlier steps would be. Not while a graph is captured, which breaks it.
        A recording that is on tells by `OURS` that the script does not wait there.
        """
        if self._index is not None and not torch.cuda.is_current_stream_capturing():
            # Not `record_function`, which a mode of the script's would see.
            with torch._C._profiler._RecordFunctionFast(OURS):
                torch.cuda.synchronize(self._index)

    def start(self) -> None:
        """Begins to record."""
        self._on = True
        with silent():
            AUTOGRAD._enable_profiler(self._config, self._profile.kineto_activities)
        profiler._set_is_profiler_enabled(True)

    def stop(self) -> None:
        """Ends recording. What the device has not done by now is lost; see `wait`."""
        if not self._on:
            return
        self._on = self._ready = False
        with silent():
            self._results = AUTOGRAD._disable_profiler()
        profiler._set_is_profiler_enabled(False)

    def abandon(self) -> None:
        """Ends it wherever it is, and keeps nothing: one that is ready has to be started for that."""
        if self._ready and not self._on:
            self.start()
        self.stop()
        self._results = None

    def save(self, path: Path) -> None:
        """Writes the trace as JSON. Holds the interpreter for about 20 ms per MB, whatever thread calls."""
        with silent():
            self._results.save(str(path))
        self._results = None


@contextmanager
def stepping_aside(aside: Callable[[], None], prepared: Callable[[bool], None]) -> Iterator[None]:
    """Tells of the script's own profiler while the context is open.

    Args:
        aside: Called before the script's profiler is made ready or started, in its thread.
        prepared: Gets whether the script has made one ready, or is done with it.
    """

    def begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        prepared(True)
        aside()

    def ends(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        prepared(False)

    def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
        return around(original, begins)

    with (
        replaced(profiler, "_prepare_profiler", beginning),
        replaced(profiler, "_enable_profiler", beginning),
        replaced(profiler, "_disable_profiler", lambda original: around(original, ends)),
    ):
        yield
