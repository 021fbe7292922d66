"""`DiagnoseCallback` for the Hugging Face `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from diagnose.callbacks._training import MeasuringCallback


class DiagnoseCallback(MeasuringCallback, TrainerCallback):  # type: ignore[misc] # not ours to require, so without types
    """Measures `Trainer.train`, and reports: `Trainer(..., callbacks=[DiagnoseCallback()])`.

    Evaluation outside of `train` is not measured. A training that raises is reported when Python exits, or
    when the next one begins: the `Trainer` tells its callbacks nothing of exceptions. Does nothing in a
    process that `diagnose run` measures already.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to measure."""
        self._training.begin(args.process_index, args.world_size)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reports."""
        self._training.end()
