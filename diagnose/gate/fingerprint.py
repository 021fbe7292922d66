"""What makes figures of two runs comparable: the machine, the software, and the work of a step."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diagnose.store.reader import RankLog
from diagnose.store.runs import rank_files, read_manifest

Facts = Mapping[str, Any]

RUNNER_IMAGE = ("ImageOS", "ImageVersion", "CI_RUNNER_DESCRIPTION", "NODE_NAME")
"""Variables in which GitHub, GitLab and Jenkins name the machine that a job was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """On what, and of what, figures were taken.

    Attributes:
        hard: Facts that must agree for figures to be compared.
        soft: Facts whose difference is worth a warning.
    """

    hard: Facts = field(default_factory=dict)
    soft: Facts = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that stand for the hard facts: the name of a baseline's file."""
        text = json.dumps(self.hard, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def fingerprint_of(run: Path, command: tuple[str, ...]) -> Fingerprint:
    """Describes this machine, and what one run on it did."""
    from diagnose.analysis.profile import read_logs

    logs, _ = read_logs(run) if rank_files(run) else ([], [])
    return Fingerprint(
        hard={**machine_facts(), **_software(logs), **_work(run, logs, command)},
        soft={**soft_facts(), **_threads(logs)},
    )


def machine_facts() -> dict[str, Any]:
    """Returns the hard facts of the machine and the software on it."""
    torch_version, cuda = _torch()
    return {
        "cpu": _cpu_model(),
        "cpus": _cpus(),
        "gpus": _gpus(lambda nvml, gpu: _text(nvml.nvmlDeviceGetName(gpu))),
        "gpu_power_limit_w": _gpus(
            lambda nvml, gpu: round(nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000)
        ),
        "gpu_mig": _gpus(lambda nvml, gpu: nvml.nvmlDeviceGetMigMode(gpu)[0]),
        "torch": _minor(torch_version),
        "cuda": _minor(cuda),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
    }


def soft_facts() -> dict[str, Any]:
    """Returns what may differ between runs that are compared, with a warning."""
    return {
        "torch": _torch()[0],
        "driver": next(iter(_gpus(lambda nvml, _: _text(nvml.nvmlSystemGetDriverVersion()))), ""),
        "kernel": platform.release(),
        "host": re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", platform.node()),
        "ram_gib": _ram_gib(),
        "runner": " ".join(os.environ[name] for name in RUNNER_IMAGE if os.environ.get(name)),
    }


def differences(before: Facts, now: Facts) -> tuple[str, ...]:
    """Says in words in what two sets of facts differ."""
    names = dict.fromkeys((*before, *now))
    return tuple(
        f"{name}: {_words(before.get(name))} then, {_words(now.get(name))} now"
        for name in names
        if before.get(name) != now.get(name)
    )


def _work(run: Path, logs: list[RankLog], command: tuple[str, ...]) -> dict[str, Any]:
    from diagnose.core.ledger import COLUMNS

    steps = logs[0].steps if logs else None
    column = steps[:, COLUMNS.index("samples")].tolist() if steps is not None else []
    samples = sorted(column) or [0]
    usual = samples[len(samples) // 2]
    is_usual = 2 * samples.count(usual) >= len(samples)  # not where a batch is a number of tokens
    device = str(logs[0].meta.get("device", "cpu")) if logs else str(read_manifest(run).get("device", ""))
    return {
        "command": " ".join(command),
        "samples_per_step": int(usual) if is_usual else "varies",
        "world_size": max(1, len(logs)),
        "device": device,
        **_devices(logs),
        **_dtypes(logs),
    }


def _devices(logs: list[RankLog]) -> dict[str, Any]:
    """Returns the GPUs that the ranks computed on, of all those in the machine; none on a CPU."""
    on_devices = [log for log in logs if str(log.meta.get("device") or "cpu") != "cpu"]
    names = sorted(str(log.meta["device_name"]) for log in on_devices if log.meta.get("device_name"))
    return {"gpu": names} if names else {}


def _software(logs: list[RankLog]) -> dict[str, Any]:
    """Returns what the run says of the software it used: its interpreter may be of another environment."""
    meta = logs[0].meta if logs else {}
    if not meta.get("torch") or not meta.get("python"):
        return {}
    torch, cuda = _torch()
    version, _, build = str(meta["torch"]).partition("+")
    if version != torch.partition("+")[0]:
        number = re.fullmatch(r"cu(\d+)(\d)", build)
        cuda = f"{number[1]}.{number[2]}" if number else ""
    return {"torch": _minor(version), "cuda": _minor(cuda), "python": _minor(str(meta["python"]))}


def _threads(logs: list[RankLog]) -> dict[str, Any]:
    """Returns how many threads the run computed with: not the machine, but its speed on a CPU."""
    return {
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "torch_threads": logs[0].meta.get("num_threads") if logs else None,
    }


def _dtypes(logs: list[RankLog]) -> dict[str, Any]:
    """Returns what the model computes in, as far as it was seen: its parameters, and autocast."""
    facts = logs[0].meta.get("facts", {}) if logs else {}
    models = facts.get("models") or ()
    found = sorted({dtype for model in models for dtype in model.get("dtypes") or ()})
    autocast = (facts.get("calls") or {}).get("autocast_dtype")
    words = " + ".join(found) + (f", autocast {autocast}" if autocast else "")
    return {"dtype": words} if words else {}


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " + ".join(map(str, value)) or "none"
    return str(value) if value not in (None, "") else "none"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _torch() -> tuple[str, str]:
    """Returns the versions of torch and of its CUDA, without the seconds that importing it takes."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "", ""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return version, ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return version, ""
    found = re.search(r"^cuda[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    return version, found[1] if found else ""


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if found and not found[1].startswith("ARM"):  # as some kernels call them all
            return found[1].strip()
        if cores := _arm_cores(text):
            return cores
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = subprocess.run(
                ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
            return asked.stdout.strip()
    return platform.processor() or platform.machine()


def _arm_cores(cpuinfo: str) -> str:
    """Returns the kinds of cores in an ARM machine's `/proc/cpuinfo`, which tells their numbers alone."""
    kinds = {
        tuple(re.findall(r"^CPU (?:implementer|part|variant)\s*:\s*(\S+)$", block, re.MULTILINE))
        for block in cpuinfo.split("\n\n")
    }
    named = sorted(" ".join(kind) for kind in kinds if kind)
    return f"ARM {' + '.join(named)}" if named else ""


def _cpus() -> float:
    """Returns the CPUs that this process may use: its affinity, and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for path in (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")):
        with contextlib.suppress(OSError, ValueError):
            fields = path.read_text().split()
            period = fields[1] if len(fields) > 1 else (path.parent / "cpu.cfs_period_us").read_text()
            if fields[0] not in ("max", "-1"):
                return min(float(allowed), round(int(fields[0]) / int(period), 2))
    return float(allowed)


def _gpus(ask: Callable[[Any, Any], Any]) -> list[Any]:
    """Returns a fact of each GPU as NVML tells it; none where there is no NVML.

    Args:
        ask: Gets `pynvml` and a GPU.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return []
    except pynvml.NVMLError:
        return []
    try:
        facts = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                facts.append(ask(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)))
            except pynvml.NVMLError:
                facts.append("unknown")
        return facts
    except pynvml.NVMLError:
        return []  # a driver that does not count its devices
    finally:
        pynvml.nvmlShutdown()


def _text(told: str | bytes) -> str:
    return told.decode() if isinstance(told, bytes) else told


def _ram_gib() -> int:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    except (OSError, ValueError):
        return 0
