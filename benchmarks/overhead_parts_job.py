"""The jobs of `overhead_parts.py`: a loop in which the measuring is switched off and on, and a short one.

overhead_parts_job.py steps FOLDER STEP_MS SECONDS DEVICE     prints the blocks' microseconds per step
overhead_parts_job.py start FILE                              leaves there when its parts ran
"""

import time

FIRST_LINE = time.time()

import ctypes  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

IMPORTED = time.time()

BLOCK = {1: 30, 10: 8, 100: 4}
"""Steps of a block by the step's length in milliseconds; the first half does not count."""

OFF, ON, HOST = "off", "on", "on, without the device's clock"
TURNS = {"cpu": (OFF, ON), "cuda": (OFF, ON, OFF, HOST)}
"""What is measured in turn."""

WARMUP = 80
"""Steps before: the hooks look around in the first 64."""

SHORT_STEPS = 300


class Switch:
    """All that measuring does on the training thread, to be taken out and put back."""

    def __init__(self, folder: str) -> None:
        from diagnose.hooks import base

        self._patches: list[tuple[Any, str, bool, Any, Any]] = []
        original = base.replaced

        @contextmanager
        def noted(owner: Any, name: str, wrap: Any) -> Iterator[None]:
            inherited, before = name not in vars(owner), getattr(owner, name)
            before = before if inherited else vars(owner)[name]
            with original(owner, name, wrap):
                self._patches.append((owner, name, inherited, before, vars(owner)[name]))
                yield

        base.replaced = noted  # before the other hooks import it
        import diagnose
        from diagnose.launch import session

        diagnose.attach(folder)
        assert session._session is not None
        self._recorder = session._session._recorder
        self._sampler = session._session._sampler
        self._out: list[tuple[Any, str, bool, Any, Any]] = []
        self._hooks: list[Any] = []
        self._callbacks: list[Any] = []
        self._timer: Any = None
        self._diverted: Any = None

    def seen(self) -> tuple[int, int]:
        """Returns how many steps and samples have been recorded."""
        return self._recorder.steps, self._sampler.count

    def own_account(self) -> dict[str, float]:
        """What the recorder itself says of its parts: microseconds, and events of a device so far."""
        ledger = self._recorder.device
        begun = time.perf_counter_ns()
        for _ in range(1000):
            time.perf_counter_ns()
        reading_us = (time.perf_counter_ns() - begun) / 1e6
        account = {"reading a clock, us": reading_us, "steps": self._recorder.steps}
        if ledger is not None:
            account |= {"recording an event, us": ledger.event_ns / 1000, "events": ledger.events}
            account |= {"recording a new one, us": ledger.new_event_ns / 1000, "new": ledger.new_events}
        return account

    def turn(self, state: str) -> None:
        """Goes into one of `TURNS`; from `OFF` to another and back."""
        if state == OFF:
            if self._diverted is not None:
                self._recorder.log.divert(*self._diverted)
                self._diverted = None
            self.off()
            return
        self.on()
        if state == HOST:
            log, ledger = self._recorder.log, self._recorder.device
            assert ledger is not None and ledger.on, ledger and ledger.gave_up
            self._diverted = log.append, log.close
            log.divert(*ledger._host)

    def off(self) -> None:
        """Takes everything out."""
        from torch.optim import optimizer

        from diagnose.hooks._sampler import _TimerSpec, _TimeSpec

        self._out = [patch for patch in self._patches if vars(patch[0]).get(patch[1]) is patch[4]]
        for owner, name, inherited, before, _ in reversed(self._out):
            delattr(owner, name) if inherited else setattr(owner, name, before)
        known = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
        self._hooks = [dict(hooks) for hooks in known]
        for hooks in known:
            hooks.clear()
        self._callbacks = list(gc.callbacks)
        gc.callbacks.clear()
        never = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(0, 0))
        self._timer, self._sampler._timer = self._sampler._timer, None  # or the flusher starts it again
        self._sampler._libc.timer_settime(self._timer, 0, ctypes.byref(never), None)

    def on(self) -> None:
        """Puts everything back."""
        from torch.optim import optimizer

        for owner, name, _, _, replacement in self._out:
            setattr(owner, name, replacement)
        optimizer._global_optimizer_pre_hooks.update(self._hooks[0])
        optimizer._global_optimizer_post_hooks.update(self._hooks[1])
        gc.callbacks[:] = self._callbacks
        self._sampler._timer = self._timer
        self._sampler.vary()


def steps(folder: str, step_ms: int, seconds: int, device: str) -> None:
    """Trains, and prints what the blocks took: state, the thread's own time, and the clock's."""
    from overhead_job import parts

    switch = Switch(folder)
    model, loader, optimizer, criterion = parts(step_ms, device)

    def train() -> Iterator[tuple[int, int]]:
        while True:
            for x, y in loader:
                if device != "cpu":
                    x, y = x.to(device), y.to(device)
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                yield time.thread_time_ns(), time.perf_counter_ns()

    ended = train()
    for _ in range(WARMUP):
        next(ended)
    blocks: list[tuple[str, float, float]] = []
    size, turns = BLOCK[step_ms], TURNS[device]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not blocks or blocks[-1][0] != OFF:
        state = turns[len(blocks) % len(turns)]
        switch.turn(state)
        before = switch.seen()
        times = [next(ended) for _ in range(size)]
        after = switch.seen()
        # The last step of a block ends in the next one, so one is missing; a signal may be on its way.
        if state != OFF and after[0] < before[0] + size - 1:
            raise RuntimeError(f"only {after[0] - before[0]} of {size} steps were recorded while on")
        if state == OFF and (after[0] > before[0] or after[1] > before[1] + 1):
            raise RuntimeError(f"recorded while off: {before} became {after}")
        half = size // 2
        took = [(b - a) / (size - half) / 1000 for a, b in zip(times[half - 1], times[-1], strict=True)]
        blocks.append((state, took[0], took[1]))
    switch.on()
    print(json.dumps({"blocks": blocks, "own account": switch.own_account()}))


def start(file: str) -> None:
    """Trains a little."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(SHORT_STEPS):
        time.sleep(0.001)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    Path(file).write_text(json.dumps([FIRST_LINE, IMPORTED, time.time()]), encoding="utf-8")


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "steps":
        steps(rest[0], int(rest[1]), int(rest[2]), rest[3])
    else:
        start(rest[0])
