"""Each fix that needs a GPU, tried alone on a live job: was it put in force, judged and undone?

    python benchmarks/gpu/actions.py --out out [--seconds 90] [--beside 15] [--dry-run] [NAME ...]

`diagnose run --tune --only NAME` of `actions_job.py`, many at once: what is asked is what works, and the
speedups that are printed come from a shared GPU. Fails where a run ends badly, something of ours failed, or
an action that had to be measured was not.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SHORT = ["gpt", "--short"]
ACTIONS: dict[str, list[str]] = {
    "regional-compile": ["gpt"],
    "oom-replay": [*SHORT, "--large"],
    "activation-checkpointing": SHORT,
    "save-on-cpu": SHORT,
    "autocast-bf16": ["gpt"],
    "autocast-fp16": ["gpt"],
    "tf32-matmul": ["gpt"],
    "sdpa": ["gpt", "--math"],
    "fused-optimizer": ["gpt"],
    "eight-bit-states": ["gpt"],
    "pin-memory": ["gpt", "--workers", "2"],
    "device-prefetch": ["gpt", "--workers", "2"],
    "channels-last": ["conv"],
    "optimizer-in-backward": SHORT,
    "ddp-bf16-hook": ["ddp"],
}
"""By name: the job's arguments. What takes longest comes first."""

MAY_REFUSE = {"ddp-bf16-hook": "one rank"}
"""What a single GPU cannot show, run for what the hooks make of the job, and with which word it refuses."""

LOOKED_FOR = ("measuring failed in", "is not read any more", "at installation")
"""Parts of notes that say that something of ours failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seconds", type=float, default=90.0, help="of all the time")
    parser.add_argument("--beside", type=int, default=15, help="runs at once")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, where most refuse")
    parser.add_argument("actions", nargs="*", choices=[*ACTIONS, []], metavar="NAME")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.actions or list(ACTIONS)
    if args.dry_run and not args.actions:
        names = ["sdpa", "channels-last"]
    until = time.monotonic() + args.seconds
    found: dict[str, Any] = {}
    writing = threading.Lock()
    print("| action | job | outcome | speedup | reason |\n|---|---|---|--:|---|")

    def one(name: str) -> None:
        came_of_it = tried(name, args.steps, until - time.monotonic(), args.dry_run)
        with writing:
            found[name] = came_of_it
            (args.out / "actions.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(line(name, came_of_it), flush=True)

    with ThreadPoolExecutor(args.beside) as pool:
        list(pool.map(one, names))
    bad = [name for name in names if found[name]["bad"] and not args.dry_run]
    for name in bad:
        print(f"{name}: {found[name]['bad']}\n{found[name]['stderr']}")
    print(
        f"{len(names) - len(bad)} of {len(names)} actions did what they should"
        + f"; not {', '.join(bad)}" * bool(bad)
    )
    if args.dry_run:
        print("A rehearsal on a CPU: it says only that the runs can be begun and read.")
    return int(bool(bad))


def tried(name: str, steps: int, seconds: float, rehearse: bool) -> dict[str, Any]:
    """One run with one action, and what became of it."""
    if seconds < 15:
        return {"outcome": "no time", "bad": "no time was left", "stderr": ""}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        words = [sys.executable, "-m", "diagnose", "run", "--tune", "--only", name, "--allow", "precision"]
        words += ["--allow", "training", "--json", str(report), "--run-dir", scratch]
        words += [str(HERE / "actions_job.py")]
        words += [*ACTIONS[name], "--steps", str(20 if rehearse else steps), *["--cpu"] * rehearse]
        try:
            ended = subprocess.run(words, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
        except subprocess.TimeoutExpired as late:
            said = late.stderr or b""
            said = said.decode(errors="replace") if isinstance(said, bytes) else said
            return {"outcome": "hung", "bad": f"not done after {seconds:.0f} s", "stderr": said[-3000:]}
        if not report.exists():
            return {
                "outcome": "died",
                "bad": f"exit code {ended.returncode}",
                "stderr": ended.stderr[-3000:],
            }
        told = json.loads(report.read_text(encoding="utf-8"))
    trials = [trial for trial in told["trials"] if trial["action"] == name]
    tuning = told["tuning"] or {}
    result: dict[str, Any] = {
        "outcome": ", ".join(trial["state"] for trial in trials) or "not thought of",
        "reason": "; ".join(trial["reason"] for trial in trials),
        "trials": trials,
        "errors": tuning.get("errors"),
        "undone": tuning.get("undone"),
        "dropped": tuning.get("dropped"),
        "notes": told["notes"],
        "findings": [(each["rule"], each["summary"]) for each in told["findings"]],
        "median_ms": told["steps"]["median_ms"],
        "stderr": ended.stderr[-3000:],
    }
    failed = [note for note in told["notes"] if any(words in note for words in LOOKED_FOR)]
    bad = [f"exit code {ended.returncode}"] * bool(ended.returncode) + failed
    bad += [str(tuning["errors"])] * bool(tuning.get("errors"))
    if MAY_REFUSE.get(name, "-") not in result["reason"] and not any(
        trial["measured_speedup"] for trial in trials
    ):
        bad.append("never measured: " + (result["reason"] or "no trial"))
    return result | {"bad": "; ".join(bad)}


def line(name: str, result: dict[str, Any]) -> str:
    """An action's line of the table."""
    measured = [trial["measured_speedup"] for trial in result.get("trials", ())]
    speedup = ", ".join(f"{each:.2f}" for each in measured if each) or "-"
    reason = (result.get("reason") or result["bad"])[:160].replace("|", "/").replace("\n", " ")
    return f"| {name} | {' '.join(ACTIONS[name])} | {result['outcome']} | {speedup} | {reason} |"


if __name__ == "__main__":
    sys.exit(main())
