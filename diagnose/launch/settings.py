"""What the user asked for: command line > `DIAGNOSE_*` > `[tool.diagnose]` > default."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from diagnose.core.errors import DiagnoseError
from diagnose.launch.rank_choice import ALL, is_choice
from diagnose.store.runs import DEFAULT_ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one run, resolved.

    Attributes:
        run_dir: Folder that holds the runs, one folder each.
        name: Name of the run's folder; made of the time and the script's name when `None`.
        json: Where to write the report as JSON.
        html: Where to write the report as HTML.
        steps: Number of steps after which measuring ends and training goes on; `None` for all.
        stop_after: Number of steps after which the script is ended cleanly; `None` for never.
        warmup: Leading steps left out of every figure; `None` for the analysis to find.
        nproc_per_node: Number of ranks to start, as torchrun understands it (`8`, `gpu`, `auto`).
        ranks: Which ranks record; see `launch.rank_choice`.
        quiet: Print neither a start line nor the report.
        tune: Try fixes on the running job, and keep what helps.
        allow: Fixes to try beyond those that are exact or only round differently: `precision`, `training`.
        only: The only fixes to try; empty for all.
        skip: Fixes not to try.
        dry_run: Name the fixes that would be tried; change nothing.
        apply: A `tuned.toml` whose fixes are put in force without trials.
        dashboard: Show the run in a browser while it trains.
        deep_window: Steps to record operation by operation: `STEP` or `STEP:COUNT`, or `auto` if a rule is
            unsure; `None` for none.
        export: Where to take figures while it trains, and when it has ended: `NAME` or `NAME=TARGET` each.
    """

    run_dir: Path = DEFAULT_ROOT
    name: str | None = None
    json: Path | None = None
    html: Path | None = None
    steps: int | None = None
    stop_after: int | None = None
    warmup: int | None = None
    nproc_per_node: str | None = None
    ranks: str = ALL
    quiet: bool = False
    tune: bool = False
    allow: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    dry_run: bool = False
    apply: Path | None = None
    dashboard: bool = False
    deep_window: str | None = None
    export: tuple[str, ...] = ()

    @property
    def tunes(self) -> bool:
        """Whether fixes are looked for or put in force at all."""
        return self.tune or self.dry_run or self.apply is not None


KEYS = tuple(field.name for field in fields(Settings))
VARIABLE_OF = {key: "DIAGNOSE_DIR" if key == "run_dir" else f"DIAGNOSE_{key.upper()}" for key in KEYS}
"""The environment variable of each setting. `DIAGNOSE_RUN_DIR` is taken: it names the folder of one run."""

FROM_PROJECT = "DIAGNOSE_PROJECT"
"""The variable that names, with commas, the only settings read from `[tool.diagnose]`; without it, all."""

YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")


def resolve(command_line: Mapping[str, Any], environ: Mapping[str, str], folder: Path) -> Settings:
    """Brings together what was set where.

    Args:
        command_line: Values of the options by the name of the setting; `None` where one was not given.
        environ: The environment. In that of a rank nothing but the command line starts further ranks.
        folder: Where to begin to look, upward, for the `pyproject.toml`.

    Raises:
        DiagnoseError: If a key is unknown or a value of the wrong kind; names the key and where it stands.
            If the command line chooses among fixes and asks for none.
    """
    values = _from_project(folder, environ.get(FROM_PROJECT, ""))
    for key in KEYS:
        text = environ.get(VARIABLE_OF[key], "")
        if text:
            values[key] = _from_text(key, text)
    if "RANK" in environ and "LOCAL_RANK" in environ:  # of a rank; some clusters number hosts by the first
        values.pop("nproc_per_node", None)
    for key, value in command_line.items():
        option = f"--{key.replace('_', '-')}"
        if key in LISTS:
            if value:  # typer's empty list stands for an option that was not given
                names = [n for each in value for n in each.split(",") if n]
                values[key] = _checked(key, value if key == "export" else names, option)
        elif value is not None:
            values[key] = _checked(key, value, option) if key in ("deep_window", "ranks") else value
    settings = Settings(**values)
    if not settings.tunes:
        for key in OF_TUNING:
            if command_line.get(key):
                raise DiagnoseError(
                    f"diagnose: --{key} is about the fixes that --tune tries: add --tune, or --dry-run to "
                    "only see which those are."
                )
    return settings


def is_found_by_name(run: Path) -> bool:
    """Whether the verbs that read runs find one, in the present folder, by its name alone.

    Args:
        run: The run's folder, absolute.
    """
    try:
        root = resolve({}, os.environ, Path.cwd()).run_dir
    except (DiagnoseError, OSError):
        return False
    return run.parent.resolve() == root.resolve()


