"""Fills the marked parts of README.md: a real run's output, and the tables that the benchmarks printed.

    python benchmarks/readme.py

Run `attribution.py --markdown docs/attribution.md` before, and `overhead_parts.py --markdown
docs/overhead-parts.md`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    text = fill(text, "demo", demo())
    text = fill(text, "findings", findings())
    text = fill(text, "tuning", tuning())
    text = fill(text, "attribution", attribution(ROOT / "docs" / "attribution.md"))
    text = fill(text, "overhead", body(ROOT / "docs" / "overhead-parts.md"))
    readme.write_text(text, encoding="utf-8")


def demo() -> str:
    """Runs what `make demo` runs, and returns its last lines of stdout and the block that follows."""
    script = str(Path("examples") / "image_classifier.py")
    done = diagnose("run", script)
    tail = done.stdout.splitlines()[-2:]
    block = "\n".join([f"$ diagnose run {script}", "...", *tail, "", *done.stderr.strip().splitlines()])
    return f"```text\n{block}\n```"


def findings() -> str:
    """Returns what the full report of that run says of its findings."""
    report = diagnose("report").stdout
    section = report[report.index("What slows it down") : report.index("\nWhere the step goes")]
    return f"```text\n$ diagnose report\n...\n{section.rstrip()}\n...\n```"


def tuning() -> str:
    """Tunes a job with two faults, and returns the block that `diagnose` adds to its output."""
    command = ("run", "--tune", "benchmarks/tuning/deep_adamw.py", "--steps", "1500", "--wait-ms", "0.8")
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


def attribution(path: Path) -> str:
    """Returns the single faults of the plain loop, and how all rows of the page came out."""
    text = path.read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in row] for row in cells if not row[0].startswith("--")]
    shown = [
        head.index(name) for name in ("fault", "phase", "injected", "found", "error", "of step", "line")
    ]
    passed = sum(row[-1] == "pass" for row in rows)
    when = re.search(r"^\d{4}-\d\d-\d\d; .*$", text, re.MULTILINE)
    assert when is not None
    table = [
        "| " + " | ".join(row[index] for index in shown) + " |"
        for row in rows
        if row[0] == "loader" and " with " not in row[1] and " in the loop" not in row[2]
    ]
    return "\n".join(
        [
            f"{passed} of {len(rows)} rows pass ([all of them](docs/attribution.md), over ten kinds of "
            f"loop; {when[0].rstrip('.')}). The plain loop's single faults, in ms per step:",
            "",
            "| " + " | ".join(head[index] for index in shown) + " |",
            "|" + "---|" * len(shown),
            *table,
        ]
    )


def body(path: Path) -> str:
    """Returns a printed page without its title."""
    return path.read_text(encoding="utf-8").partition("\n")[2].strip()


def fill(text: str, name: str, content: str) -> str:
    """Replaces what stands between a pair of markers."""
    pattern = re.compile(rf"(<!-- {name}:begin [^>]*-->\n).*?(<!-- {name}:end -->)", re.DOTALL)
    assert pattern.search(text), name
    return pattern.sub(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", text)


if __name__ == "__main__":
    main()
