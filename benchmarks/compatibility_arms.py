"""Runs a case of the compatibility benchmark: by plain Python, or under `diagnose run`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compatibility_cases import ROOT, Case, Launch

TIMEOUT_S = 600
NUM_RANKS = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What one run of a script left behind."""

    exit_code: int | None
    stdout: str
    stderr: str
    weights: dict[str, str]
    report: dict[str, Any] | None = None


def digest(path: Path) -> str:
    """Hashes a file of weights; of torch's archives, the records and their names within the archive."""
    if not path.exists():
        return "missing"
    content = hashlib.sha256()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                content.update(name.partition("/")[2].encode())
                content.update(archive.read(name))
    else:
        content.update(path.read_bytes())
    return content.hexdigest()


def missing(case: Case, sources: Path | None) -> str | None:
    """Returns what the case needs and this machine does not have."""
    if case.source and (sources is None or not (sources / case.source).is_dir()):
        return f"source {case.source}"
    for distribution in case.requires:
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return distribution
    return None


def command(case: Case, script: list[str], measured: Path | None) -> list[str]:
    """Returns the command line of an arm.

    Args:
        script: The script and its arguments.
        measured: Folder for our own files; `None` in the arm without `diagnose`.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", NUM_RANKS]
    ours = ["-m", "diagnose", "run"]
    if measured is not None:
        ours += ["--run-dir", str(measured / "runs"), "--json", str(measured / "report.json")]
    match case.launch, measured:
        case Launch.PYTHON, None:
            arguments: list[str] = []
        case Launch.PYTHON, _:
            arguments = ours
        case _, None:
            arguments = torchrun
        case Launch.TORCHRUN_OUTSIDE, _:
            arguments = [*torchrun, *ours]
        case Launch.TORCHRUN_INSIDE, _:
            arguments = [*ours, "--standalone", "--nproc-per-node", NUM_RANKS]
        case Launch.TORCHRUN_AS_MODULE, _:
            arguments = [*ours, *torchrun]
    return [sys.executable, *arguments, *script]


def run(words: list[str], folder: Path, environment: dict[str, str]) -> tuple[int | None, str, str]:
    """Runs a command; its exit code is `None` where it had to be killed. No byte of its output is lost."""
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        exit_code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        exit_code = None
    return exit_code, stdout.decode(errors="surrogateescape"), stderr.decode(errors="surrogateescape")


def run_arm(case: Case, sources: Path | None, scratch: Path, *, measured: bool) -> Arm:
    """Runs the script in a fresh folder, at the same place for both arms."""
    folder, ours = scratch / "work", scratch / "diagnose"
    for path in (folder, ours):
        shutil.rmtree(path, ignore_errors=True)
    source = sources / case.source if sources and case.source else ROOT
    if case.folder:
        shutil.copytree(source / case.folder, folder, ignore=shutil.ignore_patterns(".git"))
    else:
        folder.mkdir()
    ours.mkdir()
    if case.prepare is not None:
        case.prepare(folder)
    script = folder / case.script if case.folder else source / case.script
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment |= {key: value.format(folder=folder) for key, value in case.environment.items()}
    own_path = case.environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([*([own_path] if own_path else []), str(ROOT)])
    arguments = case.arguments.format(source=source).split()
    words = command(case, [str(script), *arguments], ours if measured else None)
    exit_code, stdout, stderr = run(words, folder, environment)
    report = ours / "report.json"
    return Arm(
        exit_code=exit_code,
        stdout=stdout,
        stderr=stderr,
        weights={name: digest(folder / name) for name in case.weights},
        report=json.loads(report.read_text()) if report.exists() else None,
    )
