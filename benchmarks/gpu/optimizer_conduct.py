"""Has child processes measure case after case, and outlives them: one that breaks costs one contender.

A child writes a line of JSON for each thing that it begins or finds. What it found is in the report at
once; the contender that it was at when it broke or hung is left out by the child that goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer_report import write

ROOT = Path(__file__).parents[2]

START_S = 120.0
"""Without a first word for so long, a child is taken for hung: it loads libraries and copies some GB."""

OVER_S = 60.0
"""So long after the deadline, up to which cases are begun, the last one is cut off."""

MOST_CHILDREN = 8


@dataclass(kw_only=True, slots=True)
class Progress:
    """How far all children together have come.

    Attributes:
        report: For the reader.
        out: The folder it is written to.
        pending: The cases still to be done.
        without: Contenders that ended a child: the next does without them.
        begun: The case that a child is at; empty between two.
        trying: The contender that it is at.
        so_far: What it has found in this case.
        heard: When it last said something.
        patience_s: How long after that it is taken for hung.
    """

    report: dict[str, Any]
    out: Path
    pending: list[str]
    without: list[str] = field(default_factory=list)
    begun: str = ""
    trying: str = ""
    so_far: dict[str, Any] | None = None
    heard: float = 0.0
    patience_s: float = START_S

    def hear(self, found: dict[str, Any]) -> None:
        """Takes in one line of a child."""
        self.heard = time.monotonic()
        self.report["machine"] |= found.get("machine", {})
        if "begun" in found:
            self.begun, self.trying, self.so_far, self.patience_s = found["begun"], "", None, START_S
        if "trying" in found:
            self.trying, self.patience_s = found["trying"], found["patience_s"]
        if "so_far" in found:
            self.so_far = found["so_far"] | {"case": self.begun}
            self.write()
        if "contenders" in found:
            self.finish(found)

    def finish(self, case: dict[str, Any]) -> None:
        """Puts a case down as done."""
        self.report["cases"].append(case)
        self.pending = [each for each in self.pending if each != case["case"]]
        self.begun, self.trying, self.so_far = "", "", None
        self.write()

    def lost(self, how: str) -> None:
        """A child ended in the middle: puts down what it had found, or lets another try the case without
        the contender that it was at."""
        if self.trying:
            self.without.append(self.trying)
        if self.so_far is not None:
            self.finish(self.so_far | {"cut_off": f"{how} at {self.trying}"})
        elif not self.trying:
            self.finish({"case": self.begun, "failure": f"{how}; its log says why"})
        self.begun = ""

    def write(self) -> None:
        """Writes the report, with what is known of the case under way."""
        cases = [*self.report["cases"], *([self.so_far] if self.so_far else [])]
        write(self.report | {"cases": cases, "not_reached": self.pending}, self.out)


def conduct(cases: list[str], out: Path, deadline: float, *, dry_run: bool) -> dict[str, Any]:
    """Runs children until all cases are done or time is up; returns the report."""
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress(
        report={"dry_run": dry_run, "machine": {}, "cases": [], "broke": []}, out=out, pending=cases
    )
    for _ in range(MOST_CHILDREN):
        if not progress.pending or time.monotonic() > deadline or not supervise(progress, deadline):
            break
    progress.write()
    return progress.report | {"not_reached": progress.pending}


def supervise(progress: Progress, deadline: float) -> bool:
    """Runs one child to its end; returns whether another should go on."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        child = subprocess.Popen(
            command_of(progress, lines, deadline),
            # Behind ours come other libraries' folders, if there are any.
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )
        progress.heard, progress.patience_s, seen, how = time.monotonic(), START_S, 0, ""
        while True:
            ended = child.poll() is not None or bool(how)
            written = lines.read_text(encoding="utf-8").split("\n")[:-1] if lines.exists() else []
            for line in written[seen:]:
                progress.hear(json.loads(line))
            seen = len(written)
            if ended:
                break
            now = time.monotonic()
            if now > deadline + OVER_S:
                how = "time was up"
            elif now > progress.heard + progress.patience_s:
                how = f"a child was silent for {now - progress.heard:.0f} s"
            if how:
                end(child)
            time.sleep(0.2)
    if not how and child.returncode:
        how = f"a child exited with {child.returncode}"
    if not how:
        return False
    if progress.begun:
        at = f" at {progress.trying}" if progress.trying else ""
        progress.report["broke"].append(f"{progress.begun}: {how}{at}")
        progress.lost(how)
        return True
    if not progress.report["machine"]:  # another would fare no better
        progress.report["cases"].append({"case": "start", "failure": how})
        return False
    progress.report["broke"].append(f"between two cases: {how}")
    return True


def end(child: subprocess.Popen[bytes]) -> None:
    """Kills a child. One that a broken driver holds does not even die: it is left alone."""
    child.kill()
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        for lock in Path(folder).glob("**/lock"):  # of what it was building: the next would wait for ever
            lock.unlink(missing_ok=True)
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        print(f"process {child.pid} does not die", file=sys.stderr)


def command_of(progress: Progress, lines: Path, deadline: float) -> list[str]:
    """Of a child that does what is pending."""
    minutes = max(0.1, (deadline - time.monotonic()) / 60)
    command = [sys.executable, str(Path(__file__).with_name("optimizers.py"))]
    command += ["--child", str(lines), "--minutes", str(minutes), "--cases", *progress.pending]
    command += ["--without", *progress.without] if progress.without else []
    return [*command, "--dry-run"] if progress.report["dry_run"] else command
