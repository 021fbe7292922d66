"""Ranks on this machine: what communication costs, and which rank is named as late, and why.

    python benchmarks/ranks.py [--rounds 3] [--balanced 20] [--quick] [--markdown docs/ranks.md]

Communication: each job trains ten steps with communication and ten without, in turn. What a step loses is
the difference of the two medians; beside it what `diagnose` says that the step waited. Left out is either
the collective alone, or all that DDP does for it (`no_sync`): it also copies gradients into buckets, which
is computing, and `diagnose` counts it as that. A slow link is a real one: the job runs in a
network namespace of its own whose loopback lets so many bits a second through (`tc`), where the machine
allows that.

Stragglers: one rank is slower in one respect, and the first finding about ranks must name it and the cause.
Balanced: no rank is slower, and none may be named. Jobs of 2 and of 4 ranks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np
import torch

from diagnose.analysis.meetings import waits_of
from diagnose.analysis.profile import load_profile
from diagnose.analysis.steps import step_times
from diagnose.core.profile import Profile
from diagnose.rules import diagnosed
from diagnose.store.reader import read_rank
from diagnose.store.runs import rank_files

JOB = Path(__file__).with_name("ranks_job.py")
BLOCK = 10
"""Steps of a block in `ranks_job.py --alternate`."""

LATE_RANK = 1

NAMED = {
    "fetch": ("input-straggler", ""),
    "forward": ("compute-straggler", "forward"),
    "backward": ("compute-straggler", "backward"),
    "gc": ("gc-straggler", ""),
    "longer": ("uneven-work", ""),
    "cpu": ("contended-rank", ""),
}
"""Per fault the rule that must say it, and a word of its sentence."""

STRAGGLERS = {rule for rule, _ in NAMED.values()}

LINKS = (("loopback", 0), ("400 Mbit/s", 400), ("100 Mbit/s", 100))
"""Links that are tried, with the megabits a second that they let through; 0 is no limit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each fault")
    parser.add_argument("--balanced", type=int, default=20, help="runs without a fault")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--faults", nargs="+", default=list(NAMED), choices=list(NAMED))
    parser.add_argument("--only", choices=["communication", "stragglers", "balanced"])
    parser.add_argument("--quick", action="store_true", help="two ranks, one round, two balanced runs")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.balanced, args.ranks = 1, 2, [2]
    arguments = f"--rounds {args.rounds} --balanced {args.balanced}"
    lines = [
        "# Ranks",
        "",
        f"Printed by `python benchmarks/ranks.py {arguments}`, {date.today()}, {os.cpu_count()} cores,"
        f" {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}. {doc()}",
        "",
    ]
    if args.only in (None, "communication"):
        lines += communication(args.ranks, args.rounds)
    if args.only in (None, "stragglers"):
        lines += stragglers(args.ranks, args.rounds, args.faults)
    if args.only in (None, "balanced"):
        lines += balanced(args.ranks, args.balanced)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


def doc() -> str:
    """The script's own words on what it measures, in one paragraph."""
    return " ".join((__doc__ or "").split("\n\n", 2)[2].split())


