"""Measures this process: hooks in, records out to the store, and all of it out again."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnose.hooks._imports import after_import
from diagnose.launch.flusher import Flusher
from diagnose.launch.place import doubt_about, place_of
from diagnose.launch.run_folder import write_manifest
from diagnose.store.runs import rank_files, read_manifest

if TYPE_CHECKING:
    from diagnose.core.profile import Profile
    from diagnose.launch.deep_window import DeepWindows
    from diagnose.launch.tuning import LiveTuning


class Session:
    """One process's measurement.

    Args:
        folder: The run's folder.
        steps: Stop measuring after this many steps; 0 measures to the end.
        stop_after: End the script cleanly after this many steps; 0 lets it end by itself.

    Attributes:
        startup_ns: Time taken by installing everything.
    """

    def __init__(self, folder: Path, *, steps: int = 0, stop_after: int = 0) -> None:
        self.folder = folder
        self.startup_ns = 0
        self._limits = {"max_steps": steps, "stop_after": stop_after}
        self._hooks = ExitStack()
        self._off: list[str] = []
        self._recorder: Any = None
        self._sampler: Any = None
        self._flusher: Any = None
        self._span_ns = 0.0
        self._tuning: LiveTuning | None = None
        self._deep: DeepWindows | None = None
        self._takes_commands = False
        self._parent_tunes = False
        self._finished = False

    @property
    def rank(self) -> int:
        """Which rank of its job this process is, as far as it is known by now. Needs `install`."""
        return place_of(self._recorder.facts)[0]

    # -- beginning

    def install(self) -> None:
        """Installs every hook whose part of torch is imported, and the others when it will be."""
        begun = time.perf_counter_ns()
        from diagnose import hooks
        from diagnose.core.plugins import discover
        from diagnose.hooks._recorder import Recorder
        from diagnose.hooks._sampler import Sampler
        from diagnose.hooks._span_cost import calibrate
        from diagnose.hooks.base import Hook

        self._recorder = Recorder(**self._limits)
        self._recorder.on_begin = self._begin
        self._sampler = Sampler(self._recorder)
        self._flusher = Flusher(self.folder, self._recorder, self._sampler, self._state)
        for name, hook in discover(hooks, Hook).items():
            if hook.requires in sys.modules:
                self._install(name, hook)
            else:
                cancel = after_import(hook.requires, functools.partial(self._install, name, hook))
                self._hooks.callback(cancel)
        self._span_ns = calibrate()
        self._recorder.guarded(self._begin_tuning)
        self._recorder.guarded(self._begin_deep_windows)
        self._say_torch_is_here()
        self._hooks.callback(after_import("torch._dynamo.eval_frame", self._keep_out_of_dynamo))
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=lambda: self._flusher.after_fork(),
            after_in_child=self._forked,
        )
        self.startup_ns += time.perf_counter_ns() - begun

    def _begin_tuning(self) -> None:
        asked = os.environ.get("DIAGNOSE_TUNING")
        if asked:
            from diagnose.launch.tuning import LiveTuning

            self._tuning = LiveTuning(self._recorder, self.folder, json.loads(asked))

    def _begin_deep_windows(self) -> None:
        """Of all ranks the first alone takes windows."""
        if self.rank:
            return
        from diagnose.launch.deep_window import DeepWindows
        from diagnose.launch.deep_window_profiler import stepping_aside

        option = os.environ.get("DIAGNOSE_DEEP_WINDOW", "")
        deep = self._deep = DeepWindows(self._recorder, self.folder, option)
        self._hooks.enter_context(stepping_aside(deep.script_begins, deep.script_prepared))
        self._recorder.looks.flushed.append(deep.look)

    def _say_torch_is_here(self) -> None:
        """Leaves torch's version in the run's folder, for the report of a script that never trains."""
        if os.environ.get("DIAGNOSE_SUPERVISOR") == str(os.getppid()):
            version = str(sys.modules["torch"].__version__)
            with contextlib.suppress(OSError):
                (self.folder / "torch").write_text(version, encoding="utf-8")

    def _install(self, name: str, hook: Any) -> None:
        if self._finished:
            return
        try:
            self._hooks.enter_context(hook.install(self._recorder))
        except (AttributeError, ImportError) as error:
            # The message quotes the missing name first when an import fails.
            names = re.findall(r"'(\w+)'", str(error))
            missing = error.name if isinstance(error, AttributeError) else names[0] if names else None
            self._off.append(f"{name} is not measured: this torch has no {missing or error}")
        except Exception as error:  # noqa: BLE001 (a hook that cannot install is reported, the script goes on)
            detail = traceback.format_exc(limit=-2).strip()
            self._off.append(f"{name} is not measured: {type(error).__name__} at installation\n{detail}")

    def _keep_out_of_dynamo(self) -> None:
        from diagnose.hooks.base import keep_out_of_dynamo

        try:
            keep_out_of_dynamo()
            from torch._C._dynamo.eval_frame import set_eval_frame

            self._sampler.set_eval_frame = set_eval_frame
        except ImportError as error:
            self._off.append(f"torch.compile may count frames of ours as compilations: {error}")

    def _begin(self) -> None:
        """The first training event in this process."""
        self._sampler.start()
        self._take_commands()
        self._flusher.start()
        if "multiprocessing.util" in sys.modules and sys.modules["multiprocessing"].parent_process():
            # A child of multiprocessing may leave without running atexit; its own finalizers do run.
            sys.modules["multiprocessing.util"].Finalize(None, self.finish, exitpriority=100)

    def _take_commands(self) -> None:
        """Lets a dashboard control this process: the first rank, which decides for all.

        A forked child that trains would take what is meant for the tuner of its parent.
        """
        if self.rank or self._parent_tunes:
            return
        from diagnose.launch.control import Inbox

        tuning, deep = self._tuning, self._deep
        if tuning is not None and deep is not None:
            tuning.window = deep.turn
        inbox = Inbox(
            self.folder,
            self._recorder.event,
            tuning.command if tuning is not None else None,
            deep.ask if deep is not None else None,
        )
        self._recorder.looks.flushed.append(inbox.look)
        self._takes_commands = True

    def _state(self) -> dict[str, Any]:
        """What is known of this session besides its records."""
        return {
            "notes": [
                *self._off,
                *self._recorder.notes,
                *filter(None, [self._sampler.missing, doubt_about(os.environ)]),
            ],
            "startup_ns": self.startup_ns + self._flusher.setup_ns,
            "span_ns": self._span_ns,
            "takes_commands": self._takes_commands,
            **(self._tuning.loss.record() if self._tuning is not None else {}),
        }

    def _before_fork(self) -> None:
        if self._deep is not None:
            self._recorder.guarded(self._deep.before_fork)
        self._flusher.before_fork()

    def _forked(self) -> None:
        """In a forked child: nothing of the parent's measurement is the child's."""
        if self._finished:
            return
        self._parent_tunes = self._parent_tunes or self._tuning is not None
        self._tuning = None
        if self._deep is not None:
            self._deep.forget()
        self._takes_commands = False
        self._recorder.reset()
        self._recorder.thread = threading.get_ident()
        self._sampler.disarm()
        self._flusher = Flusher(self.folder, self._recorder, self._sampler, self._state)

    # -- ending

    def finish(self) -> None:
        """Ends the measurement: closes the last step, writes what is left, takes every hook out."""
        if self._finished:
            return
        self._finished = True
        recorder = self._recorder
        if recorder is None:
            return
        if self._deep is not None:
            recorder.guarded(self._deep.finish)
        if self._tuning is not None:
            recorder.guarded(self._tuning.finish)
        training_thread = recorder.thread
        recorder.guarded(recorder.finish)
        self._sampler.stop()
        self._flusher.stop(training_thread)
        self._hooks.close()
        if self._flusher.lost:
            print(f"diagnose: {self._flusher.lost}.", file=sys.stderr, flush=True)


# -- the three functions of `import diagnose`

_session: Session | None = None


def attach(run_dir: str | Path | None = None, *, warmup: int | None = None) -> Path:
    """Begins measuring in this process: for a notebook, a debugger or `python -I`.

    Args:
        run_dir: The folder to record to, made if need be. Default: a new folder in the temporary directory.
        warmup: Leading steps to leave out of the figures. Default: decided by the analysis.

    Returns:
        The run's folder.

    Raises:
        RuntimeError: If this process is measured already, or the folder holds a run that has ended or died.
    """
    global _session
    if _session is not None:
        raise RuntimeError("this process is measured already; call diagnose.detach() first")
    import torch

    # The script may change its folder.
    folder = Path(run_dir).absolute() if run_dir is not None else Path(tempfile.mkdtemp(prefix="diagnose-"))
    if _is_over(folder):
        raise RuntimeError(f"{folder} holds an earlier run; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "id": folder.name,
        "name": folder.name,
        "script": sys.argv[0] if sys.argv else "",
        "module": False,
        "argv": sys.argv[1:],
        "cwd": os.getcwd(),
        "python": sys.executable,
        "torch": str(torch.__version__),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "started_unix": time.time(),
        "warmup": warmup,
        "notes": [],
    }
    session = Session(folder)
    session.install()
    if not session.rank:
        write_manifest(folder, manifest)
    atexit.register(session.finish)
    _session = session
    return folder


def _is_over(folder: Path) -> bool:
    """Whether a folder's run goes on no more, so that this process cannot be a rank of it."""
    if read_manifest(folder).get("ended_unix"):  # empty while another rank is writing it
        return True
    from diagnose.core.liveness import State
    from diagnose.launch.torchrun import is_restarted, launched_unix
    from diagnose.store.liveness import liveness

    launched = launched_unix(os.environ)
    is_of_this_launch = launched is not None and launched < read_manifest(folder).get("started_unix", 0)
    if not rank_files(folder) or is_of_this_launch or is_restarted(os.environ):
        return False
    return liveness(folder).state in (State.ENDED, State.GONE)


