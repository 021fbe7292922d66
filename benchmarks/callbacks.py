"""Compares what a callback measures with what `diagnose run` measures of the same script, as markdown.

    python benchmarks/callbacks.py [--rounds N]

Each script of `foreign/` runs by turns with its `DiagnoseCallback` and under `diagnose run`. Needs
transformers, accelerate and lightning.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from diagnose.analysis.profile import load_profile
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile

ROOT = Path(__file__).resolve().parents[1]
FOREIGN = ROOT / "benchmarks" / "foreign"
SCRIPTS = {"Hugging Face Trainer": "hf_trainer.py", "Lightning Trainer": "lightning_trainer.py"}
LEAST_SHARE = 0.01
"""Phases below this part of the step are not listed."""


def measured(script: Path, *, by_callback: bool) -> Profile:
    """Runs the script once and returns what was found."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        own = (sys.executable, str(script), "--callback", str(runs))
        ours = (sys.executable, "-m", "diagnose", "run", "--quiet", "--run-dir", str(runs), str(script))
        subprocess.run(
            own if by_callback else ours,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
        )
        [run] = runs.iterdir()
        return load_profile(run)


def shares(profiles: list[Profile], phase: Phase) -> str:
    """Returns a phase's part of the step: the median run, and the least and most."""
    values = [100 * (profile.share(phase) or 0.0) for profile in profiles]
    return f"{median(values):.1f} % ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    """Prints a table for each script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for name, script in SCRIPTS.items():
        by_callback, by_command = [], []
        for _ in range(rounds):
            by_callback.append(measured(FOREIGN / script, by_callback=True))
            by_command.append(measured(FOREIGN / script, by_callback=False))
        steps = {profile.steps.count for profile in (*by_callback, *by_command)}
        print(f"{name}: {', '.join(map(str, sorted(steps)))} steps in every run, {rounds} runs of each.\n")
        print("| phase | DiagnoseCallback | diagnose run |\n|---|---|---|")
        for phase in Phase:
            if max(profile.share(phase) or 0 for profile in (*by_callback, *by_command)) >= LEAST_SHARE:
                print(f"| {phase.label} | {shares(by_callback, phase)} | {shares(by_command, phase)} |")
        print(flush=True)


if __name__ == "__main__":
    main()
