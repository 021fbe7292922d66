"""Fills the marked parts of README.md: what real runs print, and what the benchmarks found.

    python benchmarks/readme.py

Run `attribution.py > docs/attribution.md` before, and `overhead_parts.py --markdown
docs/overhead-parts.md`, and `accuracy.py` for the tables of `docs/accuracy.md`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    text = fill(text, "demo", demo())
    text = fill(text, "tuning", tuning())
    text = fill(text, "evidence", evidence(ROOT / "docs"))
    text = fill(text, "overhead", overhead(ROOT / "docs" / "overhead-parts.md"))
    readme.write_text(text, encoding="utf-8")


def demo() -> str:
    """Runs what `make demo` runs, and returns its last lines of stdout and the block that follows."""
    script = str(Path("examples") / "image_classifier.py")
    done = diagnose("run", script)
    tail = done.stdout.splitlines()[-2:]
    block = "\n".join([f"$ diagnose run {script}", "...", *tail, "", *done.stderr.strip().splitlines()])
    return f"```text\n{block}\n```"


def tuning() -> str:
    """Tunes a job with two faults, and returns the block that `diagnose` adds to its output."""
    command = ("run", "--tune", "benchmarks/tuning/deep_adamw.py", "--steps", "4000", "--wait-ms", "0.8")
    block = diagnose(*command).stderr.strip()
    return f"```text\n$ diagnose {' '.join(command)}\n...\n{block}\n```"


def diagnose(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "diagnose", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
    )


def evidence(docs: Path) -> str:
    """Returns what two benchmarks have found: the attribution of time, and the naming of faults."""
    attribution = (docs / "attribution.md").read_text(encoding="utf-8")
    rows = [line for line in attribution.splitlines() if line.endswith((" pass |", " fail |"))]
    rows = [line for line in rows if line.split("|")[-3].strip()]  # not the figures of loaders
    passed = sum(line.endswith(" pass |") for line in rows)
    accuracy = (docs / "accuracy.md").read_text(encoding="utf-8")
    found = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", accuracy, re.MULTILINE))
    delays = (
        f"{passed} of {len(rows)} known delays, put into known lines of ten kinds of loop, were found in"
        " the right phase and line, to 3 % of the step or 0.3 ms"
        f" ([each of them](docs/attribution.md); {dated(attribution)})."
    )
    faults = (
        "On scripts to which no threshold was fitted, the fault named first was the one put there"
        f" in {found['top 1']} cells; {found['false alarms on healthy jobs']} healthy jobs were accused."
        f" What it costs is {found['size error, median'].partition(' of')[0]} off in the median"
        f" ([each of them](docs/accuracy.md); {dated(accuracy)})."
    )
    return "\n".join(
        textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ") for text in (delays, faults)
    )


def dated(text: str) -> str:
    """Returns the date that a printed page names first."""
    found = re.search(r"\d{4}-\d\d-\d\d", text)
    assert found is not None
    return found[0]


def overhead(path: Path) -> str:
    """Returns how the figures were made, and the table of steps."""
    _, _, text = path.read_text(encoding="utf-8").partition("\n")
    made, table, *_ = text.strip().split("\n\n")
    return f"{made}\n\n{table}\n\n[All parts](docs/overhead-parts.md), with what is added to start and end."


def fill(text: str, name: str, content: str) -> str:
    """Replaces what stands between a pair of markers."""
    pattern = re.compile(rf"(<!-- {name}:begin [^>]*-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    assert pattern.search(text), name
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)


if __name__ == "__main__":
    main()
