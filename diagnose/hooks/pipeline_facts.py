"""What the schedules of a pipeline's stages are, looked at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._looks import added
from diagnose.hooks._made import remembered
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook


class PipelineFactsHook(Hook):
    """Remembers where each schedule of `torch.distributed.pipelining` is made, and reads its sizes once,
    after some steps.

    What its stages wait for each other is measured by `collectives`.
    """

    requires = "torch.distributed.pipelining.schedules"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch.distributed.pipelining.schedules import _PipelineSchedule

        def inspect() -> None:
            for schedule, (file, line) in places.items():
                if schedule._has_backward:  # one for evaluation has none
                    recorder.facts["pipeline"] = {**describe(schedule), "file": file, "line": line}

        with remembered(_PipelineSchedule, recorder) as places, added(recorder.looks.inspections, inspect):
            yield


def describe(schedule: Any) -> dict[str, Any]:
    """Returns the facts of `core.parallel.Pipeline`, but for where it was made and what it waits."""
    stage = schedule._stages[0] if hasattr(schedule, "_stages") else schedule._stage
    return {
        "kind": type(schedule).__name__,
        "num_stages": stage.num_stages,
        "num_ranks": stage.group_size,
        "num_microbatches": schedule._n_microbatches,
    }
