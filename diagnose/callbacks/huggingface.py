"""`DiagnoseCallback` for the Hugging Face `Trainer`."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from diagnose.callbacks._training import StrPath, Training
from diagnose.core.profile import Profile


class DiagnoseCallback(TrainerCallback):  # type: ignore[misc] # not ours to require, so without types
    """Measures `Trainer.train`, and reports: `Trainer(..., callbacks=[DiagnoseCallback()])`.

    Evaluation outside of `train` is not measured. A training that raises is reported when Python exits, or
    when the next one begins: the `Trainer` tells its callbacks nothing of exceptions. Does nothing in a
    process that `diagnose run` measures already.

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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to measure."""
        self._training.begin(args.process_index, args.world_size)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reports."""
        self._training.end()
