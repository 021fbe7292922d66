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

from diagnose.core.ledger import COLUMNS
from diagnose.hooks._imports import after_import
from diagnose.launch import vitals

if TYPE_CHECKING:
    from diagnose.core.profile import Profile
    from diagnose.hooks._recorder import Recorder

FLUSH_EVERY_S = 0.5
"""At most this much is lost when the process is killed."""

FLUSH_STEPS = 500
"""Steps packed into one chunk: packing holds the interpreter lock, so in small pieces."""

LONGEST_FLUSH_S = 1.0
"""So long a fork waits for a flush to end; a disk that takes longer must not hold the script up."""


class Session:
    """One process's measurement.

    Args:
        folder: The run's folder.
        steps: Stop measuring after this many steps; 0 measures to the end.
        stop_after: End the script cleanly after this many steps; 0 lets it end by itself.
        warmup: Leading steps to leave out of the figures; `None` lets the analysis decide.

    Attributes:
        startup_ns: Time taken so far by installing everything.
    """

    def __init__(
        self, folder: Path, *, steps: int = 0, stop_after: int = 0, warmup: int | None = None
    ) -> None:
        self.folder = folder
        self.startup_ns = 0
        self.lost = ""
        self._new_recorder = functools.partial(_recorder, steps, stop_after, warmup)
        self._hooks = ExitStack()
        self._off: list[str] = []
        self._recorder: Any = None
        self._sampler: Any = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._flushing = threading.RLock()
        self._writer: Any = None
        self._flusher_ns = 0
        self._flushes = 0
        self._sites = 0
        self._span_ns = 0.0
        self._finished = False

    # -- beginning

    def install(self) -> None:
        """Installs every hook whose part of torch is imported, and the others when it will be."""
        begun = time.perf_counter_ns()
        from diagnose import hooks
        from diagnose.core.plugins import discover
        from diagnose.hooks._sampler import Sampler
        from diagnose.hooks.base import Hook, calibrate

        self._recorder = self._new_recorder()
        self._recorder.on_begin = self._begin
        self._sampler = Sampler(self._recorder)
        for name, hook in discover(hooks, Hook).items():
            if hook.requires in sys.modules:
                self._install(name, hook)
            else:
                cancel = after_import(hook.requires, functools.partial(self._install, name, hook))
                self._hooks.callback(cancel)
        self._span_ns = calibrate()
        self._say_torch_is_here()
        self._hooks.callback(after_import("torch._dynamo.eval_frame", self._keep_out_of_dynamo))
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._forked
        )
        self.startup_ns += time.perf_counter_ns() - begun

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
        self._thread = threading.Thread(target=self._flush_forever, name="diagnose-flusher", daemon=True)
        self._thread.start()
        if "multiprocessing.util" in sys.modules and sys.modules["multiprocessing"].parent_process():
            # A child of multiprocessing may leave without running atexit; its own finalizers do run.
            sys.modules["multiprocessing.util"].Finalize(None, self.finish, exitpriority=100)

    def _before_fork(self) -> None:
        # A child forked while the flusher is inside SQLite or an import finds their locks held for ever.
        self._flushing.acquire(timeout=LONGEST_FLUSH_S)

    def _after_fork(self) -> None:
        with contextlib.suppress(RuntimeError):  # not ours: the flush took too long to wait for
            self._flushing.release()

    def _forked(self) -> None:
        """In a forked child: nothing of the parent's measurement is the child's."""
        self._flushing = threading.RLock()
        if self._finished:
            return
        self._recorder.reset()
        self._recorder.thread = threading.get_ident()
        self._sampler.disarm()
        self._wake = threading.Event()
        self._thread = None
        self._writer = None
        self._flusher_ns = 0
        self._flushes = 0

    # -- flushing, in a thread of its own

    def _flush_forever(self) -> None:
        with self._flushing:
            import sqlite3

        wake = self._wake
        while True:
            stop = wake.wait(FLUSH_EVERY_S)
            begun = time.thread_time_ns()
            try:
                with self._flushing:
                    self._flush(last=stop)
            except (sqlite3.Error, OSError) as error:
                self._lose(error)
            except Exception:  # noqa: BLE001 (an error of ours ends the measuring, not the script)
                self.lost = f"an error of our own: {traceback.format_exc().strip()}"
                self._recorder.thread = 0
                return
            if self._flushes:
                self._flusher_ns += time.thread_time_ns() - begun
            elif self._writer is not None:
                self.startup_ns += time.thread_time_ns() - begun  # imports, and the making of the file
            self._flushes += self._writer is not None
            if stop:
                return

    def _lose(self, error: Exception) -> None:
        """The disk takes no more: measuring stops, the script goes on."""
        safe = self._writer.safe_steps if self._writer is not None else 0
        self.lost = f"{error}; records after step {safe} are lost"
        self._recorder.thread = 0
        while self._recorder.take_rows(FLUSH_STEPS):
            pass

    def _flush(self, *, last: bool) -> None:
        from diagnose.hooks import _worker
        from diagnose.store.writer import Writer

        if self.lost:
            return
        recorder = self._recorder
        self._sampler.vary()
        if self._writer is None:
            if not recorder.has_rows():
                return  # a helper process that never finishes a step leaves no file
            self._writer = Writer(self.folder, int(os.environ.get("RANK") or 0))
            self._writer.set_meta(_facts(self._writer.journal))
        writer = self._writer
        if not last:
            recorder.rotate_due = True  # the training thread hands its bucket over at the end of the step
        while rows := recorder.take_rows(FLUSH_STEPS):
            writer.add_steps(rows)
        while recorder.buckets:
            first_step, samples = recorder.buckets.popleft()
            items = list(samples.items())
            writer.add_samples(first_step, [(key[0], _worker.frames(key[1:]), ns) for key, ns in items])
        writer.add_events([recorder.events.popleft() for _ in range(len(recorder.events))])
        if last or len(recorder.sites) != self._sites:
            self._sites = len(recorder.sites)
            writer.add_sites(_resolved_sites(dict(recorder.sites)))
        if recorder.thread:
            writer.add_vitals(time.perf_counter_ns(), recorder.steps, vitals.read(recorder.thread))
        for report in _worker.inbox.receive():
            writer.add_worker(report)
        state = {
            "steps": recorder.steps,
            "counters": dict(recorder.counters),
            "facts": dict(recorder.facts),
            "notes": [*self._off, *recorder.notes, *filter(None, [self._sampler.missing])],
            "startup_ns": self.startup_ns,
            "span_ns": self._span_ns,
            "sampler_ns": self._sampler.cost_ns,
            "samples": self._sampler.count,
            "flusher_ns": self._flusher_ns,
            "updated_unix": time.time(),
            "finished": last,
        }
        writer.set_meta({"state": state})
        if last:
            error = getattr(sys, "last_type", None)
            writer.set_meta({"error": error.__name__ if error is not None else None})
            writer.close()
        else:
            writer.commit()

    # -- ending

    def finish(self) -> None:
        """Ends the measurement: closes the last step, writes what is left, takes every hook out."""
        if self._finished:
            return
        self._finished = True
        recorder = self._recorder
        if recorder is None:
            return
        recorder.guarded(recorder.finish)
        self._sampler.stop()
        if self._thread is not None:
            self._wake.set()
            self._thread.join()
        self._hooks.close()
        from diagnose.hooks import _worker

        _worker.inbox.close()
        if self.lost:
            print(f"diagnose: {self.lost}.", file=sys.stderr, flush=True)


