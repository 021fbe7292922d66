"""What the rules say of jobs on a GPU whose faults were put there, and how large these are.

    python benchmarks/gpu/faults.py --out out [--seconds 140] [--dry-run] [JOB:FAULT ...]

Runs `faults_job.py` under `diagnose run`, one at a time on the GPU, each fault and each job without one.
A fault's true size is what its steps take longer than the job's without it, both by the medians of their
runs. A wrong verdict is no failure of this script; a run that ends badly is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diagnose.analysis.profile import load_profile

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SOUND = "none"
DEEP = ("--deep-window", "auto")


@dataclass(frozen=True, slots=True)
class Case:
    """A job with a fault, or without one.

    Attributes:
        job: Its name.
        fault: The rule that should name it first; that of no rule is not to be named.
        without: What the job's fault is there in the run that it is compared with.
        options: Of `diagnose run`.
        seconds: How long it trains.
    """

    job: str
    fault: str
    without: str = SOUND
    options: tuple[str, ...] = ()
    seconds: float = 5.0

    @property
    def name(self) -> str:
        return f"{self.job}:{self.fault}"


CASES = (
    Case("gpt", SOUND),
    Case("tiny", "launch-bound", without="graphed"),
    Case("gpt", "host-sync"),
    Case("gpt", "fp32-matmul"),
    Case("images", SOUND),
    Case("images", "pageable-copies"),
    Case("gpt", "hidden-python"),
    Case("gpt", "slow-optimizer"),
    Case("gpt", "unfused-attention"),
    Case("tiny", "graphed"),
    Case("gpt", "needless-recompute"),
    Case("gpt", "device-to-host-copies"),
    Case("gpt", "repeated-upload"),
    Case("gpt", "needless-synchronize"),
    Case("images", "memory-layout", options=DEEP, seconds=9.0),  # the rules are asked in a process beside
)
"""The most wanted first."""

NO_FAULT = (SOUND, "graphed", "hidden-python")
"""Of which nothing should be said: of the last because the device never waits for it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seconds", type=float, default=140.0, help="of all the time")
    parser.add_argument(
        "--dry-run", action="store_true", help="on a CPU: it says only that the runs can be read"
    )
    parser.add_argument("cases", nargs="*", metavar="JOB:FAULT")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    named = {case.name: case for case in CASES}
    cases = [named[name] for name in args.cases] or list(CASES)
    if args.dry_run and not args.cases:
        cases = [named["gpt:none"], named["gpt:host-sync"]]
    until = time.monotonic() + args.seconds
    told: dict[str, Any] = {}
    writing = threading.Lock()
    with tempfile.TemporaryDirectory() as scratch:

        def one(case: Case) -> None:
            try:
                found = heard(case, Path(scratch), until - time.monotonic(), args.dry_run)
                json.dumps(found)
            except Exception as error:  # noqa: BLE001 (one run costs no other, nor the table)
                found = {"bad": f"not read: {type(error).__name__}: {error}"}
            with writing:
                told[case.name] = found
                text = json.dumps(told, indent=1) + "\n"
                (args.out / "faults.json").write_text(text, encoding="utf-8")
            print(f"{case.name}: {told[case.name].get('bad') or 'done'}", flush=True)

        with ThreadPoolExecutor(3) as pool:  # one trains, one loads torch, one writes its report
            list(pool.map(one, cases))
    table = [line(case, told) for case in cases]
    head = "| job | fault | true size | named first | its size | then | step, ms | device idle |"
    print("\n".join([head, "|---|---|--:|---|--:|---|--:|--:|", *table]))
    bad = [name for name, each in told.items() if each.get("bad")]
    for name in bad:
        print(f"{name}: {told[name]['bad']}\n{told[name].get('stderr', '')}")
    right = sum(is_right(case, told[case.name]) for case in cases)
    print(f"{right} of {len(cases)} verdicts are right; {len(bad)} runs ended badly: {', '.join(bad)}")
    return int(bool(bad))


def heard(case: Case, scratch: Path, seconds: float, rehearse: bool) -> dict[str, Any]:
    """One run, and what was said of it."""
    if seconds < 12:
        return {"bad": "no time was left"}
    name = f"{case.job}-{case.fault}"
    report = scratch / f"{name}.json"
    words = [sys.executable, "-m", "diagnose", "run", *case.options, "--json", str(report)]
    words += [
        "--run-dir",
        str(scratch / "runs"),
        "--name",
        name,
        str(HERE / "faults_job.py"),
        case.job,
        case.fault,
    ]
    words += ["--turn", str(scratch / "turn")]
    words += ["--cpu", "--seconds", "1"] if rehearse else ["--seconds", str(case.seconds)]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"bad": f"not done after {seconds:.0f} s"}
    if ended.returncode or not report.exists():
        return {"bad": f"exit code {ended.returncode}", "stderr": ended.stderr[-3000:]}
    told = json.loads(report.read_text(encoding="utf-8"))
    if not (told.get("steps") or {}).get("median_ms"):
        return {"bad": "no step was measured", "notes": told.get("notes"), "stderr": ended.stderr[-3000:]}
    keep = ("findings", "abstained", "phases", "steps", "clock", "where", "deep_window", "notes")
    profile = load_profile(scratch / "runs" / name)  # for readings that the report does not print
    read = {"device": asdict(profile.device), "copies": asdict(profile.copies)}
    return {each: told.get(each) for each in keep} | read


def is_right(case: Case, found: dict[str, Any]) -> bool:
    """Whether the fault is named first, or nothing where there is none."""
    if found.get("bad"):
        return False
    rules = [finding["rule"] for finding in found["findings"]]
    return not rules if case.fault in NO_FAULT else rules[:1] == [case.fault]


def line(case: Case, told: dict[str, Any]) -> str:
    """A case's row of the table."""
    found, without = told[case.name], told.get(f"{case.job}:{case.without}", {})
    if found.get("bad"):
        return f"| {case.job} | {case.fault} | | {found['bad']} | | | | |"
    step_ms = found["steps"]["median_ms"]
    sound_ms = (without.get("steps") or {}).get("median_ms")
    size = f"{1 - sound_ms / step_ms:.0%}" if sound_ms and without is not found else "-"
    mean_ms = found["steps"]["mean_ms"]
    findings = [(each["rule"], each["lost_ms_per_step"] / mean_ms) for each in found["findings"]]
    first, *then = findings or [("nothing", 0.0)]
    others = ", ".join(f"{rule} {share:.0%}" for rule, share in then[:3])
    driver = found["device"]["utilisation_share"]
    idle = f"{1 - driver:.0%}" if driver is not None else "-"
    named = first[0] if is_right(case, found) else f"**{first[0]}**"
    share = f"{first[1]:.0%}" if findings else "-"
    return f"| {case.job} | {case.fault} | {size} | {named} | {share} | {others} | {step_ms:.2f} | {idle} |"


if __name__ == "__main__":
    sys.exit(main())
