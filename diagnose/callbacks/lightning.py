"""`DiagnoseCallback` for Lightning's `Trainer`, under both of its names."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from diagnose.callbacks._training import MeasuringCallback

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


class DiagnoseCallback(MeasuringCallback, *_callback_classes()):  # type: ignore[misc] # not ours to require, so without types
    """Measures `Trainer.fit`, and reports: `Trainer(..., callbacks=[DiagnoseCallback()])`.

    `validate`, `test` and `predict` are not measured. Does nothing in a process that `diagnose run`
    measures already.
    """

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
