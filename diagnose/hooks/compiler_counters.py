"""What Dynamo counted: compilations, recompilations and graph breaks."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._dynamo import on_compilations
from diagnose.hooks._looks import added
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook

MAX_KEPT = 10
"""Reasons and graph breaks kept: more than a report shows."""


class CompilerCountersHook(Hook):
    """Copies Dynamo's own counters after a compilation has ended, in the flusher's thread.

    On the training thread, what Python ran in a callback of Dynamo's would count as frames of the script.
    """

    requires = "torch._dynamo.callback"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        is_new = False

        def note(*args: Any) -> None:
            nonlocal is_new
            is_new = True

        def look() -> None:
            nonlocal is_new
            if is_new and "torch._dynamo.utils" in sys.modules:
                is_new = False
                recorder.facts["compiler"] = describe()

        # A compilation's own metrics come after its end: the next flush, or the next one, has them.
        with on_compilations(note, note), added(recorder.looks.flushed, look):
            yield


def describe() -> dict[str, Any]:
    """Returns the facts of `core.graph.Compiler`."""
    from torch._dynamo.utils import counters, get_compilation_metrics, graph_break_reasons

    metrics = [m for m in get_compilation_metrics() if m.co_name]
    by_place = Counter((m.co_filename or "", m.co_firstlineno or 0, m.co_name or "") for m in metrics)
    own = [place for place, _ in by_place.most_common() if f"{os.sep}torch{os.sep}" not in place[0]]
    file, line, function = own[0] if own else ("", 0, "")
    again = [m for m in metrics if m.recompile_reason]
    limited = [m for m in metrics if "Limit" in (m.fail_type or "")]
    total = int(counters["frames"].get("total", 0))
    return {
        "num_compilations": total,
        # Dynamo keeps the metrics of its last 64 compilations only.
        "num_recompilations": max(len(again), total - len(by_place)) if again else 0,
        "limit_hits": len(limited),
        "reasons": list(dict.fromkeys(_first_line(m.recompile_reason or "") for m in again))[-MAX_KEPT:],
        "skipped": [_skipped(m) for m in metrics if _is_skipped(m)][:MAX_KEPT],
        "breaks": _breaks(list(counters["graph_break"]), list(graph_break_reasons)),
        "file": file,
        "line": line,
        "function": function,
    }


def _breaks(told: Sequence[str], traced: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the facts of `core.graph.GraphBreak`, one per place.

    Args:
        told: Dynamo's words, which name no place where it leaves a function out by its own rules.
        traced: Its records of where it broke a graph, each with the stack of that moment.
    """
    found = [_broken(reason) for reason in told]
    places = {(each["file"], each["line"]) for each in found}
    for each in traced:
        for frame in (each.user_stack or ())[-1:]:
            if (frame.filename, frame.lineno) not in places:
                places.add((frame.filename, frame.lineno))
                reason = _first_line(each.reason)
                found.append({"reason": reason, "file": frame.filename, "line": frame.lineno or 0})
    if any(each["file"] for each in found):
        found = [each for each in found if each["file"]]
    return found[:MAX_KEPT]


def _is_skipped(metrics: Any) -> bool:
    """Whether a function of the script's was not compiled for what it does, not for compiling too often."""
    library = f"{os.sep}site-packages{os.sep}" in (metrics.co_filename or "")
    return metrics.fail_type == "Unsupported" and not library


def _skipped(metrics: Any) -> dict[str, Any]:
    return {
        "reason": _first_line(metrics.fail_reason or ""),
        "file": metrics.fail_user_frame_filename or metrics.co_filename or "",
        "line": metrics.fail_user_frame_lineno or metrics.co_firstlineno or 0,
    }


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return re.sub(r"\s{2,}", "  ", lines[0])[:200] if lines else ""


def _broken(reason: str) -> dict[str, Any]:
    """A graph break, with the user's line where Dynamo's words hold it."""
    places = re.findall(r'File "([^"]+)", line (\d+)', reason)
    file, line = places[-1] if places else ("", 0)
    return {"reason": _first_line(reason), "file": file, "line": int(line)}
