"""The phases that a step's time is divided into."""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    """What an instant of a training step was spent on. Exclusive: the innermost phase wins."""

    DATA_WAIT = "data_wait"
    COPY = "copy"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    COMPILE = "compile"
    GC = "gc"
    OTHER = "other"

    @property
    def label(self) -> str:
        """The phase in the words of a sentence: `data wait`."""
        return self.value.replace("_", " ")
