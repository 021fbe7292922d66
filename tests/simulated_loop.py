"""A training loop on a simulated device, with the recorder that hooks call, and its steps by that clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from diagnose.core.ledger import DEVICE_COLUMNS, SLOT_OF, SLOTS
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.device_clock import follow
from tests.simulated_device import MS, US, SimulatedDevice

DATA_WAIT, COPY, FORWARD, BACKWARD, OPTIMIZER = (
    SLOT_OF[name] for name in ("data_wait", "copy", "forward", "backward", "optimizer")
)
REST = SLOT_OF["gap_after_rest"]


@dataclass
class Row:
    """A step by the device's clock."""

    step: int
    holes: int
    times: dict[str, int]
    dry: dict[str, int]

    @property
    def total_ns(self) -> int:
        return sum(self.times.values())


@dataclass
class Loop:
    """A training loop on a simulated device, with the recorder that the hooks would call."""

    device: SimulatedDevice = field(default_factory=SimulatedDevice)
    ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorder = Recorder()
        self.recorder.clock = self.device
        self.device.slot = lambda: self.recorder.current
        self.recorder.looks.cared.append(self._follow)
        self.rows: list[Row] = []

    def _follow(self) -> None:
        if self.recorder.device is None:
            follow(self.recorder, self.device)

    def phase(self, slot: int, *doings: tuple[str, int]) -> None:
        """A span of the loop: `spend` on the host, or `launch`, for so many nanoseconds; or `wait`."""
        interrupted = self.recorder.push(slot)
        self.device.enter(slot)
        self.run(*doings)
        self.recorder.leave(slot, interrupted)
        self.device.enter(self.recorder.current)

    def run(self, *doings: tuple[str, int]) -> None:
        for name, time_ns in doings:
            if name == "wait":
                self.device.wait_on_host()
            else:
                getattr(self.device, name)(time_ns)

    def batch(self, *doings: tuple[str, int]) -> None:
        self.recorder.batch_asked()
        self.ends.append(self.device.now_ns)
        self.phase(DATA_WAIT, *doings)

    def optimizer(self, *doings: tuple[str, int]) -> None:
        self.phase(OPTIMIZER, *doings)
        self.recorder.optimizer_stepped(1)

    def usual(self, wait_ns: int = 0, kernel_ns: int = MS) -> None:
        """A step of four kernels."""
        self.batch(("spend", wait_ns))
        self.phase(FORWARD, ("launch", kernel_ns))
        self.phase(BACKWARD, ("launch", kernel_ns), ("launch", kernel_ns))
        self.optimizer(("launch", kernel_ns))

    def bare(self, kernel_ns: int = MS) -> None:
        """A step of a loop that asks no loader."""
        self.recorder.work_begins()
        self.phase(FORWARD, ("launch", kernel_ns))
        self.phase(BACKWARD, ("launch", kernel_ns), ("launch", kernel_ns))
        self.optimizer(("launch", kernel_ns))

    def read(self) -> list[Row]:
        """What the flusher's thread finds now; the host's log is read, too."""
        self.recorder.log.take_rows(10**6)
        if self.recorder.device is not None:
            first, rows = self.recorder.device.take_rows(10**6)
            self.rows += [row_of(first + index, row) for index, row in enumerate(rows)]
        return self.rows

    def finish(self) -> list[Row]:
        """Ends the last step, and waits as the end of a script does."""
        self.recorder.batch_asked()
        self.ends.append(self.device.now_ns)
        self.device.spend(1)
        self.device.now_ns = max(self.device.now_ns, self.device.main.free_ns) + MS
        return self.read()


def row_of(step: int, row: tuple[int, ...]) -> Row:
    named = dict(zip(DEVICE_COLUMNS, row, strict=True))
    return Row(
        step=step,
        holes=named["holes"],
        times={slot: named[slot] for slot in SLOTS if named[slot]},
        dry={slot: named[f"dry_{slot}"] for slot in SLOTS if named[f"dry_{slot}"]},
    )


def near(ns: int, slack_ns: int = 40 * US) -> Any:
    """Within what events and launches take."""
    return pytest.approx(ns, abs=slack_ns)
