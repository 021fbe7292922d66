"""The last words: analyses what a run recorded, prints the end block, writes the reports asked for."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.launch import run_folder
from diagnose.launch.record import Record
from diagnose.launch.settings import Settings, is_found_by_name
from diagnose.launch.supervisor import Fate


def conclude(record: Record, settings: Settings, fate: Fate, launcher: Sequence[str] = ()) -> None:
    """Writes the report, and gets in nobody's way: whatever goes wrong here becomes one line on stderr.

    Args:
        record: The run.
        settings: The user's settings.
        fate: How the script ended.
        launcher: The options that the user gave for torchrun.
    """
    if record.folder is None or not record.is_first:
        return
    try:
        with ctrl_c_interrupts():
            _conclude(record, record.folder, settings, fate, launcher)
    except KeyboardInterrupt:
        command = next_command(record.folder) or f"diagnose report {record.folder.name}"
        say(f"diagnose: the report was interrupted; to see it: {command}")
    except (DiagnoseError, OSError) as error:
        say(f"diagnose: no report: {error}")
    except Exception as error:  # noqa: BLE001 - a fault of ours must not become the script's
        where = _keep_traceback(record.folder)
        say(f"diagnose: no report, a bug of ours: {type(error).__name__}: {error}{where}")


def get_ready(record: Record, settings: Settings) -> None:
    """Imports what `conclude` needs, while the script starts: else its user waits for it in the end."""
    if record.folder is not None and record.is_first and _is_read(settings):
        with contextlib.suppress(Exception):  # `conclude` will meet it, and say so
            for module in ("diagnose.analysis.profile", "diagnose.report", "diagnose.rules"):
                importlib.import_module(module)
            sys.modules["diagnose.rules"].built_in()


def _is_read(settings: Settings) -> bool:
    return not settings.quiet or settings.tunes or settings.json is not None or settings.html is not None


def say(text: str) -> None:
    """Prints on stderr; nobody listening there is no error."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def say_notes(record: Record) -> None:
    """Prints what went wrong so far."""
    for note in record.facts["notes"]:
        say(f"diagnose: {note}")


def _conclude(
    record: Record, folder: Path, settings: Settings, fate: Fate, launcher: Sequence[str]
) -> None:
    if not run_folder.has_room(folder):
        place = folder.parent
        record.note(f"{place} has no room left; what was to be recorded after it filled up is missing.")
        record.facts["no_room"] = True
    try:
        record.end(fate)
    except OSError as error:
        say(f"diagnose: {folder / 'run.json'} could not be rewritten: {error.strerror}.")
    if not _is_read(settings):
        return
    from diagnose.analysis.profile import load_profile
    from diagnose.rules import diagnosed
    from diagnose.tuner.kept import FILE as TUNED
    from diagnose.tuner.kept import to_toml

    profile = diagnosed(load_profile(folder))
    if profile.tuning is not None and profile.tuning.kept:
        text = to_toml(profile.tuning.kept, profile.tuning.confirmation, profile.run.script)
        _write(folder / TUNED, text)
    if not settings.quiet and sys.stderr is not None:
        from diagnose.report import Terminal, end_block

        command = next_command(folder)
        if profile.tuning is not None and profile.tuning.kept and settings.apply is None:
            command = _apply_command(record, folder, settings, launcher)
        say("\n" + end_block(profile, Terminal.of(sys.stderr), command=command).rstrip())
    if settings.json is not None:
        from diagnose.report import to_json

        _write(settings.json, json.dumps(to_json(profile), indent=2, allow_nan=False) + "\n")
    if settings.html is not None:
        from diagnose.report import to_html

        _write(settings.html, to_html(profile))


def _apply_command(record: Record, folder: Path, settings: Settings, launcher: Sequence[str]) -> str:
    """Returns the command that runs the same job again with what was kept."""
    words = ["diagnose", "run", "--apply", os.path.relpath(folder / "tuned.toml")]
    for kind in settings.allow:
        words += ["--allow", kind]
    words += [*launcher, *(["-m"] if record.facts["module"] else []), record.facts["script"]]
    return shlex.join([*words, *record.facts["argv"]])


def next_command(folder: Path) -> str | None:
    """Returns what to paste for a run that lies where `diagnose report` does not look; else `None`."""
    if is_found_by_name(folder):
        return None
    return f"diagnose report {shlex.quote(os.path.relpath(folder))} --html report.html"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        say(f"diagnose: {path} could not be written: {error.strerror}.")


def _keep_traceback(folder: Path) -> str:
    try:
        path = folder / "report-error.txt"
        path.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:
        return ""
    return f" (traceback in {path})"


@contextlib.contextmanager
def ctrl_c_interrupts() -> Iterator[None]:
    """Makes Ctrl-C a `KeyboardInterrupt` for a while; where it was ignored from the start it stays so."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
