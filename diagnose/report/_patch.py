"""The fixes that tuning kept, written into the user's script: a unified diff."""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from libcst import ParserSyntaxError

from diagnose.core.profile import Profile
from diagnose.core.trial import Trial
from diagnose.report._patch_edits import Edits, edited
from diagnose.report._tuning_words import named

STATEMENT = "statement"
ADVICE = "advice"
NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """What to change in the script.

    Attributes:
        diff: A unified diff, for `patch -p1` or `git apply`.
        folder: Where to apply it: the folder that was asked for, or one above it that holds all files.
        left_out: What could not be written as a change of the script, one sentence each.
    """

    diff: str
    folder: Path
    left_out: tuple[str, ...] = ()


def patch_of(
    profile: Profile,
    folder: Path,
    ran: Mapping[str, str] = MappingProxyType({}),
    started_in: Path | None = None,
) -> Patch:
    """Writes the settings that tuning kept into the files that the run's objects were made in.

    Args:
        profile: The run.
        folder: Where the diff is to be applied, if all files lie below it.
        ran: Texts of files as they ran. One that has been edited since is left alone: its lines are others.
        started_in: The folder from which the run named its script; `None` for `folder`.

    Raises:
        OSError: If a file of the script can no longer be read.
    """
    edits, left_out = _wanted(profile, folder, started_in or folder)
    diffs = []
    # No tool follows names with `..`.
    top = Path(os.path.commonpath([folder.absolute(), *(path.absolute().parent for path in edits)]))
    for path, wanted in edits.items():
        try:
            before = path.read_bytes().decode()  # a diff has the file's own line ends
            if ran.get(str(path), plain := _with_plain_ends(before)) != plain:
                left_out.append(f"{_relative(path, folder)}: it was edited since; tune it again.")
                continue
            after, failed = edited(before, wanted)
        except (UnicodeDecodeError, ParserSyntaxError) as error:
            why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "it cannot be parsed"
            left_out.append(f"{_relative(path, folder)}: {why}; write the settings by hand.")
            continue
        left_out += [f"{_relative(path, folder)}:{reason}" for reason in failed]
        diffs.append(_diff(before, after, _relative(path, top)))
    return Patch(diff="".join(diffs), folder=top, left_out=tuple(left_out))


def _wanted(profile: Profile, folder: Path, started_in: Path) -> tuple[dict[Path, Edits], list[str]]:
    """What to change in which file, and what has no place in any, one sentence each."""
    edits: defaultdict[Path, Edits] = defaultdict(Edits)
    left_out: list[str] = []
    for trial in profile.tuning.kept if profile.tuning else ():
        if not trial.settings:
            left_out.append(f"{named(trial)} has no setting in the script; use diagnose run --apply.")
        for key, value in trial.settings.items():
            if key == NOTE:
                left_out.append(f"{named(trial)}: {value}.")
            elif key == ADVICE:
                left_out.append(f"{named(trial)} has to be written by hand: {value}")
            elif key == STATEMENT:
                path = _main_file(profile, started_in)
                if path is None:
                    left_out.append(f"{value}: the script's file is not known.")
                else:
                    edits[path].statements.append(value)
            else:
                callee, _, argument = key.partition(".")
                sites = _sites(profile, callee)
                if reason := _no_place(profile, trial, key, sites, folder):
                    left_out.append(f"{key} = {value}: {reason}.")
                else:
                    ((file, line),) = sites
                    edits[Path(file)].arguments.setdefault((line, callee), {})[argument] = value
    return edits, left_out


def _no_place(
    profile: Profile, trial: Trial, key: str, sites: Sequence[tuple[str, int]], folder: Path
) -> str:
    """Says why an argument cannot be set where such objects are made; empty if it can."""
    callee, _, argument = key.partition(".")
    places = [f"{_relative(Path(file), folder)}:{line}" for file, line in sites if file]
    if len(sites) > 1:
        return f"which {callee} needs it is not known ({', '.join(places)})"
    if not places:
        return f"where {callee} is called is not known"
    if callee == "DataLoader" and (others := _of_others(profile)):
        return f"{places[0]} {others}"
    if argument == "prefetch_factor" and not _has_workers(profile, trial):
        return "torch refuses it without workers"
    return ""


def _has_workers(profile: Profile, but: Trial) -> bool:
    """Whether the patched script's loaders have workers, of its own or of another kept fix."""
    kept = profile.tuning.kept if profile.tuning else ()
    given = any("DataLoader.num_workers" in trial.settings for trial in kept if trial is not but)
    return given or any(loader.num_workers for loader in profile.program.loaders)


def _of_others(profile: Profile) -> str:
    """Says what forbids to change the one line that makes the loaders: another loader made there, such as
    that of an evaluation, would be changed, too. Empty if there is none."""
    others = [loader.num_others for loader in profile.program.loaders]
    if None in others:
        return "may make other loaders, too: nobody has counted them"
    return "makes other loaders, too, which were not tried" if any(others) else ""


def _main_file(profile: Profile, started_in: Path) -> Path | None:
    """The file to add a statement to: the script, or, of a module, where its objects are made."""
    script = started_in / profile.run.script
    if script.is_file():
        return script.absolute()
    program = profile.program
    files = [each.file for each in program.optimizers] + [each.file for each in program.loaders]
    return next((Path(file) for file in files if file), None)


def _sites(profile: Profile, callee: str) -> list[tuple[str, int]]:
    """Where such objects are made; an empty file is not known."""
    program = profile.program
    if callee == "DataLoader":
        found = [(loader.file, loader.line) for loader in program.loaders]
    elif callee == "DistributedDataParallel":
        found = [(ddp.file, ddp.line) for ddp in program.ddp]
    else:
        found = [(each.file, each.line) for each in program.optimizers if each.kind == callee]
    return list(dict.fromkeys(found))


def _relative(path: Path, folder: Path) -> str:
    try:
        return os.path.relpath(path, folder)
    except ValueError:  # another drive
        return str(path)


def _with_plain_ends(text: str) -> str:
    """As Python reads a text."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _lines(text: str) -> list[str]:
    """As git sees them: a form feed ends none."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _diff(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
