"""`diagnose baseline update`: one more job into the baseline of its kind of machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.gate.baseline import Baseline, entry_of, file_for, load, mismatch, save
from diagnose.gate.compare_commits import Measure, Plumbing, sigterm_unwinds
from diagnose.gate.compare_history import measure_job
from diagnose.gate.fingerprint import fingerprint_of
from diagnose.gate.history_why import phase_times
from diagnose.gate.measure import measured_run
from diagnose.gate.pairs import Asked, Progress
from diagnose.gate.result import MeasuredRun, Side, TrainingFailed
from diagnose.gate.worktrees import git, repository_of

MAIN_BRANCHES = ("main", "master")

BRANCH_VARIABLES = ("GITHUB_REF_NAME", "CI_COMMIT_BRANCH", "BRANCH_NAME")
"""In which GitHub, GitLab and Jenkins name the branch; they check out a commit, not a branch."""


def record_job(
    command: tuple[str, ...],
    asked: Asked,
    place: Path,
    folder: Path,
    *,
    branch: str,
    progress: Progress = lambda text: None,
    measure: Measure = measured_run,
) -> tuple[Path, int]:
    """Measures a job and adds it; returns the baseline's file and how many jobs it holds.

    Raises:
        DiagnoseError: If the command fails or never trains, or the file is of another machine or damaged.
            Nothing is recorded then.
    """
    side = Side(label="head", name=branch, root=Path.cwd(), command=command)
    runs: list[MeasuredRun] = []
    try:
        with sigterm_unwinds():
            stopped = measure_job(side, asked, folder, Plumbing(measure=measure, progress=progress), runs)
    except TrainingFailed as error:
        lines = "\n".join(error.failure.last_lines)
        raise DiagnoseError(f"baseline: nothing is recorded: {error}.\n{lines}") from error
    if stopped:
        raise DiagnoseError(f"baseline: nothing is recorded: {stopped}.")
    fingerprint = fingerprint_of(runs[-1].folder, command)
    path = file_for(place, fingerprint)
    try:
        baseline = load(path)
    except FileNotFoundError:
        baseline = Baseline(fingerprint=fingerprint)
    other = mismatch(baseline, fingerprint)
    if other:
        raise DiagnoseError(
            f"baseline: {path} is of another machine or other work: {'; '.join(other)}.\n"
            "Name a folder, in which each kind has a file of its own: --place .diagnose/baselines"
        )
    entry = entry_of(
        runs,
        when=datetime.now().astimezone().isoformat(timespec="seconds"),
        commit=_commit(Path.cwd()),
        branch=branch,
        phase_ms=phase_times(runs),
    )
    # Written by an earlier version of ours, it may know fewer facts of the machine.
    updated = replace(baseline, fingerprint=fingerprint).with_entry(entry)
    save(updated, path)
    return path, len(updated.entries)


def current_branch(folder: Path, environ: Mapping[str, str] | None = None) -> str:
    """Returns the branch that is checked out, if it is the main one.

    Raises:
        DiagnoseError: If it is another, or none is known.
    """
    environ = os.environ if environ is None else environ
    named = next((environ[name] for name in BRANCH_VARIABLES if environ.get(name)), "")
    mains = {*MAIN_BRANCHES, environ.get("CI_DEFAULT_BRANCH", "")} - {""}
    branch = named or git(repository_of(folder), "rev-parse", "--abbrev-ref", "HEAD")
    if branch not in mains:
        raise DiagnoseError(
            f"baseline: this is {branch!r}, not main, which changes are compared with.\n"
            f"If it is meant: --branch {branch}"
        )
    return branch


def _commit(folder: Path) -> str:
    try:
        return git(folder, "rev-parse", "HEAD")
    except DiagnoseError:
        return ""  # no repository: --branch was given
