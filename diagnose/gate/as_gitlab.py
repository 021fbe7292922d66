"""The gate's result as GitLab's code quality report, which a merge request shows beside the diff."""

from __future__ import annotations

import hashlib
import json
import posixpath
from typing import Any

from diagnose.gate import words
from diagnose.gate.interpreter import split
from diagnose.gate.result import GateResult, Verdict

SEVERITY = {Verdict.REGRESSION: "major", Verdict.INCONCLUSIVE: "info", Verdict.MISMATCH: "info"}


def to_gitlab(result: GateResult) -> str:
    """Returns the JSON text: one issue per line that a loss is attributed to; none where nothing was lost.

    GitLab wants a file and a line for each; the verdict itself is put on the training script.
    """
    if result.verdict not in SEVERITY:
        return "[]\n"
    severity = SEVERITY[result.verdict]
    issues = [_issue("verdict", words.headline(result), _script(result), 1, severity)]
    issues += [
        _issue(reason.kind, reason.text, reason.file, reason.line, "minor" if reason.is_blamed else "info")
        for reason in result.why
        if reason.file and reason.line > 0
    ]
    return json.dumps(issues, indent=2) + "\n"


def _issue(kind: str, text: str, file: str, line: int, severity: str) -> dict[str, Any]:
    identity = f"{kind}\0{file}\0{line}\0{text if kind != 'verdict' else ''}"
    return {
        "description": text,
        "check_name": f"diagnose-gate-{kind}",
        "fingerprint": hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest(),
        "severity": severity,
        "location": {"path": file, "lines": {"begin": line}},
    }


def _script(result: GateResult) -> str:
    """Returns the training script's path in the repository, as GitLab has it."""
    if not result.sides:
        return "train.py"
    side = result.sides[-1]
    _, words = split(side.command)
    first = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
    script = next((word for word in words if word.endswith(".py")), first)
    if posixpath.isabs(script):
        script = posixpath.relpath(script, side.root.as_posix())
    return posixpath.normpath(posixpath.join(side.folder, script))
