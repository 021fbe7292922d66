"""The gate's result for GitHub: annotations on lines, and a step's summary. Found by environment alone."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from diagnose.gate import words
from diagnose.gate.result import GateResult, Reason, Verdict

MOST_ANNOTATIONS = 10
"""GitHub shows ten of a kind for each step and drops the others."""

MOST_BYTES = 1024 * 1024
"""A summary that is larger is dropped whole."""

LEVELS = {
    Verdict.PASS: "notice",
    Verdict.REGRESSION: "error",
    Verdict.INCONCLUSIVE: "warning",
    Verdict.MISMATCH: "warning",
    Verdict.FAILED: "error",
}


def is_github(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this is a job of GitHub Actions."""
    return (os.environ if environ is None else environ).get("GITHUB_ACTIONS") == "true"


def not_obeyed(text: str) -> str:
    """Returns whole lines with what keeps GitHub from obeying them, as a script may have written them."""
    token = secrets.token_hex(16)
    return f"::stop-commands::{token}\n{text}::{token}::\n"


def harmless(text: str) -> str:
    """Returns text in which GitHub finds nothing to obey, where no lines can be put around it."""
    lines = (f"| {line}" if line.lstrip().startswith("::") else line for line in text.split("\n"))
    return "\n".join(lines).replace("##[", "## [")


def workflow_commands(result: GateResult) -> list[str]:
    """Returns workflow commands for stdout: the verdict, then the lines that a loss is attributed to."""
    level = LEVELS[result.verdict]
    lines = [_annotation(level, words.headline(result), "diagnose gate")]
    placed = [reason for reason in result.why if reason.file and reason.line > 0]
    return lines + [_of_reason(reason) for reason in placed[:MOST_ANNOTATIONS]]


def _of_reason(reason: Reason) -> str:
    level = "warning" if reason.is_blamed else "notice"
    return _annotation(level, reason.text, reason.title, reason.file, reason.line)


def _annotation(level: str, message: str, title: str, file: str = "", line: int = 0) -> str:
    properties = [f"file={_property(file)}", f"line={line}"] if file else []
    properties.append(f"title={_property(title)}")
    return f"::{level} {','.join(properties)}::{_data(message)}"


def _data(text: str) -> str:
    """Escapes what would end the command, or begin another."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def summary(result: GateResult) -> str:
    """Returns the result in GitHub's markdown, never longer than GitHub takes."""
    lines = [f"## diagnose gate: {_text(words.headline(result))}", "", "| | |", "|---|---|"]
    lines += [f"| {_text(name)} | {_text(text)} |" for name, text in words.rows(result)]
    if result.why:
        lines += ["", "### Where it was lost", ""]
        lines += [f"- {_place(reason)}{_text(reason.text)}" for reason in result.why]
    if result.failure is not None:
        lines += ["", "### The end of its stderr", "", *_code(result.failure.last_lines)]
    return _cut("\n".join(lines) + "\n", MOST_BYTES)


def append_summary(result: GateResult, path: Path) -> None:
    """Adds the summary to the file that GITHUB_STEP_SUMMARY names, which holds other steps' too.

    Raises:
        OSError: If it cannot be written.
    """
    text = summary(result).encode("utf-8", "replace")
    room = MOST_BYTES - (path.stat().st_size if path.exists() else 0)
    if len(text) <= room:
        with path.open("ab") as file:
            file.write(text)


def _place(reason: Reason) -> str:
    return f"{_text(reason.file)}:{reason.line}: " if reason.file else ""


def _text(text: str) -> str:
    """Escapes markdown and HTML, of which file names and commands may hold any."""
    flat = " ".join(text.split())
    escaped = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#!|~@])", r"\\\1", escaped)


def _code(lines: tuple[str, ...]) -> list[str]:
    """Returns lines as code, in a fence longer than any in them."""
    longest = max((len(ticks) for line in lines for ticks in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence + "text", *lines, fence]


def _cut(text: str, most_bytes: int) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= most_bytes:
        return text
    end = "\n\n... cut: the rest is in the JSON report\n"
    return data[: most_bytes - len(end)].decode("utf-8", "ignore") + end
