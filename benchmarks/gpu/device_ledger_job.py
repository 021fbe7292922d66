"""Runs a training script measured by `diagnose`, with or without the device's clock, some steps traced.

    python benchmarks/gpu/device_ledger_job.py --out FOLDER [--clock off] [--trace] [--rehearse] SCRIPT ...

Writes `job.json` and, if asked, `trace.json` into the folder, beside the run.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

FIRST, LAST = 20, 40
"""Steps that are traced; after them the script's own speed comes back for the steps that are timed."""


class Instant:
    """A device for a rehearsal on a CPU: all that is launched has been done when the launch returns."""

    def current_stream(self) -> str:
        return "main"

    def new_event(self) -> list[int]:
        return [0]

    def record(self, event: list[int], stream: str) -> None:
        event[0] = time.perf_counter_ns()

    def is_capturing(self) -> bool:
        return False

    def has_passed(self, event: list[int]) -> bool:
        return True

    def ms_between(self, earlier: list[int], later: list[int]) -> float:
        return (later[0] - earlier[0]) / 1e6

    def begin_reading(self) -> None:
        pass


class Traced:
    """Puts the ledger's slots and marks into a trace of torch's profiler, for some steps."""

    def __init__(self, recorder: Any, folder: Path) -> None:
        self.ends: list[tuple[int, int]] = []  # number of marks' times, and steps that ended there
        self._recorder, self._folder = recorder, folder
        self._profiler: Any = None
        recorder.looks.cared.append(self.look)

    def look(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        recorder = self._recorder
        if recorder.steps == FIRST:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()
            import device_ledger_truth  # noqa: F401 - a collection amid this import would come to `_append`

            self._before = recorder.log.append, recorder.log.close
            recorder.log.divert(self._append, self._close)
        elif recorder.steps == LAST:
            recorder.log.divert(*self._before)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._folder / "trace.json"))

    def _append(self, entry: Any) -> None:
        from device_ledger_truth import MARK, SLOT
        from torch.profiler import record_function

        from diagnose.core.ledger import SLOT_OF
        from diagnose.hooks._log import ARRIVED, SETTLED, STEPPED, WIDTH

        self._before[0](entry)
        if isinstance(entry, tuple):
            note = f"{MARK}{entry[0]}"
        else:
            code = entry % WIDTH
            if code == ARRIVED:
                code = SLOT_OF["communication"]
            elif code >= STEPPED:
                code -= STEPPED
            elif code >= SETTLED:
                code = SLOT_OF["gap_after_rest"]
            note = f"{SLOT}{code}"
        with record_function(note):
            pass

    def _close(self, mark: Any) -> None:
        self._before[1](mark)
        self.ends.append((mark[0], self._recorder.steps))


def without_clock(cared: list[Any]) -> list[Any]:
    """Takes the look for a device out of what is done after steps, and nothing else; returns it."""
    from diagnose.hooks import device_clock

    looks = [look for look in cared if look.__module__ == device_clock.__name__]
    for look in looks:
        cared.remove(look)
    return looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clock", choices=("on", "off"), default="on")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(Path(args.script).resolve().parent)]
    import diagnose
    from diagnose.hooks.device_clock import follow
    from diagnose.launch import session

    args.out.mkdir(parents=True, exist_ok=True)
    diagnose.attach(args.out / "run")
    assert session._session is not None
    recorder = session._session._recorder
    unused: list[Any] = []
    if args.clock == "off":
        unused = without_clock(recorder.looks.cared)
    elif args.rehearse:
        recorder.looks.cared.append(lambda: recorder.device or follow(recorder, Instant()))
    traced = Traced(recorder, args.out) if args.trace else None
    sys.argv = [args.script, *args.arguments]
    try:
        runpy.run_path(args.script, run_name="__main__")
    finally:
        facts = recorder.device.facts() if recorder.device is not None else None
        notes = list(recorder.notes)
        recorder.looks.cared += unused  # each hook takes out what it put in
        diagnose.detach()
        found = {"clock": facts, "ends": traced.ends if traced else [], "notes": notes}
        (args.out / "job.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