def communication(ranks: Sequence[int], rounds: int) -> list[str]:
    """What a step loses to communication, and what is said that it waits."""
    lines = [
        "## Communication",
        "",
        "| ranks | link | left out | step without | the step loses | `diagnose` says | off by |",
        "|---|---|---|---|---|---|---|",
    ]
    limited = can_limit()
    links = LINKS if limited else LINKS[:1]
    for count in ranks:
        for left_out, (name, mbit) in itertools.product(("collective", "ddp"), links):
            rows = [exposure(count, left_out, mbit) for _ in range(rounds)]
            alone, lost, said = (statistics.median(row[i] for row in rows) for i in range(3))
            off = [row[2] / row[1] - 1 for row in rows]
            lines.append(
                f"| {count} | {name} | {left_out} | {alone:.1f} ms | {lost:.1f} ms | {said:.1f} ms |"
                f" {statistics.median(off):+.0%} ({min(off):+.0%} to {max(off):+.0%}) |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    if not limited:
        lines += ["", "No network namespace could be made here: no link was slowed."]
    return [*lines, ""]


def exposure(ranks: int, left_out: str, mbit: int, steps: int = 160) -> tuple[float, float, float]:
    """Returns milliseconds: a step without communication, what one with it takes longer, what is said."""
    with tempfile.TemporaryDirectory() as folder:
        run = trained(
            Path(folder),
            ranks,
            *("--alternate", left_out, "--steps", str(steps), "--width", "256"),
            mbit=mbit,
        )
        times, waits = [], []
        for path in rank_files(run):
            log = read_rank(path)
            times.append(step_times(log.steps) / 1e6)
            waits.append(waits_of(log, 0) / 1e6)
    # All ranks of a step, as they end it together; the first steps of a block pay for the one before.
    count = min(map(len, times))
    step, wait = (np.mean([one[:count] for one in each], axis=0) for each in (times, waits))
    number = np.arange(count)
    settled = (number >= 2 * BLOCK) & (number % BLOCK >= 2)
    alone = number // BLOCK % 2 == 1
    without = float(np.median(step[settled & alone]))
    return (
        without,
        float(np.median(step[settled & ~alone])) - without,
        float(np.median(wait[settled & ~alone])),
    )


def stragglers(ranks: Sequence[int], rounds: int, faults: Sequence[str]) -> list[str]:
    """Which rank is named, and why."""
    lines = [
        "## Stragglers",
        "",
        f"Rank {LATE_RANK} has the fault. Right: the first finding about a rank names it, by this rule.",
        "",
        "| ranks | fault | must say | right | said instead | others wait |",
        "|---|---|---|---|---|---|",
    ]
    for count in ranks:
        for fault in faults:
            rule, word = NAMED[fault]
            right, instead, waited = 0, [], []
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as folder:
                    run = trained(Path(folder), count, "--fault", fault)
                    profile = diagnosed(load_profile(run))
                first = named(profile)
                if first is not None and first[0] == rule and word in first[2] and first[1] == (LATE_RANK,):
                    right += 1
                else:
                    instead.append("nothing" if first is None else f"{first[0]} {first[1]}: {first[2]}")
                meetings = profile.program.meetings
                if meetings is not None:
                    waited.append(meetings.held_ns.get(LATE_RANK, 0.0) / 1e6)
            span = f"{min(waited):.0f} to {max(waited):.0f} ms" if waited else "not measured"
            said = "; ".join(instead)
            lines.append(f"| {count} | {fault} | {rule} {word} | {right} of {rounds} | {said} | {span} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return [*lines, ""]


def balanced(ranks: Sequence[int], rounds: int) -> list[str]:
    """How often a rank is named where none is slower."""
    lines = ["## Balanced", "", "| ranks | runs | a rank was named |", "|---|---|---|"]
    for count in ranks:
        said = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                first = named(diagnosed(load_profile(trained(Path(folder), count))))
            said += [] if first is None else [f"{first[0]} {first[1]}: {first[2]}"]
        lines.append(f"| {count} | {rounds} | {len(said)} {'; '.join(said)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return [*lines, ""]


def named(profile: Profile) -> tuple[str, tuple[int, ...], str] | None:
    """Returns rule, ranks and sentence of the first finding that names a rank as late."""
    for finding in profile.findings:
        if finding.rule in STRAGGLERS and finding.ranks:
            return finding.rule, finding.ranks, finding.summary
    return None


def trained(folder: Path, ranks: int, *arguments: str, mbit: int = 0) -> Path:
    """Trains the job under `diagnose run` and returns the run's folder."""
    command = [sys.executable, "-m", "diagnose", "run", "--run-dir", str(folder)]
    command += ["--nproc-per-node", str(ranks), str(JOB), *arguments]
    if mbit:
        command = ["unshare", "-n", "sh", "-c", f'{limited(mbit)} && exec "$@"', "sh", *command]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}  # the host's own name leads out of a namespace
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if ended.returncode:
        raise SystemExit(f"the job failed: {' '.join(command)}\n{ended.stderr[-3000:]}")
    (run,) = [path for path in folder.iterdir() if path.is_dir()]
    return run


def limited(mbit: int) -> str:
    """The commands that limit the loopback of a new network namespace."""
    limit = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst 256kb latency 400ms"
    return f"ip link set lo mtu 1500 up && {limit}"  # no packet may be larger than the burst


def can_limit() -> bool:
    """Whether a network namespace with a slow loopback can be made."""
    try:
        return (
            subprocess.run(["unshare", "-n", "sh", "-c", limited(100)], capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    main()
