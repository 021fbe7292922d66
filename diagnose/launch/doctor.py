"""Looks at what can be measured on this machine, and says why the rest cannot."""

from __future__ import annotations

import ctypes
import os
import platform
import sqlite3
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from diagnose.core.checkup import Check
from diagnose.launch import quota
from diagnose.launch.command import why_blind
from diagnose.store.machine import rates_folder
from diagnose.store.writer import Writer

Found = tuple[bool | None, str]
"""As `Check` has it: `ok`, and the words."""


def examine(root: Path) -> list[Check]:
    """Looks at everything; what cannot even be looked at says so itself.

    Args:
        root: Folder that runs are recorded to.
    """
    looks: dict[str, Callable[[], Found]] = {
        "python": _python,
        "torch": _torch,
        "device": _device,
        "driver": _driver,
        "counters": _counters,
        "sampler": _sampler,
        "cpus": _cpus,
        "perf": _perf,
        "store": lambda: _store(root),
        "state": _state,
        "profilers": _profilers,
        "deep windows": _deep_windows,
    }
    found = {name: look() for name, look in looks.items()}
    return [Check(name=name, ok=ok, words=words) for name, (ok, words) in found.items()]


def _python() -> Found:
    blind = why_blind()
    version = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return not blind, f"{version}. {blind}" if blind else version


def _torch() -> Found:
    try:
        import torch
    except ImportError as error:
        return False, f"cannot be imported ({error}); install it: https://pytorch.org/get-started"
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return True, f"torch {torch.__version__}, {built}"


def _device() -> Found:
    torch = sys.modules.get("torch")
    if torch is None:
        return False, "not known without torch"
    if not torch.cuda.is_available():
        return None, "no CUDA device; runs are measured by the host's clock, which on a CPU is the truth"
    found = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found.append(f"{card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}")
    return True, "; ".join(found)


def _driver() -> Found:
    try:
        import pynvml
    except ImportError:
        return False, "nvidia-ml-py is missing: no clocks, power or temperature; pip install nvidia-ml-py"
    try:
        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return None, f"NVML answers: {error}; no clocks, power, temperature"
    return True, f"NVIDIA driver {version}, read through NVML"


def _counters() -> Found:
    """Running totals of the operating system."""
    wanted = ("/proc/self/schedstat", "/proc/self/io", "/proc/stat", "/proc/pressure/memory")
    missing = [path for path in wanted if not _readable(path)]
    if len(missing) == len(wanted):
        return False, "there is no procfs here: waiting for a CPU, paging and disk reads are not measured"
    if missing:
        return False, f"{', '.join(missing)} cannot be read; what they tell is not measured"
    return True, "waiting for a CPU, paging and disk reads can be read"


def _readable(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError:
        return False
    return True


def _sampler() -> Found:
    if not sys.platform.startswith("linux"):
        return False, f"source lines are not sampled on {sys.platform}"
    for library in (None, "librt.so.1"):
        try:
            if hasattr(ctypes.CDLL(library), "timer_create"):
                return True, "source lines are sampled by a kernel timer"
        except OSError:
            continue
    return False, "source lines are not sampled: this C library has no timer_create"


def _cpus() -> Found:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    words = f"{allowed} of {os.cpu_count()} CPUs may be used"
    try:
        limit = quota.read().get("quota")
    except (OSError, ValueError) as error:
        return None, f"{words}; the quota cannot be read ({error})"
    return None, words + (f", with a quota of {limit:g}" if limit else "")


def _perf() -> Found:
    from diagnose.gate.instructions import counting

    if counting(Path(os.devnull)):
        return True, "the gate can count instructions"
    words = "no perf that counts instructions; the gate compares times alone"
    try:
        level = Path("/proc/sys/kernel/perf_event_paranoid").read_text(encoding="ascii").strip()
        words += f" (kernel.perf_event_paranoid is {level})"
    except OSError:
        pass
    return None, words


def _store(root: Path) -> Found:
    """Writes a file as a run does: only a real write tells."""
    folder = root.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".diagnose-doctor-", dir=folder) as made:
            writer = Writer(Path(made), 0)
            journal = writer.journal
            writer.close()
    except (OSError, sqlite3.Error) as error:
        words = f"{root} cannot be written ({error}); runs go to the temporary folder, or use --run-dir"
        return False, words
    if journal == "wal":
        return True, f"{root} takes a write-ahead log: kill -9 costs 0.5 s"
    words = f"{root} is on a file system without a write-ahead log: reading a run may delay its records"
    return False, words


def _state() -> Found:
    folder = rates_folder().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        words = f"{folder} cannot be written ({error.strerror}): nothing is remembered between runs"
        return False, f"{words}; set DIAGNOSE_STATE"
    return True, f"gains and rates are remembered in {folder}"


def _profilers() -> Found:
    from diagnose.launch.deep_window_profiler import NSIGHT

    there = [
        name for name in (*NSIGHT, "KINETO_USE_DAEMON", "CUDA_LAUNCH_BLOCKING") if os.environ.get(name)
    ]
    if sys.gettrace() is not None or sys.getprofile() is not None:
        there.append("a tracer of Python calls")
    if there:
        return False, f"{', '.join(there)}: a run would be measured with what that costs"
    return True, "no other profiler is there"


def _deep_windows() -> Found:
    if "torch" not in sys.modules:
        return False, "not known without torch"
    from diagnose.launch.deep_window_profiler import why_not

    reason = why_not()
    return not reason, reason or "torch's profiler can record steps"
