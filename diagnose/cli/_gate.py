"""What `gate`, `baseline` and `bisect` have in common: their options, and how they end."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diagnose.core.errors import DiagnoseError

if TYPE_CHECKING:
    from diagnose.gate.pairs import Asked

INTERRUPTED = 130  # as a shell has it for Ctrl-C
OUR_BUG = 70  # EX_SOFTWARE of sysexits.h
BEFORE_SCRIPT = {"allow_extra_args": True, "allow_interspersed_args": False}
"""Options of ours end at the script: what follows is the script's."""
LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "srun", "mpirun"}

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[--] SCRIPT [ARGS]", help="The training command, or -m MODULE."),
]
Budget = Annotated[
    float | None, typer.Option(min=0.1, metavar="MINUTES", help="Time for all runs together.")
]
Steps = Annotated[
    int | None, typer.Option(min=20, metavar="N", help="Steps to measure in each run. [default: found]")
]
Warmup = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Steps to leave out first. [default: found]")
]
KeptIn = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Folder to keep the runs in. [default: .diagnose/gates]"),
]


def training_command(
    words: list[str], option: str = "after --", *, verb: str = "gate --ab main..HEAD"
) -> tuple[str, ...]:
    """Returns script and arguments of a training command, after the interpreter where that is not ours.

    Args:
        words: What was typed.
        option: Where.
        verb: What to show as an example.

    Raises:
        DiagnoseError: If there is none, or its interpreter cannot run diagnose.
    """
    from diagnose.gate.interpreter import split, with_interpreter

    command = with_interpreter(tuple(words))
    script = split(command)[1] if command else ()
    if not script or script == ("-m",):
        raise DiagnoseError(
            f"{verb.split()[0]}: no training command was given {option}.\n"
            f"For example: diagnose {verb} -- train.py --epochs 1"
        )
    if Path(script[0]).name in LAUNCHERS:
        raise DiagnoseError(
            f"{verb.split()[0]}: {script[0]} is a launcher: give the script, and how many ranks:\n"
            f"DIAGNOSE_NPROC_PER_NODE=2 diagnose {verb} -- train.py"
        )
    if re.fullmatch(r"[A-Za-z_]\w*=.*", script[0]):
        raise DiagnoseError(
            f"{verb.split()[0]}: {script[0]} is no script: set variables in front of diagnose."
        )
    if script[0].startswith("-") and script[0] != "-m":
        raise DiagnoseError(
            f"{verb.split()[0]}: {script[0]} stands where the script should: only `-m MODULE` may."
        )
    return command


def quoted_command(text: str, option: str) -> tuple[str, ...]:
    """Returns the training command in an option's text, which is quoted as for a shell.

    Raises:
        DiagnoseError: If a quotation is not closed, or there is no command.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise DiagnoseError(f"gate: {option} {text!r} cannot be read: {error}.") from error
    return training_command(words, f"as {option}")


@contextlib.contextmanager
def own_exit_codes(verb: str, outcome: str = "nothing was judged") -> Iterator[None]:
    """Keeps a fault of ours, and Ctrl-C, from ending with 1: that means a regression."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{verb}: interrupted; {outcome}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except (DiagnoseError, typer.Exit):
        raise
    except Exception:  # noqa: BLE001 - keeps its traceback, but not Python's exit code
        traceback.print_exc()
        sys.exit(OUR_BUG)


def refuse_destination(verb: str, path: Path) -> None:
    """Refuses, before anything is measured, a file that cannot be written.

    Raises:
        DiagnoseError: If it is a folder, or its folder is not there.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise DiagnoseError(f"{verb}: cannot write {path}: there is no folder {folder}.")
    if path.is_dir():
        raise DiagnoseError(f"{verb}: cannot write {path}: it is a folder.")


def refuse_metric(asked: Asked, *, has_history: bool = False) -> None:
    """Refuses, before anything is measured, a metric that cannot be had.

    Raises:
        DiagnoseError: If it cannot, and why.
    """
    from diagnose.gate.instructions import counting
    from diagnose.gate.noise import if_not_measured
    from diagnose.gate.result import Metric

    if asked.metric is not Metric.INSTRUCTIONS:
        return
    if has_history:
        raise DiagnoseError(
            "gate: --metric instructions is for two versions: jobs differ in how many steps they run."
        )
    if not counting(Path("counts")):
        raise DiagnoseError(
            f"gate: --metric instructions cannot be measured here. {if_not_measured(asked.metric)}"
        )


def share(text: str) -> float:
    """Reads `3%` or `0.03`.

    Raises:
        DiagnoseError: If it is neither, or not a part of something.
    """
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if "%" in text else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise DiagnoseError(
            f"gate: --max-drop {text}: give a percentage, such as 3%, or a part, such as 0.03."
        )
    return value


def asked_of(
    metric: str, max_drop: str, steps: int | None, warmup: int | None, budget: float | None
) -> Asked:
    """Returns what the options ask for.

    Raises:
        DiagnoseError: If the metric is none, or the drop.
    """
    from diagnose.gate.pairs import Asked
    from diagnose.gate.result import Metric

    names = [each.value for each in Metric]
    if metric not in names:
        raise DiagnoseError(
            f"gate: --metric {metric}: there is no such metric. There are: {', '.join(names)}."
        )
    return Asked(
        metric=Metric(metric),
        max_drop=share(max_drop),
        steps=steps,
        warmup=warmup,
        budget_s=math.inf if budget is None else 60 * budget,
    )


def folder_for_runs(run_dir: Path | None, name: str) -> Path:
    """Makes the folder that one gate keeps its runs in; no other gate has it."""
    import time

    from diagnose.launch import run_folder

    root = run_dir or Path(".diagnose") / "gates"
    try:
        return run_folder.create(root, run_folder.folder_name(time.localtime(), name))
    except OSError as error:
        raise DiagnoseError(
            f"gate: cannot make a folder for the runs in {root}: {error.strerror}."
        ) from error
