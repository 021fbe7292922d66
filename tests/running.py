"""Runs scripts in processes of their own, plain and under `diagnose run`, for the end-to-end tests."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
DIAGNOSE = (sys.executable, "-m", "diagnose", "run")
PLAIN = (sys.executable,)
BY_PATH = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from diagnose.cli.main import main; main()"
"""Code for `python -c` that is `diagnose` without the help of PYTHONPATH."""

TIMEOUT_S = 120


def environment(**changes: str | None) -> dict[str, str]:
    """The environment of a shell in which nobody has configured anything; `None` removes a variable."""
    ours = ("DIAGNOSE_", "PYTHON", "NO_COLOR", "FORCE_COLOR", "RANK", "WORLD_SIZE", "TORCHELASTIC_")
    variables: dict[str, str | None] = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    variables["PYTHONPATH"] = str(REPOSITORY)
    variables.update(changes)
    return {name: value for name, value in variables.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a process left. `code` is negative where a signal ended it."""

    code: int
    stdout: str
    stderr: str


def run(*command: object, cwd: Path, stdin: str = "", **changes: str | None) -> Ended:
    """Runs a command to its end."""
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment(**changes),
        input=stdin.encode(),
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Ended(code=ended.returncode, stdout=ended.stdout.decode(), stderr=ended.stderr.decode())


def start(*command: object, cwd: Path, **options: Any) -> tuple[subprocess.Popen[str], str]:
    """Starts a command and returns once it has printed its first line, with that line."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **{"env": environment(), **options},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "it ended without a word"
    return process, line


def finish(process: subprocess.Popen[str]) -> Ended:
    """Waits for a process that was started."""
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return Ended(code=process.returncode, stdout=stdout, stderr=stderr)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_ranks(*command: str, num_ranks: int = 2) -> list[Ended]:
    """Runs what the interpreter is told once for each rank, to their good ends."""
    place = environment(
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_port(),
        OMP_NUM_THREADS="1",
    )
    processes = [
        subprocess.Popen(
            [*PLAIN, *command],
            cwd=REPOSITORY,
            env={**place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    ended = [finish(process) for process in processes]
    for each in ended:
        assert each.code == 0, each.stderr
    return ended


def run_in_terminal(*command: object, cwd: Path, keys: Mapping[str, str]) -> Ended:
    """Runs a command in the foreground of a terminal of its own; presses a key after each of some words."""
    words = [str(part) for part in command]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execve(words[0], words, environment())
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    output, waiting = b"", dict(keys)
    while True:
        try:
            output += os.read(terminal, 65536)
        except OSError:  # how Linux says that the other side has closed
            break
        for word in [word for word in waiting if word.encode() in output]:
            time.sleep(0.2)  # a person's pause, in which the script goes on to wait
            os.write(terminal, waiting.pop(word).encode())
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    text = output.decode().replace("\r\n", "\n")
    return Ended(code=os.waitstatus_to_exitcode(status), stdout=text, stderr="")


def comes_true(holds: Callable[[], object], within_s: float = 30) -> bool:
    """Whether something becomes true in time, on a machine under load, too."""
    deadline = time.monotonic() + within_s
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(held)


def has_ended(pid: int, within_s: float) -> bool:
    """Whether a process that is not ours to wait for is gone, or a zombie, in time."""
    for _ in range(int(within_s / 0.05)):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False


def write(path: Path, text: str) -> Path:
    """Writes a script of a few lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def only_run(folder: Path) -> Path:
    """The one run recorded under `folder`."""
    (run_folder,) = (folder / ".diagnose" / "runs").iterdir()
    return run_folder


def recorded(folder: Path, script: str, *arguments: object, num_ranks: int = 1) -> Path:
    """Runs a script of a few lines under `diagnose`, to its good end; returns the run's folder."""
    ranks = ("--nproc-per-node", num_ranks) if num_ranks > 1 else ()
    path = write(folder / "train.py", script)
    ended = run(*DIAGNOSE, "--quiet", *ranks, path, *arguments, cwd=folder)
    assert ended.code == 0, ended.stderr
    return only_run(folder)
