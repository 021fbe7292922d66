"""What a script has on in some of its steps only: torch's profiler, and the search for NaN in gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from diagnose.core.ledger import COMPILE
from diagnose.core.series import MOST_TIMES
from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, around, replaced, spanned


class NowAndThenHook(Hook):
    """Notes when each is switched on and off again, `MOST_TIMES` times at most. What stays on shows no end.

    It is told when records are written: when each time began and ended, in nanoseconds. What torch's
    compiler searches for while it traces a backward pass is none of the script's.
    """

    requires = "torch.autograd"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        import torch
        from torch.autograd import profiler

        begun_ns: dict[str, int] = {}
        times: dict[str, list[tuple[int, int]]] = {"anomaly": [], "profiler": []}

        def switched(name: str, *, on: bool) -> int:
            if on:
                begun_ns.setdefault(name, recorder.clock())
            elif name in begun_ns:
                lasted = begun_ns.pop(name), recorder.clock()
                if len(times[name]) < MOST_TIMES:
                    times[name].append(lasted)
            return -1

        def searches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            if recorder.current == COMPILE:
                return -1
            return switched("anomaly", on=bool(args[0] if args else kwargs["mode"]))

        def records(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            return switched("profiler", on=True)

        def is_recorded() -> None:
            if get_ident() == recorder.thread:
                switched("profiler", on=False)

        def recorded(args: tuple[Any, ...], result: Any) -> None:
            recorder.guarded(is_recorded)

        def tell() -> None:
            told = {name: [*each] for name, each in times.items() if each}
            if told:
                recorder.facts["now_and_then"] = told

        with (
            replaced(torch, "set_anomaly_enabled", lambda call: spanned(call, recorder, searches)),
            replaced(profiler.profile, "_start_trace", lambda call: spanned(call, recorder, records)),
            # What was recorded is worked up there: a step in which that happens has it on, too.
            replaced(profiler.profile, "__exit__", lambda call: around(call, after=recorded)),
            added(recorder.looks.flushed, tell),
        ):
            yield
