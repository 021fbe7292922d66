"""What TraceML and gpuprof say of the same scripts.

Neither names causes as finely as the labels do. A verdict therefore counts as right for every fault that
it could mean (`MEANS`), and as *near* if it has at least the right kind of fault (`KIND_OF`): both readings
are generous. TraceML's COMPUTE-BOUND is silence on a healthy job, and an answer where it says that
the optimizer is the largest part; of gpuprof, a line of severity "low" counts as an answer and never as a
false alarm. Jobs of several ranks are left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from accuracy.kept import Kept
from accuracy.score import is_right
from accuracy.tables import table
from accuracy.truth import Answer, Said

JOB = Path(__file__).with_name("peers_job.py")
TIMEOUT_S = 180

LOADING = frozenset(
    (
        *("serial-loading", "too-few-workers", "too-many-workers", "slow-collate", "slow-batch-building"),
        *("slow-samples", "slow-storage", "slow-transform"),
        *("worker-startup", "worker-imbalance", "worker-transfer"),
    )
)
COMPUTE = frozenset(
    (
        *("slow-optimizer", "needless-recompute", "recompilation", "extra-forward", "unused-gradients"),
        *("padding-waste", "unfused-attention", "double-precision", "anomaly-mode"),
        *("small-operators", "graph-breaks"),
    )
)

MEANS: dict[str, frozenset[str]] = {
    "INPUT_BOUND": frozenset({"serial-loading", "too-few-workers", "slow-storage"}),
    "optimizer is the largest": frozenset({"slow-optimizer"}),
    "waiting on the loader": frozenset({"serial-loading", "too-few-workers", "worker-startup"}),
    "Prefetch queue starved": frozenset({"too-few-workers", "slow-samples"}),
    "CPU pegged": frozenset({"serial-loading", "slow-transform"}),
    "disk hot": frozenset({"slow-storage"}),
    "worker imbalance": frozenset({"worker-imbalance"}),
    "unaccounted": frozenset({"python-overhead", "small-operators"}),
    "gradient checkpointing recompute": frozenset({"needless-recompute"}),
}
"""What a verdict with these words could mean."""

KIND_OF: dict[str, frozenset[str] | None] = {
    "INPUT_BOUND": LOADING,
    "RESIDUAL_HEAVY": None,
    "COMPUTE_BOUND": COMPUTE,
    "waiting on the loader": LOADING,
    "Prefetch queue starved": LOADING,
    "Dataloader": LOADING,
    "Cold-cache": LOADING,
    "unaccounted": None,
    "high tail latency": None,
    "gradient checkpointing recompute": COMPUTE,
}
"""The kind of fault that such a verdict names; `None` is whatever is neither loading nor computing."""

SILENCE = re.compile("COMPUTE_BOUND|BALANCED|INSUFFICIENT|INCOMPLETE|WARMUP|NO_DATA|NORMAL|Estimated cost")


def ask(tool: str, script: Path, arguments: Sequence[str]) -> Said | None:
    """Runs a job under a tool; `None` if that failed."""
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        job = [str(JOB), tool, str(script), *arguments]
        traceml = [
            str(Path(sys.executable).with_name("traceml")),
            "run",
            "--logs-dir",
            folder,
            "--run-name",
        ]
        command = (
            [*traceml, "job", job[0], "--args", *job[1:]] if tool == "traceml" else [sys.executable, *job]
        )
        try:
            subprocess.run(
                command,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(JOB.parents[2])},
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            return (_traceml if tool == "traceml" else _gpuprof)(Path(folder))
        except (subprocess.TimeoutExpired, OSError, ValueError, KeyError):
            return None


def _traceml(folder: Path) -> Said:
    summary = json.loads((folder / "job" / "final_summary.json").read_text(encoding="utf-8"))
    found = [summary["step_time"]["diagnosis"], *summary["step_time"]["issues"]]
    texts = tuple(dict.fromkeys(f"{one['kind']}: {one['summary']}" for one in found))
    return Said(verdicts=texts, grave=texts)


def _gpuprof(folder: Path) -> Said:
    found = json.loads((folder / "gpuprof.json").read_text(encoding="utf-8"))
    order = sorted(found, key=lambda one: ("high", "medium", "low").index(one["severity"]))
    return Said(
        verdicts=tuple(one["title"] for one in order),
        grave=tuple(one["title"] for one in order if one["severity"] != "low"),
    )


def _heard(verdicts: Iterable[str]) -> list[str]:
    return [verdict for verdict in verdicts if not SILENCE.search(verdict) or "optimizer is" in verdict]


def names(verdict: str, labels: Sequence[str]) -> bool:
    """Whether a verdict could mean one of these faults."""
    return any(words in verdict and meant & set(labels) for words, meant in MEANS.items())


def is_near(verdict: str, labels: Sequence[str]) -> bool:
    """Whether a verdict has the kind of one of these faults."""
    for words, kind in KIND_OF.items():
        if words in verdict and any(
            label in kind if kind is not None else label not in LOADING | COMPUTE for label in labels
        ):
            return True
    return names(verdict, labels)


def ask_peers(kept: Kept, answers: Iterable[Answer]) -> str:
    """Asks both tools of each fault at its largest size, and of each control; returns the section."""
    singles: dict[tuple[str, str], Answer] = {}
    controls = []
    for answer in answers:
        if not answer.resolved or answer.cell.script.ranks > 1:
            continue
        if answer.cell.kind == "control":
            controls.append(answer)
        elif answer.cell.kind == "single":
            fault = answer.cell.faults[0]
            key = str(answer.cell.script), fault.name or fault.label
            if key not in singles or singles[key].cell.severity < answer.cell.severity:
                singles[key] = answer
    asked = [*singles.values(), *controls]
    ours = (
        "diagnose",
        f"{sum(is_right(a) for a in singles.values())} of {len(singles)}",
        "",
        f"{sum(not is_right(a) for a in controls)} of {len(controls)}",
        "0",
    )
    rows, cells = [ours], [[str(answer.cell)] for answer in asked]
    for tool, package in (("traceml", "traceml-ai"), ("gpuprof", "gpuprof")):
        right = near = alarms = failed = 0
        for answer, cell in zip(asked, cells, strict=True):
            said = kept.said(tool, answer.cell) or ask(tool, answer.cell.script.path, answer.options)
            if said is not None:
                kept.keep_said(tool, answer.cell, said)
            cell.append("failed" if said is None else (_heard(said.verdicts) or ["nothing"])[0])
            print(f"{tool}: {cell[0]}: {cell[-1]}", file=sys.stderr)
            if said is None:
                failed += 1
            elif answer.cell.kind == "control":
                alarms += bool(_heard(said.grave))
            else:
                first = _heard(said.verdicts)[:1]
                right += any(names(verdict, answer.cell.right) for verdict in first)
                near += any(is_near(verdict, answer.cell.right) for verdict in said.verdicts[:1] or first)
        counts = f"{right} of {len(singles)}", f"{near} of {len(singles)}"
        rows.append((f"{package} {version(package)}", *counts, f"{alarms} of {len(controls)}", str(failed)))
    head = ["", "names the cause first", "at least its kind", "false alarms", "failed"]
    return "\n\n".join(
        [
            "## Other tools",
            "Each fault at its largest size, jobs of one process. The other tools get the lines that they"
            " ask their users to add (`benchmarks/accuracy/peers_job.py`), and every benefit of the doubt"
            " (`benchmarks/accuracy/peers.py`): a verdict is right for every fault that it could mean.",
            table(head, rows),
            table(["cell", "traceml-ai", "gpuprof"], cells),
        ]
    )
