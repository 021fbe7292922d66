"""`tuned.toml`: what was kept in one run, for the next run to use without trials."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.core.trial import Measured, Trial

FILE = "tuned.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An action to put in force, and its setting."""

    action: str
    value: int | None = None


def to_toml(trials: Sequence[Trial], confirmation: Measured | None, script: str) -> str:
    """Returns the file's text.

    Args:
        trials: The actions that were kept.
        confirmation: What they won together, if it was measured.
        script: The script they were kept on.
    """
    named = script if script.isprintable() else json.dumps(script)  # no line's end, and all of it UTF-8
    lines = [f"# Kept by diagnose on {named}. Use it: diagnose run --apply {FILE} {named}"]
    if confirmation is not None:
        lines.append(
            f"# All together: {confirmation.speedup:.2f}x"
            f" ({confirmation.low:.2f} to {confirmation.high:.2f}, {confirmation.pairs} pairs)"
        )
    for trial in trials:
        lines += ["", "[[action]]", f"name = {json.dumps(trial.action)}"]
        if trial.value is not None:
            lines.append(f"value = {trial.value}")
        lines.append(f"safety = {json.dumps(trial.safety.value)}")
    return "\n".join(lines) + "\n"


def read(path: Path) -> tuple[Kept, ...]:
    """Reads such a file.

    Raises:
        DiagnoseError: If it cannot be read or is not such a file; says where.
    """
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table = toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DiagnoseError(f"--apply: cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise DiagnoseError(f"--apply: {path} is not TOML: {error}.") from error
    tables, kept = table.get("action", []), []
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise DiagnoseError(f"--apply: {path}: an action begins with [[action]], in double brackets.")
    for number, each in enumerate(tables, 1):
        name, value = each.get("name"), each.get("value")
        if not isinstance(name, str) or not (value is None or (type(value) is int and value > 0)):
            raise DiagnoseError(
                f"--apply: {path}: action {number} needs a name in quotes, and a value that is a positive"
                f" whole number if any; it has {name!r} and {value!r}."
            )
        kept.append(Kept(action=name, value=value))
    if not kept:
        raise DiagnoseError(f"--apply: {path} names no action.")
    return tuple(kept)
