"""The gate's result as GitLab's code quality report, which a merge request shows beside the diff."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from diagnose.gate import words
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
    command = result.sides[-1].command if result.sides else ()
    return next((part for part in command if part.endswith(".py")), command[-1] if command else "train.py")
