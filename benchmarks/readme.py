"""Fills the marked parts of README.md: what real runs print, and what the benchmarks found.

    python benchmarks/readme.py

Run `attribution.py > docs/attribution.md` before, and `overhead_parts.py --markdown
docs/overhead-parts.md`, and `accuracy.py` for the tables of `docs/accuracy.md`.
"""

from __future__ import annotations

import math
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
    share, cells = (int(number) for number in re.findall(r"\d+", found["top 1"]))
    low, high = interval(round(share * cells / 100), cells)
    delays = (
        f"{passed} of {len(rows)} known delays, put into known lines of ten kinds of loop, were found in"
        " the right phase and line, to 3 % of the step or 0.3 ms"
        f" ([each of them](docs/attribution.md); {dated(attribution)})."
    )
    faults = (
        "On scripts to which no threshold was fitted, the fault named first was the one put there"
        f" in {found['top 1']} cells (95 % interval: {100 * low:.0f} to {100 * high:.0f} %; aim: 95 %)."
        f" False alarms: {found['false alarms on healthy jobs']} healthy jobs. What a fault costs is"
        f" {found['size error, median'].partition(' of')[0]} off in the median"
        f" (aim: 15 %; [each of them](docs/accuracy.md); {dated(accuracy)})."
    )
    return "\n".join(bullet(text) for text in (delays, faults))


def interval(right: int, cells: int) -> tuple[float, float]:
    """Returns the exact (Clopper-Pearson) 95 % interval of a rate."""

    def rate(least: int, chance: float) -> float:
        """That at which so many or more are right by this chance."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            as_many = sum(
                math.comb(cells, k) * middle**k * (1 - middle) ** (cells - k)
                for k in range(least, cells + 1)
            )
            low, high = (middle, high) if as_many < chance else (low, middle)
        return low

    return rate(right, 0.025) if right else 0.0, rate(right + 1, 0.975) if right < cells else 1.0


def dated(text: str) -> str:
    """Returns the date that a printed page names first."""
    found = re.search(r"\d{4}-\d\d-\d\d", text)
    assert found is not None
    return found[0]


def overhead(path: Path) -> str:
    """Returns what measuring adds to the steps of the page's first table, and to start and end."""
    text = path.read_text(encoding="utf-8")
    row = r"^\| (\d+ ms) \| [\d,]+ \| ([^|]+?) \| ([^|]+?) \|(?: [^|]+ \|)? \d+ \|$"
    steps = re.findall(row, text, re.MULTILINE)
    each = [f"{added} us to one of {step} ({part})" for step, added, part in steps]
    (ends,) = re.findall(r"^\| all three \| [^|]+ \| ([^|]+?) \|$", text, re.MULTILINE)
    told = (
        f"Measuring adds {', '.join(each[:-1])} and {each[-1]}, of main-thread CPU, and {ends} s to start"
        f" and end ([each part](docs/overhead-parts.md); {dated(text)})."
    )
    return bullet(told.replace("to one of", "to a step of", 1))


def bullet(text: str) -> str:
    """Returns an item of a list, wrapped."""
    return textwrap.fill(text, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def fill(text: str, name: str, content: str) -> str:
    """Replaces what stands between a pair of markers."""
    pattern = re.compile(rf"(<!-- {name}:begin [^>]*-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    assert pattern.search(text), name
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)


if __name__ == "__main__":
    main()
