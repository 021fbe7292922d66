"""Passes beside the training are timed with a change and without, and training does not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from diagnose.actions._shadow import time_passes
from diagnose.actions._watch import watched
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from tests.checked_training import MODELS, ConvNet, route, trained


@contextmanager
def slowed(job: Job, model: Any, seconds: float) -> Iterator[None]:
    """A change that makes each call so much slower."""

    def sleep(call: Any, args: Any, kwargs: Any) -> Any:
        time.sleep(seconds)
        return call(*args, **kwargs)

    with route(job, model, sleep):
        yield


@MODELS
def test_passes_are_timed_with_a_change_and_without_and_training_does_not_notice(kind: Any) -> None:
    training, other = (trained(kind, dropout=0.1) for _ in range(2))
    torch.manual_seed(1)
    with watched(training.job):
        training.step()
        timed = time_passes(training.job, slowed(training.job, training.model, 0.05), lambda: None)
        training.step()
    torch.manual_seed(1)
    with watched(other.job):
        other.step()
        other.step()
    assert timed is not None
    without_ns, with_ns = timed
    assert without_ns > 0
    assert with_ns - without_ns > 30e6, "50 ms are slept in each call"
    assert training.losses == other.losses


def test_passes_that_cannot_be_made_tell_nothing_and_a_refusal_is_one() -> None:
    training = trained(ConvNet)
    training.model.eval()
    assert time_passes(training.job, nullcontext(), lambda: None) is None
    training.model.train()
    assert time_passes(Job(), nullcontext(), lambda: None) is None

    @contextmanager
    def refusing() -> Iterator[None]:
        raise CannotApply("not now")
        yield

    with pytest.raises(CannotApply, match="not now"):
        time_passes(training.job, refusing(), lambda: None)
