"""The interpreter that a training command asks for: ours, or that of another environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import diagnose
from diagnose.core.errors import DiagnoseError

PYTHON = re.compile(r"python(\d+(?:\.\d+)*)?")

WITHOUT_CWD = "import sys; sys.path[:] = [*filter(None, sys.path)]; "
ASK = WITHOUT_CWD + "import diagnose.cli.main; print(diagnose.__version__)"
"""Loads what a run is started with; a module of our name in the current folder is not ours."""

TIMEOUT_S = 120.0


def with_interpreter(words: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a command with the path of its interpreter first where that is not ours; else without one.

    A bare `python`, or one of our own version, is ours, as everywhere in diagnose. Any other word is looked
    up as a shell would.

    Raises:
        DiagnoseError: If there is no such interpreter, or it does not have this version of diagnose.
    """
    if not words or not (named := PYTHON.fullmatch(Path(words[0]).name)):
        return words
    version = (named[1] or "").split(".") if named[1] else []
    if os.path.dirname(words[0]) == "" and version == list(map(str, sys.version_info[: len(version)])):
        return words[1:]
    found = shutil.which(os.path.expanduser(words[0]))
    if found is None:
        raise DiagnoseError(f"gate: there is no interpreter {words[0]!r} that can be run.")
    path = os.path.abspath(found)
    if _is_ours(path):
        return words[1:]
    _check(path)
    return (path, *words[1:])


def split(command: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Returns the interpreter of a command of `with_interpreter`, and what it runs."""
    if os.path.isabs(command[0]) and PYTHON.fullmatch(Path(command[0]).name):
        return command[0], command[1:]
    return sys.executable, command


def _is_ours(path: str) -> bool:
    """Whether it is our environment's: interpreters of several are often links to one and the same file."""
    folders = os.path.dirname(path), os.path.dirname(sys.executable)
    return os.path.samefile(*folders) and os.path.samefile(path, sys.executable)


def _check(path: str) -> None:
    try:
        asked = subprocess.run(
            [path, "-c", ASK], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        said = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DiagnoseError(f"gate: {path} cannot be run: {error}.") from error
    ours, install = diagnose.__version__, f"{path} -m pip install torch-diagnose=={diagnose.__version__}"
    if asked.returncode:
        raise DiagnoseError(f"gate: diagnose cannot be imported by {path} ({said}).\nInstall it: {install}")
    theirs = asked.stdout.strip()
    if theirs != ours:
        raise DiagnoseError(
            f"gate: {path} has diagnose {theirs}, and this is {ours}: one must not judge what the other "
            f"recorded.\nInstall the same: {install}"
        )
