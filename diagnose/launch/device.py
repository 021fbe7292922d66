"""The readings of the device that the script trains on: its allocator's and its driver's."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from diagnose.hooks import _allocator as allocator
from diagnose.launch.nvml_thread import NvmlThread


class DeviceReadings:
    """Reads one process's device, from when the training thread has said which it is. Of one thread."""

    def __init__(self) -> None:
        self._setup_ns = 0
        self._identity: Mapping[str, Any] | None = None
        self._driver: NvmlThread | None = None

    def read(self, facts: dict[str, Any]) -> Mapping[str, Any]:
        """Reads what is new.

        Args:
            facts: What hooks have learnt; gets `nvml`, the figures of the device that do not change.

        Returns:
            `allocator` and `device`, see `allocator.read` and `nvml.Nvml.read`; what is absent is not
            measured.
        """
        if self._identity is None:
            self._identity = facts.get("device")
            if self._identity is None:
                return {}
            begun = time.thread_time_ns()
            self._driver = NvmlThread(self._identity)
            self._driver.start()
            self._setup_ns = time.thread_time_ns() - begun
        assert self._driver is not None
        if self._driver.constants:
            facts["nvml"] = self._driver.constants
        kinds = {"allocator": allocator.read(self._identity["index"]), "device": self._driver.take()}
        return {kind: figures for kind, figures in kinds.items() if figures}

    def take_setup_ns(self) -> int:
        """Returns, once, the CPU time that beginning took in the caller's thread: an import, mostly."""
        setup_ns, self._setup_ns = self._setup_ns, 0
        return setup_ns

    @property
    def notes(self) -> list[str]:
        """What is not measured, in words."""
        return [self._driver.note] if self._driver is not None and self._driver.note else []

    @property
    def spent_ns(self) -> int:
        """CPU time of reading the driver."""
        return self._driver.spent_ns if self._driver is not None else 0

    def stop(self) -> None:
        """Ends the reading of the driver."""
        if self._driver is not None:
            self._driver.stop()
