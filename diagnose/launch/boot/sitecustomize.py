"""The first code that runs in a script started by `diagnose run`: Python imports it by its name.

It must never fail, import nothing heavy, and hide itself: the script sees the `sys.path` and the
`sitecustomize` that it would see without us.
"""

import os
import sys
import time


def _chain(here: str) -> None:
    """Imports the `sitecustomize` that ours has hidden, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    mine = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    sys.modules.setdefault("sitecustomize", mine)  # the import system looks for it there


def _die_with(supervisor: int) -> None:
    """Asks the kernel to end this process with the supervisor, so that no orphan trains on (Linux)."""
    if supervisor != os.getppid() or not sys.platform.startswith("linux"):
        return
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != supervisor:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def _boot() -> None:
    begun = time.perf_counter_ns()
    here = os.path.dirname(os.path.abspath(__file__))
    folder = os.environ.get("DIAGNOSE_RUN")
    if folder:
        try:
            _die_with(int(os.environ.get("DIAGNOSE_SUPERVISOR") or 0))
            try:
                from diagnose.launch import rank_choice, session
            except ModuleNotFoundError:
                # A checkout that is not installed: the package is three folders up.
                root = os.path.dirname(os.path.dirname(os.path.dirname(here)))
                sys.path.append(root)
                try:
                    from diagnose.launch import rank_choice, session
                finally:
                    sys.path.remove(root)
            if rank_choice.records(os.environ.get("DIAGNOSE_RANKS", ""), os.environ):
                session.run_session(time.perf_counter_ns() - begun)
        except Exception as error:  # noqa: BLE001 (the user's job outranks ours)
            print(f"diagnose: this process is not measured: {error!r}", file=sys.stderr)
    _chain(here)


_boot()