def is_measured() -> bool:
    """Whether this process is measured, by `diagnose run` or by `attach`."""
    return _session is not None


def leave() -> Path:
    """Ends the measurement that `attach` began, takes every hook out and returns the run's folder.

    Raises:
        RuntimeError: If `attach` was not called.
    """
    global _session
    if _session is None:
        raise RuntimeError("this process is not measured; call diagnose.attach() first")
    session, _session = _session, None
    session.finish()
    atexit.unregister(session.finish)
    manifest = read_manifest(session.folder)
    if manifest and not session.rank:
        # No exit code: what becomes of the process is not known yet.
        with contextlib.suppress(OSError):
            write_manifest(session.folder, {**manifest, "ended_unix": time.time()})
    return session.folder


def detach() -> Profile:
    """Ends the measurement that `attach` began, takes every hook out and returns what was found.

    Raises:
        RuntimeError: If `attach` was not called.
    """
    folder = leave()
    from diagnose.analysis.profile import load_profile
    from diagnose.rules import diagnosed

    return diagnosed(load_profile(folder))


def step() -> None:
    """Marks the end of a training step in a loop whose optimizer is not of `torch.optim`.

    Does nothing in a process that is not measured, so it can stay in the script.
    """
    recorder = _session._recorder if _session is not None else None
    if recorder is not None and recorder.on_training_thread():  # there is none before torch is imported
        recorder.guarded(recorder.step_marked)


def run_session(spent_ns: int) -> None:
    """Begins the measurement that `diagnose run` asked for by environment, once torch is imported.

    Args:
        spent_ns: Time already spent at start-up.
    """
    global _session

    def number(name: str) -> int:
        return int(os.environ.get(name) or 0)

    session = Session(
        Path(os.environ["DIAGNOSE_RUN"]),
        steps=number("DIAGNOSE_STEPS"),
        stop_after=number("DIAGNOSE_STOP_AFTER"),
    )
    _session = session
    session.startup_ns += spent_ns
    atexit.register(session.finish)

    def install() -> None:
        try:
            session.install()
        except Exception as error:  # noqa: BLE001 (the script imports torch, and is to have it)
            session.finish()
            print(f"diagnose: this process is not measured: {error!r}", file=sys.stderr)

    after_import("torch", install)
