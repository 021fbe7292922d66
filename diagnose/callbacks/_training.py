"""What the callbacks have in common: one training is measured from its begin to its end, as one run."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diagnose.core.errors import DiagnoseError
from diagnose.core.profile import Profile
from diagnose.launch import run_folder, session
from diagnose.launch.settings import resolve
from diagnose.launch.torchrun import RanksAtWork
from diagnose.store.runs import check_name

FIRST_RANK = 0

StrPath = str | os.PathLike[str]


class Training:
    """Measures one training after the other in this process. Whatever goes wrong, the training goes on.

    A copy, and what is unpickled in another process, measures nothing until it is told to begin. What the
    user may ask for is said in `MeasuringCallback`.

    Attributes:
        folder: The run's folder of the last training.
        profile: What was found in it: on the first rank, once it has ended.

    Raises:
        DiagnoseError: If the name is none, or the folder of a report is not there: now, not after hours.
    """

    def __init__(
        self,
        *,
        run_dir: StrPath | None = None,
        name: str | None = None,
        html: StrPath | None = None,
        json: StrPath | None = None,
        warmup: int | None = None,
        quiet: bool = False,
        logger: logging.Logger | None = None,
    ) -> None:
        if name is not None:
            check_name(name)
        self.folder: Path | None = None
        self.profile: Profile | None = None
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._name = name
        self._html = _destination("html", html)
        self._json = _destination("json", json)
        self._warmup = warmup
        self._quiet = quiet
        self._logger = logger
        self._rank = FIRST_RANK
        self._ranks: RanksAtWork | None = None
        self._is_on = False
        self._has_said = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ranks": None, "_is_on": False}

    def begin(self, rank: int, world_size: int) -> None:
        """Begins to measure; ends what was measured before and has not ended, because it failed.

        Args:
            rank: Of this process.
            world_size: Number of ranks. They must all call this, once torch's process group is there.
        """
        self.end()
        self._rank = rank
        with self._going_on():
            is_measured = session.is_measured()
            folder = self._folder_of_all(world_size, wanted=not is_measured)
            if is_measured:
                self._say_once(
                    "diagnose: this process is measured already, by diagnose run or diagnose.attach(); "
                    "DiagnoseCallback does nothing."
                )
                return
            self.profile = self.folder = None
            if not folder:
                return  # the first rank has said why, unless no group of processes leads to it
            self.folder = Path(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._ranks = RanksAtWork(self.folder) if world_size > 1 else None
            session.attach(self.folder, warmup=self._warmup)
            self._is_on = True
            # For a training that ends by an exception of which its trainer tells nobody.
            atexit.register(self._end_at_exit)

    def end(self, *, at_exit: bool = False) -> None:
        """Ends the measurement, if one is on; the first rank reports.

        Args:
            at_exit: Whether the interpreter is ending, which starts no threads any more.
        """
        if not self._is_on:
            return
        self._is_on = False
        atexit.unregister(self._end_at_exit)
        with self._going_on():
            session.leave()
            if self._ranks is not None:
                if self._rank == FIRST_RANK:
                    self._ranks.wait_for_others()
                self._ranks.leave()
                self._ranks = None
            if self._rank == FIRST_RANK:
                self._report(alone=at_exit)

    def _end_at_exit(self) -> None:
        self.end(at_exit=True)

    def _folder_of_all(self, world_size: int, *, wanted: bool) -> str:
        """Returns the folder that the first rank makes, if it is wanted there; empty if there is none.

        All ranks are told once, whatever becomes of one of them: the others wait for it.
        """
        folder = ""
        try:
            if wanted and self._rank == FIRST_RANK:
                folder = str(self._new_folder())
        finally:
            if world_size > 1:
                folder = _from_first_rank(folder)
        return folder

    def _new_folder(self) -> Path:
        script = Path(sys.argv[0]).stem if sys.argv else ""
        name = self._name or run_folder.folder_name(time.localtime(), script)
        root = self._run_dir or resolve({}, os.environ, Path.cwd()).run_dir
        try:
            return run_folder.create(root, name)
        except OSError as error:
            folder = run_folder.create(run_folder.temporary_root(), name)
            self._say(f"diagnose: {root} could not be written ({error.strerror}); recording to {folder}.")
            return folder

    def _report(self, *, alone: bool) -> None:
        from diagnose.analysis.profile import load_profile
        from diagnose.launch.ending import next_command
        from diagnose.report import Terminal, end_block, to_html, to_json
        from diagnose.rules import diagnosed

        assert self.folder is not None
        profile = self.profile = diagnosed(load_profile(self.folder, alone=alone))
        if not self._quiet:
            terminal = Terminal.of(sys.stderr) if self._logger is None else Terminal()
            self._say("\n" + end_block(profile, terminal, command=next_command(self.folder)).rstrip())
        if self._json is not None:
            self._json.write_text(json.dumps(to_json(profile), indent=2, allow_nan=False) + "\n", "utf-8")
        if self._html is not None:
            self._html.write_text(to_html(profile), encoding="utf-8")

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except (DiagnoseError, OSError) as error:
            self._say(f"diagnose: this training is not measured, or not reported: {error}")
        except Exception:  # noqa: BLE001 (a fault of ours must not become the training's)
            self._say(f"diagnose: a bug of ours; the training goes on:\n{traceback.format_exc().rstrip()}")

    def _say(self, text: str) -> None:
        if self._logger is not None:
            self._logger.info(text)
        elif sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)

    def _say_once(self, text: str) -> None:
        if not self._has_said and self._rank == FIRST_RANK and not self._quiet:
            self._say(text)
        self._has_said = True


def _destination(form: str, given: StrPath | None) -> Path | None:
    """Returns where to write a report, once it is sure that its folder is there."""
    path = None if given is None else Path(given)
    if path is not None and not path.absolute().parent.is_dir():
        raise DiagnoseError(
            f"DiagnoseCallback: cannot write {form} {path}: there is no folder {path.absolute().parent}."
        )
    return path


def _from_first_rank(text: str) -> str:
    """Returns the first rank's text on every rank; this rank's own where there is no process group."""
    distributed: Any = sys.modules["torch"].distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return text
    box = [text]
    broadcast: Callable[..., None] = distributed.broadcast_object_list
    broadcast(box, src=FIRST_RANK)
    return box[0]


class MeasuringCallback:
    """What each `DiagnoseCallback` is made with, and tells.

    Args:
        run_dir: Folder that holds the runs. Default: that of `diagnose run`, `.diagnose/runs`.
        name: Name of the run. Default: time and script. A second training gets `-2`, and so on.
        html: Write the report there as HTML.
        json: Write the report there as JSON.
        warmup: Leave the first steps out of every figure. Default: decided by the analysis.
        quiet: Print no report.
        logger: Takes the report instead of stderr.

    Raises:
        DiagnoseError: If a report could not be written there, or the name is none.
    """

    def __init__(
        self,
        *,
        run_dir: StrPath | None = None,
        name: str | None = None,
        html: StrPath | None = None,
        json: StrPath | None = None,
        warmup: int | None = None,
        quiet: bool = False,
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__()
        self._training = Training(
            run_dir=run_dir, name=name, html=html, json=json, warmup=warmup, quiet=quiet, logger=logger
        )

    @property
    def profile(self) -> Profile | None:
        """What was found in the last training that ended, on the first rank."""
        return self._training.profile
