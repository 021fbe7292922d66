"""Pauses of the garbage collector."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.core.ledger import DATA_WAIT, GC
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, holding_up

OLDEST = 2
"""The generation whose collections walk the whole heap; only these are counted as events."""

AGAIN_S = 0.05
"""In which a collection that has ended for us has ended for all whom it calls: they swallow it, too."""


class GcPausesHook(Hook):
    """Charges collections that keep the loop waiting to `gc`, through `gc.callbacks`: those of the training
    thread, and in a backward pass those of autograd's threads."""

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        holds_up, counters = holding_up(recorder), recorder.feed.counters
        interrupted = -1
        begun_ns = 0
        is_due = False

        def pause(phase: str, info: dict[str, Any]) -> None:
            nonlocal interrupted, begun_ns
            if not holds_up():
                return
            if phase == "start":
                interrupted = recorder.push(GC)
                begun_ns = recorder.clock()
            elif interrupted >= 0:
                took_ns = recorder.clock() - begun_ns
                counters["collected_ns"] += took_ns
                if interrupted == DATA_WAIT:
                    counters["collected_waiting_ns"] += took_ns
                recorder.run_into(interrupted)
                interrupted = -1
                if info["generation"] == OLDEST:
                    recorder.event("gc", collected=info["collected"])

        def told(phase: str, info: dict[str, Any]) -> None:
            nonlocal is_due
            try:
                pause(phase, info)
            except KeyboardInterrupt:  # the collector would swallow it
                is_due = True
            if is_due and phase == "stop":
                is_due = False
                threading.Thread(target=_interrupt_again, daemon=True).start()

        gc.callbacks.append(told)
        try:
            yield
        finally:
            gc.callbacks.remove(told)


def _interrupt_again() -> None:
    """Sends the main thread the Ctrl-C once more that came while the collector called us."""
    time.sleep(AGAIN_S)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
