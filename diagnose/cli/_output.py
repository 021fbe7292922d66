"""What the reading verbs have in common: where the runs lie, and where the answer goes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diagnose.core.errors import DiagnoseError

if TYPE_CHECKING:
    from diagnose.report import Terminal

STDOUT = "-"
WIDEST = 100

Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Name or path of a run. [default: the newest]")
]
RunDir = Annotated[Path | None, typer.Option(help="Folder that holds the runs. [default: .diagnose/runs]")]
Json = Annotated[
    str | None, typer.Option("--json", metavar="PATH|-", help="Write JSON to a file, or to stdout for -.")
]


def root_of_runs(run_dir: Path | None) -> Path:
    """Returns the folder that runs lie in, as `diagnose run` would find it."""
    from diagnose.launch.settings import resolve

    return resolve({"run_dir": run_dir}, os.environ, Path.cwd()).run_dir


def terminal(widest: int = WIDEST) -> Terminal:
    """Describes what stdout is printed on."""
    from diagnose.report import Terminal

    return Terminal.of(sys.stdout, widest=widest)


def answer(json_path: str | None, data: dict[str, Any], text: str) -> None:
    """Writes the answer as JSON where that is asked for; else prints its text."""
    if json_path is not None:
        put(as_json(data), json_path)
    else:
        show(text)


def as_json(answer: dict[str, Any]) -> str:
    """Returns the answer as JSON text that any parser accepts."""
    return json.dumps(answer, indent=2, allow_nan=False) + "\n"


def put(text: str, path: str) -> None:
    """Writes `text` to a file, saying so on stderr, or to stdout.

    Raises:
        DiagnoseError: If the file cannot be written.
    """
    if path == STDOUT:
        show(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiagnoseError(f"diagnose: cannot write {path}: {error.strerror}.") from error
    print(f"wrote {path}", file=sys.stderr)


def show(text: str) -> None:
    """Prints `text` on stdout, with escapes for what its encoding lacks."""
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