def action_names() -> tuple[str, ...]:
    """Returns the names of all actions, without importing one."""
    from diagnose import actions

    files = (info.name for info in pkgutil.iter_modules(actions.__path__))
    return tuple(sorted(n.replace("_", "-") for n in files if n != "base" and not n.startswith("_")))


def find_project_file(folder: Path) -> Path | None:
    """Returns the nearest `pyproject.toml` in `folder` or above it."""
    absolute = folder.absolute()
    for candidate in (absolute, *absolute.parents):
        path = candidate / "pyproject.toml"
        if path.is_file():
            return path
    return None


def _from_project(folder: Path, only: str) -> dict[str, Any]:
    path = find_project_file(folder)
    if path is None:
        return {}
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DiagnoseError(f"diagnose: cannot read {path}: {error.strerror}.") from error
    if b"diagnose" not in data:
        return {}  # most projects: spares the start-up the time to import a parser
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        table = toml.loads(data.decode()).get("tool", {}).get("diagnose", {})
    except ValueError as error:  # not TOML, or not UTF-8
        raise DiagnoseError(f"diagnose: cannot read {path}: {error}.") from error
    values = {}
    for dashed, value in table.items():
        key = dashed.replace("-", "_")
        if only and key not in only.split(","):
            continue
        where = f"{path}: [tool.diagnose] {dashed}"
        if key not in KEYS:
            known = ", ".join(name.replace("_", "-") for name in KEYS)
            raise DiagnoseError(f"{where}: there is no such setting. There are: {known}.")
        values[key] = _checked(key, value, where)
        if isinstance(values[key], Path):
            values[key] = path.parent / values[key]
    return values


def _from_text(key: str, text: str) -> Any:
    where = VARIABLE_OF[key]
    value: Any = text
    if key in INTEGERS:
        try:
            value = int(text)
        except ValueError:
            value = text  # refused below, in the same words as a wrong value in the file
    elif key in SWITCHES and text.lower() in (*YES, *NO):
        value = text.lower() in YES
    elif key in LISTS:
        value = [part.strip() for part in text.split(",") if part.strip()]
    return _checked(key, value, where)


INTEGERS = {"steps": 1, "stop_after": 1, "warmup": 0}
"""The whole numbers, with the least value each may have."""


DEEP_WINDOW = re.compile(r"auto|[0-9]{1,12}(:[1-5])?")

SWITCHES = ("quiet", "tune", "dry_run", "dashboard")

LISTS: dict[str, tuple[str, ...]] = {
    "allow": ("precision", "training"),
    "only": (),
    "skip": (),
    "export": (),
}
"""Settings that hold several names, with those there are; none means the names of all actions, save for
`export`: `diagnose.export` knows those."""

OF_TUNING = ("allow", "only", "skip")
"""Settings that choose among fixes. In a file or the environment they wait for whoever asks for some."""


def _checked(key: str, value: Any, where: str) -> Any:
    if key in INTEGERS:
        least = INTEGERS[key]
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return _accept(ok, value, where, f"a whole number of {least} or more", int)
    if key in SWITCHES:
        return _accept(isinstance(value, bool), value, where, "true or false", bool)
    if key == "export":
        ok = isinstance(value, (list, tuple)) and all(isinstance(each, str) and each for each in value)
        return _accept(ok, value, where, "a list of texts such as 'prometheus=run.prom'", tuple)
    if key in LISTS:
        names = LISTS[key] or action_names()
        ok = isinstance(value, (list, tuple)) and all(name in names for name in value)
        return _accept(ok, value, where, f"names out of: {', '.join(names)}", tuple)
    if key == "nproc_per_node":
        is_count = isinstance(value, (int, str)) and not isinstance(value, bool)
        return _accept(is_count, value, where, "a number of processes", str)
    if key == "deep_window":
        text = str(value)
        ok = not isinstance(value, bool) and DEEP_WINDOW.fullmatch(text) is not None
        return _accept(ok, value, where, "STEP, STEP:COUNT with a COUNT of 1 to 5, or auto", str)
    if key == "ranks":
        ok = isinstance(value, (int, str)) and not isinstance(value, bool) and is_choice(str(value))
        return _accept(ok, value, where, "all, first, sample, or ranks such as 0,1,8-15", str)
    is_text = isinstance(value, str) and value != ""
    return _accept(is_text, value, where, "text", str if key == "name" else Path)


def _accept(ok: bool, value: Any, where: str, kind: str, convert: Callable[[Any], Any]) -> Any:
    if not ok:
        raise DiagnoseError(f"{where}: must be {kind}, not {value!r}.")
    return convert(value)