def _recorder(steps: int, stop_after: int, warmup: int | None) -> Recorder:
    from diagnose.hooks._recorder import Recorder

    return Recorder(max_steps=steps, stop_after=stop_after, warmup=warmup)


def _facts(journal: str) -> dict[str, Any]:
    """What the process knows of itself once it trains."""
    torch: Any = sys.modules["torch"]
    cuda_in_use = torch.cuda.is_initialized()
    return {
        "columns": COLUMNS,
        "rank": int(os.environ.get("RANK") or 0),
        "world_size": int(os.environ.get("WORLD_SIZE") or 1),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "torch": str(torch.__version__),
        "device": "cuda" if cuda_in_use else "cpu",
        "device_name": torch.cuda.get_device_name() if cuda_in_use else "",
        "python": sys.version.split()[0],
        "num_threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine_cpus": os.cpu_count(),
        "journal": journal,
        "anchor_ns": [time.perf_counter_ns(), time.time_ns()],
    }


def _resolved_sites(sites: dict[tuple[str, int, int], int]) -> list[tuple[str, str, int, str, int]]:
    from diagnose.hooks._frames import resolve

    merged: dict[tuple[str, str, int, str], int] = {}
    for (kind, code, instruction), calls in sites.items():
        key = (kind, *resolve(code, instruction))
        merged[key] = merged.get(key, 0) + calls
    return [(*key, calls) for key, calls in merged.items()]


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
        RuntimeError: If this process is measured already.
    """
    global _session
    if _session is not None:
        raise RuntimeError("this process is measured already; call diagnose.detach() first")
    import torch  # noqa: F401

    folder = Path(run_dir) if run_dir is not None else Path(tempfile.mkdtemp(prefix="diagnose-"))
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "schema": 1,
        "id": folder.name,
        "name": folder.name,
        "script": sys.argv[0] if sys.argv else "",
        "module": False,
        "argv": sys.argv[1:],
        "cwd": os.getcwd(),
        "python": sys.executable,
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "started_unix": time.time(),
        "warmup": warmup,
        "notes": [],
    }
    (folder / "run.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    session = Session(folder, warmup=warmup)
    session.install()
    atexit.register(session.finish)
    _session = session
    return folder


def detach() -> Profile:
    """Ends the measurement that `attach` began, takes every hook out and returns what was found.

    Raises:
        RuntimeError: If `attach` was not called.
    """
    global _session
    if _session is None:
        raise RuntimeError("this process is not measured; call diagnose.attach() first")
    session, _session = _session, None
    session.finish()
    atexit.unregister(session.finish)
    from diagnose.analysis.profile import load_profile

    return load_profile(session.folder)


def step() -> None:
    """Marks the end of a training step in a loop whose optimizer is not of `torch.optim`.

    Does nothing in a process that is not measured, so it can stay in the script.
    """
    if _session is not None:
        recorder = _session._recorder
        if recorder.on_training_thread():
            recorder.guarded(recorder.step_marked)


def run_session(spent_ns: int) -> None:
    """Begins the measurement that `diagnose run` asked for by environment, once torch is imported.

    Args:
        spent_ns: Time already spent at start-up.
    """
    global _session

    def number(name: str) -> int | None:
        value = os.environ.get(name)
        return int(value) if value else None

    session = Session(
        Path(os.environ["DIAGNOSE_RUN"]),
        steps=number("DIAGNOSE_STEPS") or 0,
        stop_after=number("DIAGNOSE_STOP_AFTER") or 0,
        warmup=number("DIAGNOSE_WARMUP"),
    )
    _session = session
    session.startup_ns += spent_ns
    atexit.register(session.finish)
    after_import("torch", session.install)
