"""The jobs of `overhead_parts.py`: a loop in which the measuring is switched off and on, and a short one.

overhead_parts_job.py steps FOLDER STEP_MS SECONDS     prints the blocks' microseconds per step
overhead_parts_job.py start FILE                       leaves there when its parts ran
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

    def seen(self) -> tuple[int, int]:
        """Returns how many steps and samples have been recorded."""
        return self._recorder.steps, self._sampler.count

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


def steps(folder: str, step_ms: int, seconds: int) -> None:
    """Trains, and prints what the blocks took."""
    from overhead_job import parts

    switch = Switch(folder)
    model, loader, optimizer, criterion = parts(step_ms)

    def train() -> Iterator[int]:
        while True:
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                yield time.thread_time_ns()

    ended = train()
    for _ in range(WARMUP):
        next(ended)
    blocks, size, is_on = [], BLOCK[step_ms], True
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not len(blocks) % 2 or is_on:
        switch.off() if is_on else switch.on()
        is_on = not is_on
        before = switch.seen()
        times = [next(ended) for _ in range(size)]
        after = switch.seen()
        # The last step of a block ends in the next one, so one is missing; a signal may be on its way.
        if is_on and after[0] < before[0] + size - 1:
            raise RuntimeError(f"only {after[0] - before[0]} of {size} steps were recorded while on")
        if not is_on and (after[0] > before[0] or after[1] > before[1] + 1):
            raise RuntimeError(f"recorded while off: {before} became {after}")
        half = size // 2
        blocks.append((times[-1] - times[half - 1]) / (size - half) / 1000)
    switch.on()
    print(json.dumps(blocks))


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
        steps(rest[0], int(rest[1]), int(rest[2]))
    else:
        start(rest[0])
