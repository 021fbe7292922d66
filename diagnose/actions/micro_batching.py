"""Calls the model with a part of the batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from diagnose.actions._boundary import check_torch
from diagnose.actions._careful import Careful, Failure
from diagnose.actions._nested import tensors
from diagnose.actions._pieces import CannotSplit, Pieces, joined, part_of
from diagnose.actions._routes import all_routed, models_with_weights, routes_in_force
from diagnose.actions._sealed import refuse_unsealed
from diagnose.actions._shadow_step import batch_size
from diagnose.actions._splitting import refuse_coupled, refuse_sharded
from diagnose.actions._untouched import (
    CannotCheck,
    devices_of,
    random_numbers_again,
    refuse_lasting_writes,
    untouched,
)
from diagnose.actions._watch import latest_call, refuse_lasting_changes, unwrapped
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

PIECES = (2, 4, 8)


class MicroBatching(Action):
    """Computes each model call in pieces of the batch: activations of one piece are alive at a time.

    ## What it does
    The loop, its loss and its counters see one call with the full batch, as before: the batch size does not
    change, nor does anything that the script counts. Inside, the model is called once per piece, and the
    outputs are put together. In the backward pass each piece but the last is computed once more and then
    gone back through. Also a loss over all samples, such as a contrastive one, is exact.

    ## When it takes effect
    At the next call of the model.

    ## When it cannot help
    It saves memory and costs time: with k pieces (k-1)/k of a forward pass. Where a batch that is too large
    for the caches makes each step slow it can win that back. It is refused for batch norm and dropout in
    training mode, for models that draw random numbers in any other way, and for those that return a value
    of the whole batch, as models of Hugging Face do when they are given labels. It is also refused where a
    loop reads more of a call than its outputs: a penalty noted on a module, features that a hook keeps.
    """

    safety = Safety.ROUNDING
    order = 60
    excludes = frozenset({"oom-replay", "regional-compile"})
    touches = "model"
    hangs_on = ("models",)

    def check(self, job: Job) -> None:
        check_torch()
        for model in models_with_weights(job):
            refuse_sharded(model)
            refuse_coupled(model)
            if id(model) in job.inputs and batch_size(job.inputs[id(model)]) < 2:
                raise CannotApply("the batch has one sample only")

    def values(self, job: Job) -> Sequence[int | None]:
        return PIECES

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        """Calls the model in pieces once, without gradients, to see whether their outputs fit together."""
        _rehearse_all(job)
        yield value or PIECES[0], Failure()

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        num_pieces, failure = prepared
        failure.refuse_again()

        def route(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return Pieces(call, args, kwargs, num_pieces, failure).run()

        with all_routed(job, lambda model: Careful(route, failure)):
            yield

    def why_not_stay(self, prepared: Any) -> str:
        return str(prepared[1].reason)

    def state(self, job: Job) -> Any:
        return routes_in_force(job)


def _rehearse_all(job: Job) -> None:
    for model in models_with_weights(job):
        refuse_unsealed(job, model)
        rehearse(job, model)


def rehearse(job: Job, model: Any) -> None:
    """Calls a model that `refuse_unsealed` lets pass on two parts of its last inputs; nothing of it is
    different afterwards.

    Raises:
        CannotApply: If the outputs of pieces do not make one of the batch.
    """
    inner, inputs = unwrapped(model), job.inputs[id(model)]
    size = batch_size(inputs)
    bounds = [(0, size // 2), (size // 2, size)]
    devices = devices_of([*tensors(inputs), *inner.parameters()])
    with (
        job.unmeasured(),
        random_numbers_again(devices) as random,
        untouched(inner),
        torch.no_grad(),
    ):
        try:
            refuse_lasting_changes(latest_call(job, model))
            with refuse_lasting_writes(inner, ()) as due:
                if due:
                    inner(*inputs[0], **inputs[1])
            random.restore()
            parts = [part_of(inputs, each, size) for each in bounds]
            outputs = [inner(*args, **kwargs) for args, kwargs in parts]
            joined(outputs, [high - low for low, high in bounds])
        except (CannotSplit, CannotCheck) as error:
            raise CannotApply(str(error)) from error
        if random != type(random)(devices):
            raise CannotApply("the model draws random numbers: pieces would draw others")
