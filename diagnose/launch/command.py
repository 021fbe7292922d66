"""The command line and the environment that the script is started with."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.launch.rank_choice import ALL
from diagnose.launch.settings import Settings

BOOT_FOLDER = Path(__file__).parent / "boot"
OURS = Path(__file__).resolve().parents[1]
INTERPRETER = re.compile(r"python[\d.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to run, as the user typed it.

    Attributes:
        script: Path of the script, folder or zip file, or the name of the module.
        is_module: Whether `script` is a module's name, as after `python -m`.
        arguments: The script's own arguments.
    """

    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The script in a word, for the name of the run: `train` of `jobs/train.py` and of `jobs.train`."""
        return self.script.rpartition(".")[2] if self.is_module else Path(self.script).stem

    def check(self) -> None:
        """Refuses what cannot be a script: a file that is not there, an interpreter, a notebook.

        Likewise a script that would import our package in the place of one of its own. Whatever else may be
        wrong with it, Python says itself, in its own words.

        Raises:
            DiagnoseError: Says what was probably meant.
        """
        path = Path(self.script)
        if self.is_module or self.script == "-":
            return
        if INTERPRETER.fullmatch(path.name) and self.arguments and not (path / "__main__.py").exists():
            meant = shlex.join(["diagnose", "run", *self.arguments])
            raise DiagnoseError(f"diagnose: leave {self.script!r} out: {meant}")
        if os.path.lexists(self.script):
            if path.suffix == ".ipynb":
                raise DiagnoseError(
                    f"diagnose: {self.script!r} is a notebook: in it, diagnose.attach('runs/first'), "
                    "train, profile = diagnose.detach(); then: diagnose report runs/first"
                )
            return
        raise DiagnoseError(
            f"diagnose: cannot open {self.script!r}: no such file.{self._what_was_meant(path)}"
        )

    def namesake(self) -> str | None:
        """Says what is called as our package is, and lies where the script would import it from: whoever
        imports that gets ours. `None` where nothing is."""
        if getattr(sys.flags, "safe_path", False):  # Python does not look there
            return None
        path = Path(self.script)
        is_named = self.is_module or self.script == "-"
        folder = Path() if is_named else path if path.is_dir() else Path(os.path.realpath(path)).parent
        # The script itself may have that name: nobody imports it.
        harmless = {OURS, *([] if is_named else [Path(os.path.realpath(path))])}
        for other, inside in ((folder / OURS.name, "__init__.py"), (folder / f"{OURS.name}.py", "")):
            if (other / inside).is_file() and Path(os.path.realpath(other)) not in harmless:
                return (
                    f"{other} has our package's name: a script that imports it gets ours in its place "
                    "here. Rename it."
                )
        return None

    def _what_was_meant(self, path: Path) -> str:
        if path.name == "torchrun":
            return " Put it in front: torchrun ... -m diagnose run SCRIPT"
        if "." in self.script and Path(self.script.replace(".", os.sep) + ".py").exists():
            return f" Did you mean 'diagnose run -m {self.script}'?"
        import difflib  # only to explain a mistake

        try:
            names = [each.name for each in path.parent.iterdir() if each.suffix == ".py" or each.is_dir()]
        except OSError:
            names = []
        close = difflib.get_close_matches(path.name, names, n=1)
        return f" Did you mean {str(path.parent / close[0])!r}?" if close else ""

    def command(self, launcher: Sequence[str]) -> list[str]:
        """Returns the command that runs this under the interpreter, and the flags, that run us.

        Args:
            launcher: What stands between interpreter and script: torchrun and its options, or nothing.
        """
        module = ["-m"] if self.is_module else []
        return [sys.executable, *interpreter_flags(), *launcher, *module, self.script, *self.arguments]


def interpreter_flags() -> list[str]:
    """Returns the flags given to our own interpreter: `-u -X dev` of `python -u -X dev -m diagnose`."""
    given = list(sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1])
    if given:
        given.pop()  # our script, or what -m or -c names
    if given and (switch := re.fullmatch(r"(-\w*)[mc]", given[-1])):
        given[-1:] = [switch[1]] if switch[1] != "-" else []
    return given


def environment(environ: Mapping[str, str], settings: Settings, folder: Path | None) -> dict[str, str]:
    """Returns the environment that makes the script's process record into `folder`, else unchanged.

    Without a folder nothing is recorded, nor into the folder of a run that this one is part of.
    """
    child = dict(environ)
    if folder is None:
        child.pop("DIAGNOSE_RUN", None)
        return child
    earlier = child.get("PYTHONPATH", "")
    # An empty entry would mean the current folder.
    child["PYTHONPATH"] = f"{BOOT_FOLDER}{os.pathsep}{earlier}" if earlier else str(BOOT_FOLDER)
    child["DIAGNOSE_RUN"] = str(folder)
    child["DIAGNOSE_SUPERVISOR"] = str(os.getpid())
    for name in ("steps", "stop_after", "warmup", "deep_window"):
        variable = f"DIAGNOSE_{name.upper()}"
        child.pop(variable, None)
        value = getattr(settings, name)
        if value is not None:
            child[variable] = str(value)
    child.pop("DIAGNOSE_RANKS", None)
    if settings.ranks != ALL:
        child["DIAGNOSE_RANKS"] = settings.ranks
    child.pop("DIAGNOSE_TUNING", None)
    if settings.tunes:
        child["DIAGNOSE_TUNING"] = json.dumps(
            {
                "allow": settings.allow,
                "only": settings.only,
                "skip": settings.skip,
                "dry_run": settings.dry_run,
                "apply": str(settings.apply.absolute()) if settings.apply else None,
            }
        )
    return child


def why_blind() -> str | None:
    """Says why a script started with our interpreter's flags cannot be measured; `None` if it can be."""
    flags = [
        name
        for name, is_set in (
            ("-I", sys.flags.isolated),
            ("-E", sys.flags.ignore_environment and not sys.flags.isolated),
            ("-S", sys.flags.no_site),
        )
        if is_set
    ]
    if not flags:
        return None
    return (
        f"python {' '.join(flags)} keeps diagnose out of the script; nothing is measured. "
        "Leave the flag out, or call diagnose.attach() in the script."
    )
