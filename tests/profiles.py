"""Profiles to print in tests."""

from __future__ import annotations

import os
from dataclasses import replace

from diagnose.core.finding import Abstention, Finding, Gain
from diagnose.core.input import WorkerStats
from diagnose.core.phases import Phase
from diagnose.core.profile import (
    Overhead,
    Profile,
    RankProfile,
    RunInfo,
    SourceLine,
    Status,
    StepStats,
    Throughput,
)
from diagnose.core.trial import Measured, Outcome, Safety, Trial, Tuning

MS = 1_000_000
HOSTILE = "<img src=x onerror=alert(1)>"


def line(phase: Phase, number: int, function: str, share: float, text: str = "") -> SourceLine:
    return SourceLine(
        phase=phase,
        file=os.path.join(os.getcwd(), "train.py"),
        line=number,
        function=function,
        share=share,
        num_samples=300,
        text=text,
    )


RUN = RunInfo(
    id="20261120-141502-train",
    script="train.py",
    argv=("--lr", "1e-3"),
    exit_code=0,
    torch="2.13.0",
    started="2026-11-20T14:15:02+01:00",
    duration_s=48.2,
)

PROFILE = Profile(
    run=RUN,
    status=Status.OK,
    throughput=Throughput(samples_per_s=776.4, samples_per_s_ci95=(770.2, 781.3), steps_per_s=24.3),
    steps=StepStats(
        count=412,
        warmup=10,
        total_time_ns=402 * 41 * MS,
        mean_ns=41.0 * MS,
        median_ns=40.1 * MS,
        p95_ns=58.3 * MS,
        p99_ns=71.0 * MS,
    ),
    phase_time_ns={
        Phase.DATA_WAIT: 20.5 * MS,
        Phase.COPY: 0.02 * MS,
        Phase.FORWARD: 8.2 * MS,
        Phase.BACKWARD: 10.25 * MS,
        Phase.OPTIMIZER: 1.23 * MS,
        Phase.EVALUATION: 0.0,
        Phase.CHECKPOINT: 0.08 * MS,
        Phase.COMPILE: 0.0,
        Phase.GC: 0.01 * MS,
        Phase.OTHER: 0.71 * MS,
    },
    where=(
        line(Phase.DATA_WAIT, 41, "JpegFolder.__getitem__", 0.34, "image = decode(self.jpegs[index])"),
        line(Phase.BACKWARD, 118, "main", 0.25, "loss.backward()"),
        line(Phase.FORWARD, 117, "main", 0.2, "loss = cross_entropy(model(images), labels)"),
        line(Phase.OTHER, 121, "main", 0.015, "losses.append(loss.item())"),
    ),
    overhead=Overhead(us_per_step=38.2, startup_s=0.31),
    events={"gc": 12, "checkpoint": 2},
)

SERIAL = Finding(
    rule="serial-loading",
    summary="The training thread loads its own batches: 50 % of each step.",
    lost_ns={Phase.DATA_WAIT: 20.0 * MS, Phase.GC: 0.0},
    low_ns=14.0 * MS,
    high_ns=20.5 * MS,
    assumption="workers prepare a batch while the model computes, on CPUs that are free",
    evidence=(
        "num_workers=0, and 20.5 ms of each step pass in next(loader).",
        "4 CPUs are idle.",
    ),
    fix="Give the DataLoader two workers.",
    code="DataLoader(..., num_workers=2, persistent_workers=True)",
    file=os.path.join(os.getcwd(), "train.py"),
    line=31,
    actions=("loader-workers",),
)
SPLIT = Finding(
    rule="slow-updates",
    summary="The optimizer updates 412 tensors one by one.",
    lost_ns={Phase.OPTIMIZER: 1.0 * MS},
    low_ns=0.8 * MS,
    high_ns=1.1 * MS,
    assumption="one call for all tensors costs what one for a tensor does",
    evidence=("412 tensors of 1,000 elements on average.",),
    fix="Let one call update all tensors: pass foreach=True, or fused=True on a GPU, to the SGD in line 4.",
    ranks=(0, 3),
)
FAULTY = replace(PROFILE, findings=(SERIAL, SPLIT), num_rules=12)
HEALTHY = replace(
    PROFILE, num_rules=12, abstained=(Abstention(rule="starved-of-cpu", missing="host.runnable_share"),)
)

NOTHING = Profile(
    run=replace(RUN, duration_s=12.3), status=Status.NO_STEPS, overhead=Overhead(startup_s=0.31)
)

TUNED = replace(
    FAULTY,
    tuning=Tuning(
        state="holding",
        trials=(
            Trial(
                action="loader-workers",
                value=8,
                safety=Safety.EXACT,
                outcome=Outcome.KEPT,
                reason="",
                rule="serial-loading",
                predicted=Gain(speedup=1.6, low=1.2, high=2.0),
                measured=Measured(
                    speedup=1.9, low=1.8, high=2.0, pairs=12, detectable=1.05, without_ns=40e6, with_ns=21e6
                ),
            ),
        ),
        confirmation=Measured(
            speedup=2.0, low=1.9, high=2.1, pairs=12, detectable=1.05, without_ns=40e6, with_ns=20e6
        ),
        untouched=(0, 120),
        tuned=(200, 412),
        tuned_phase_time_ns={Phase.FORWARD: 9 * MS, Phase.BACKWARD: 11 * MS},
        tuned_median_ns=19.6 * MS,
        tuned_samples_per_s=1610.0,
    ),
)

WORKERS = WorkerStats(
    num_workers=4,
    batches=412,
    fetch_ns=150.0 * MS,
    collate_ns=3.0 * MS,
    send_ns=1.2 * MS,
    cpu_share=0.93,
    idle_share=0.02,
    ready_batches=0.1,
)

FOUR_RANKS = tuple(
    RankProfile(
        rank=rank,
        host=f"node{rank // 2}",
        phase_time_ns={Phase.FORWARD: 10.0 * MS, Phase.COMMUNICATION: (4 - rank) * MS, Phase.GC: 100},
        late_ns_per_step=rank * 0.5 * MS,
    )
    for rank in range(4)
)


def assert_lines(text: str, expected: str) -> None:
    """Compares lines, so that a failure shows the one that differs."""
    assert text.splitlines() == expected.strip("\n").splitlines()


HOSTILE_PROFILE = replace(
    PROFILE,
    run=replace(RUN, id=HOSTILE, script=f'"{HOSTILE}', argv=(HOSTILE,), torch=HOSTILE, device=HOSTILE),
    where=(
        SourceLine(
            phase=Phase.FORWARD, file=f"/{HOSTILE}", line=1, function=HOSTILE, share=0.5, text=HOSTILE
        ),
    ),
    ranks=tuple(replace(rank, host=HOSTILE) for rank in FOUR_RANKS),
    findings=(
        replace(
            SERIAL,
            rule=HOSTILE,
            summary=HOSTILE,
            assumption=HOSTILE,
            evidence=(HOSTILE,),
            fix=HOSTILE,
            code=HOSTILE,
            file=f"/{HOSTILE}",
        ),
    ),
    abstained=(Abstention(rule=HOSTILE, missing=HOSTILE),),
    num_rules=12,
    events={HOSTILE: 3},
    notes=(HOSTILE, "</style><script>alert(1)</script>"),
)
