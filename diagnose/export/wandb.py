"""A run in Weights & Biases, kept on this machine unless the user's settings say otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from diagnose.core.profile import RunInfo
from diagnose.export._reading import Reading, clean
from diagnose.export._scalars import about, report_of, scalars_of, summary_of
from diagnose.export.base import Exporter, Write, imported

INSTALL = "wandb"

SCRIPTS_OWN = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH")
"""Variables that name the run of the script itself: heeded here, they would have us write into it."""


class Wandb(Exporter):
    """Logs scalars by step; at the end figures of the whole run, and the report.

    Offline unless `WANDB_MODE` is set: nothing leaves the machine before the user's own `wandb sync`.
    Nothing is collected but what is logged here: no console, no code, no statistics of the system.
    """

    target = "PROJECT"
    requires = {"wandb": INSTALL}  # noqa: RUF012 (a constant; the base class has its type)

    def default_target(self, run: RunInfo) -> str:
        """Returns a project."""
        return os.environ.get("WANDB_PROJECT") or "diagnose"

    @contextmanager
    def open(self, target: str, run: RunInfo) -> Iterator[Write]:
        """Begins a run of the same name."""
        wandb = imported("wandb", "wandb", INSTALL)
        for name in SCRIPTS_OWN:
            os.environ.pop(name, None)
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
        )
        begun = wandb.init(
            project=target,
            name=clean(run.id),
            mode=os.environ.get("WANDB_MODE") or "offline",
            settings=settings,
        )

        # An axis of our own: its own takes no step that is not beyond the last, as after a restart.
        begun.define_metric("diagnose/*", step_metric="diagnose/step")
        exit_code = 0

        def write(reading: Reading) -> str:
            nonlocal exit_code
            for point in reading.points:
                begun.log({**scalars_of(point), "diagnose/step": point.step, "diagnose/unix": point.unix})
            begun.config.update(dict(about(reading)), allow_val_change=True)
            if reading.is_last:
                exit_code = 1 if reading.has_failed else 0
                begun.summary.update(summary_of(reading))
                begun.summary["diagnose/report"] = report_of(reading)
            return f"wrote {begun.dir}" + (" (offline)" if begun.offline else "")

        try:
            yield write
        finally:
            begun.finish(exit_code)
