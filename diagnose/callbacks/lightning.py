"""`DiagnoseCallback` for Lightning's `Trainer`, under both of its names."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from diagnose.callbacks._training import StrPath, Training
from diagnose.core.profile import Profile

NAMES = ("lightning.pytorch", "pytorch_lightning")
"""The same library is published twice, with a class of its own each."""


def _callback_classes() -> tuple[type, ...]:
    """Returns the class of callbacks of each that the script has imported, else of the one installed."""
    imported = [name for name in NAMES if name in sys.modules]
    for name in () if imported else NAMES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
        else:
            imported.append(name)
            break
    if not imported:
        raise ModuleNotFoundError(
            "DiagnoseCallback needs Lightning: pip install lightning", name="lightning"
        )
    return tuple(importlib.import_module(f"{name}.callbacks").Callback for name in imported)


class DiagnoseCallback(*_callback_classes()):  # type: ignore[misc] # not ours to require, so without types
    """Measures `Trainer.fit`, and reports: `Trainer(..., callbacks=[DiagnoseCallback()])`.

    `validate`, `test` and `predict` are not measured. Does nothing in a process that `diagnose run`
    measures already.

    Args:
        run_dir: Folder that holds the runs. Default: that of `diagnose run`, `.diagnose/runs`.
        name: Name of the run. Default: time and script. A second training gets `-2`, and so on.
        html: Write the report there as HTML.
        json: Write the report there as JSON.
        warmup: Leave the first steps out of every figure. Default: decided by the analysis.
        quiet: Print no report.
        logger: Takes the report instead of stderr.

    Raises:
        DiagnoseError: If a report could not be written there, or the name is none.
    """

    def __init__(
        self,
        *,
        run_dir: StrPath | None = None,
        name: str | None = None,
        html: StrPath | None = None,
        json: StrPath | None = None,
        warmup: int | None = None,
        quiet: bool = False,
        logger: logging.Logger | None = None,
    ) -> None:
        super().__init__()
        self._training = Training(
            run_dir=run_dir, name=name, html=html, json=json, warmup=warmup, quiet=quiet, logger=logger
        )

    @property
    def profile(self) -> Profile | None:
        """What was found in the last training that ended, on the first rank."""
        return self._training.profile

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begins to measure: all ranks are there, and the model is still the user's own."""
        if stage == "fit":
            self._training.begin(trainer.global_rank, trainer.world_size)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Reports."""
        if stage == "fit":
            self._training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Reports too: Lightning does not tear down what has failed."""
        self._training.end()
