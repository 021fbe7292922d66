"""What is copied between host and device, looked at in the first steps, in which the hooks look around."""

from __future__ import annotations

import sys
import weakref
from time import perf_counter_ns
from typing import Any

from diagnose.hooks._curious import CURIOUS_UNTIL
from diagnose.hooks._frames import resolve, user_frame
from diagnose.hooks._recorder import Recorder

Site = tuple[int, int]
"""Code and instruction of the user's that copies."""

SENT = ("calls", "bytes", "ns", "pageable_bytes", "constant_bytes", "constant_ns")
FETCHED = ("calls", "bytes", "ns", "charged_bytes")
"""The last are those whose time is charged to `copy`."""

REMEMBERED = 256
"""Tensors sent in one step that are looked for in the next."""


class Copies:
    """Tallies of the copies that the loop makes.

    The first step, in which things settle, is left out; so are the single later steps in which the hooks
    look around, because a tensor is the same as in the step before only where both are looked at.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._step = 0
        self._open: dict[tuple[str, Site | None], list[int]] = {}
        self._whole: dict[tuple[str, Site | None], list[int]] = {}
        self._now: dict[tuple[int, int, int], tuple[weakref.ref[Any], int]] = {}
        self._before: dict[tuple[int, int, int], tuple[weakref.ref[Any], int]] = {}

    @property
    def looks(self) -> bool:
        """Whether this step's copies are tallied."""
        return 0 < self._recorder.steps < CURIOUS_UNTIL

    def sent(self, tensor: Any, begun_ns: int, pinned: bool) -> None:
        """A tensor has been sent to the device.

        Args:
            begun_ns: When the call began.
            pinned: Whether it lies in page-locked memory.
        """
        ns, num_bytes = perf_counter_ns() - begun_ns, tensor.numel() * tensor.element_size()
        constant = self._was_sent_before(tensor)
        self._add("sent", (1, num_bytes, ns, num_bytes * (not pinned), num_bytes * constant, ns * constant))

    def fetched(self, tensor: Any, begun_ns: int, charged: bool) -> None:
        """A tensor has been fetched from the device, and the time charged to `copy` or not."""
        ns, num_bytes = perf_counter_ns() - begun_ns, tensor.numel() * tensor.element_size()
        self._add("fetched", (1, num_bytes, ns, num_bytes * charged))

    def facts(self) -> dict[str, Any]:
        """Returns the tallies of finished steps by line, with the number of steps looked at.

        For another thread than the one that tallies: at worst a step is missed until the next time.
        """
        steps, open_step = self._recorder.steps, self._step
        tallies = [self._whole, self._open] if 0 < open_step < steps else [self._whole]
        sites = []
        for (kind, site), tally in [each for some in tallies for each in list(some.items())]:
            file, line = resolve(*site)[:2] if site is not None else ("", 0)
            names = SENT if kind == "sent" else FETCHED
            sites.append({"kind": kind, "file": file, "line": line, **dict(zip(names, tally, strict=True))})
        return {"num_steps": max(0, min(steps, CURIOUS_UNTIL) - 1), "sites": sites}

    def _add(self, kind: str, amounts: tuple[int, ...]) -> None:
        self._turn()
        key = (kind, user_frame(sys._getframe(2)))
        tally = self._open.setdefault(key, [0] * len(amounts))
        for index, amount in enumerate(amounts):
            tally[index] += amount

    def _turn(self) -> None:
        """Closes the tallies of the step before, if another has begun."""
        step = self._recorder.steps
        if step == self._step:
            return
        if self._step:
            whole = {key: list(tally) for key, tally in self._whole.items()}
            for key, tally in self._open.items():
                whole[key] = [a + b for a, b in zip(whole.get(key, [0] * len(tally)), tally, strict=True)]
            self._whole = whole  # in one go: another thread reads it
        self._open = {}
        self._before = self._now if step == self._step + 1 else {}
        self._now = {}
        self._step = step

    def _was_sent_before(self, tensor: Any) -> bool:
        """Whether this very tensor, unchanged, was sent in the step before; a view stands for its base.

        An address says nothing: the next batch often lies where the last one lay.
        """
        self._turn()
        base = tensor._base if tensor._base is not None else tensor
        key = (id(base), tensor.storage_offset(), tensor.numel())
        version = 0 if base.is_inference() else base._version
        if len(self._now) < REMEMBERED:
            self._now[key] = (weakref.ref(base), version)
        known = self._before.get(key)
        return known is not None and known[0]() is base and known[1] == version
