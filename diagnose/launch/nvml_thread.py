"""Reads one device's driver about once a second, in a thread that nobody waits for."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from diagnose.launch.nvml import Figures, Nvml, Unreadable

EVERY_S = 1.0

QUIET = 10
"""Times the length of a reading that passes before the next: a driver that answers slowly may hold locks
that launching kernels needs, too."""

LAST_WAIT_S = 0.2
"""A call that hangs is left behind at the end; the thread dies with the process."""

LIBRARY = "libnvidia-ml.so.1"


class NvmlThread:
    """The readings of one device.

    A call into the driver may take seconds: then readings are fewer, and nothing else is late.

    Args:
        identity: What the training thread says of its device, see `hooks.device_settings`.

    Attributes:
        note: Why there are no readings, or no more of them, in words; empty while there are.
        spent_ns: CPU time that reading took so far.
        constants: What does not change, once it is read.
    """

    def __init__(self, identity: Mapping[str, Any]) -> None:
        self.note = ""
        self.spent_ns = 0
        self.constants: Figures = {}
        self._identity = identity
        self._latest: Figures | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins reading, where there is something to read.

        The library is loaded here, not in the thread: the caller knows when the process may fork, and a
        child that is forked in the middle of loading a library finds the loader locked for ever.
        """
        try:
            if self._identity.get("hip"):
                raise Unreadable("its driver is not NVIDIA's")
            library = importlib.import_module("pynvml")
            ctypes.CDLL(LIBRARY)
        except ImportError:
            self._give_up("nvidia-ml-py is not installed")
        except (OSError, Unreadable) as error:
            self._give_up(str(error))
        else:
            self._thread = threading.Thread(
                target=self._run, args=(library,), name="diagnose-nvml", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread, unless the driver holds it."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join(LAST_WAIT_S)

    def take(self) -> Figures | None:
        """Returns the last reading, with the time it was taken at; `None` if there is no new one."""
        latest, self._latest = self._latest, None
        return latest

    def _give_up(self, why: str) -> None:
        self.note = f"clocks, power, link and neighbours of the device are not measured: {why}"

    def _run(self, library: Any) -> None:
        try:
            library.nvmlInit()
            device = Nvml(library, self._identity)
            self.constants = device.constants()
            while not self._stop.is_set():
                begun = time.perf_counter()
                self._latest = {"time_ns": time.perf_counter_ns(), **device.read()}
                self.spent_ns = time.thread_time_ns()
                self._stop.wait(max(EVERY_S, QUIET * (time.perf_counter() - begun)))
        except (Unreadable, library.NVMLError) as error:
            self._give_up(str(error))
        except Exception:  # noqa: BLE001 (an error of ours ends the reading, not the script)
            self._give_up(f"an error of our own: {traceback.format_exc(limit=-3).strip()}")
        finally:
            self.spent_ns = time.thread_time_ns()
            with contextlib.suppress(library.NVMLError):
                library.nvmlShutdown()
