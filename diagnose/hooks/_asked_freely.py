"""Tells loaders whose batches are asked for without gradients, and trained on all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from diagnose.hooks._recorder import Recorder

TIMES = 2
"""So often in a row a batch must have gone straight to training: one alone may be looked at in between."""


def nothing() -> None:
    """Stands for a reference to no iterator."""


class AskedFreely:
    """Looks at what becomes of batches that are asked for under `torch.no_grad()`, as by a decorated
    `next_batch`.

    Those of an evaluation meet gradient-free calls of a model before the next one is asked for. Where there
    was none of these but a backward pass, it was a training batch, if an optimizer has stepped meanwhile:
    else it may have been evaluated with gradients, as forces are.

    Args:
        recorder: Its feed's `freely` gets the numbers of such loaders.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._latest: Callable[[], Any] = nothing
        self._asides = self._passes = self._times = self._rounds = 0

    def trains(self, batches: Any, with_gradients: bool) -> bool:
        """Whether the batch that an iterator is asked for now is for training, as far as gradients and
        those before it tell. One asked for with gradients may be what the next backward pass is for."""
        if with_gradients:
            self._latest = nothing
            return True
        recorder, feed = self._recorder, self._recorder.feed
        number = feed.iterators.get(batches)
        if number in feed.freely:
            return True
        same = self._latest() is batches
        if same and recorder.asides == self._asides and recorder.backward_passes > self._passes:
            self._times += 1
        else:
            self._times, self._rounds = 0, recorder.rounds
        if self._times >= TIMES and recorder.rounds > self._rounds:
            if number is None:
                number = feed.begins_late(batches)
            if number is not None:
                feed.freely.add(number)
                return True
        self._latest, self._passes = ref(batches), recorder.backward_passes
        self._asides = recorder.asides + 1  # the wait for this one is taken for evaluation
        return False
