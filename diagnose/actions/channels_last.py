"""Images with all channels of a pixel together"""

from __future__ import annotations

import functools
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from diagnose.actions._careful import Careful, Failure
from diagnose.actions._gone import entered
from diagnose.actions._layout import (
    Conversion,
    image_to_channels_last,
    image_to_contiguous,
    lies_as,
    refuse_shared,
    weights_to_convert,
)
from diagnose.actions._nested import mapped, tensors
from diagnose.actions._optimizers import hooks_on
from diagnose.actions._routes import (
    models_with_weights,
    refuse_compiled,
    refuse_wrapped,
    routed,
    routes_in_force,
)
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.hooks._frames import USER, file_owner
from diagnose.hooks.base import replaced

FLATTENS = re.compile(
    r"""parameters_to_vector|\butils\.prune\b|\butils\ import\ prune\b
    |(?:\.(?:grad|data|weight)|\b(?:p|w|g|grads?|gradients?|weights?|kernels?|param\w*))\b
     (?:\.(?:grad|data|weight|(?:detach|clone|float|abs|cpu)\(\)))*\.view\(""",
    re.VERBOSE,
)
"""What fails on weights and gradients in this layout, and where the script stands, not the model. Other
tensors are viewed all the time, as predictions are: names are all there is to tell them by."""

OPTIMIZERS = ("torch.optim.", "diagnose.")
"""Modules whose optimizers take gradients in any layout, but for the one that flattens them."""


class ChannelsLast(Action):
    """
    ## What it does
    Stores the weights of convolutions, and the images that enter the model, with the channels of a pixel
    together: the layout that the fast convolutions of cuDNN and oneDNN want. Parameters remain the objects
    that they are; what optimizers keep for them is converted, too. What the model returns, in an evaluation
    as well, and what is saved of the optimizer or by safetensors, has the usual layout.

    ## When it takes effect
    At the next call of the model.

    ## When it cannot help
    A model whose time is not spent in convolutions. One with dropout on images: torch draws the mask in the
    order of memory, so other pixels fall out, which the check of gradients before a trial takes for what it
    is. One under DistributedDataParallel, whose buffers have the weights' old layout, or compiled by the
    script, is left alone, and so is a script that flattens weights or gradients by `view` or
    `parameters_to_vector`, or prunes them, in whatever file of its own. So are LBFGS and optimizers that
    are not torch's: they may flatten what they get.

    ## Hazards
    `view` inside the model fails on an image in this layout. The model is then called once more as it was,
    random numbers and buffers included, and the action is off for good. A reference to the memory of a
    weight that the script makes while it is in force, `.data` or `.detach()`, sees no update afterwards. A
    file that `torch.save` makes of the model holds weights in this layout; values are the same.
    """

    safety = Safety.ROUNDING
    touches = "model"
    unasked = True
    hangs_on = ("models",)

    def check(self, job: Job) -> None:
        refuse_compiled(job)
        refuse_wrapped(job)
        refuse_flattened()
        for optimizer in job.optimizers:
            kind = type(optimizer)
            if kind is torch.optim.LBFGS or not kind.__module__.startswith(OPTIMIZERS):
                raise CannotApply(f"{kind.__name__} may flatten weights or gradients")
        models_with_weights(job)
        refuse_shared(weights_to_convert(job))
        if job.inputs and not any(tensor.dim() == 4 for tensor in tensors(list(job.inputs.values()))):
            raise CannotApply("no image enters a model")

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        yield Failure()

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        prepared.refuse_again()
        conversion = Conversion(weights_to_convert(job), job)

        def careful() -> Careful:
            # The weights are converted for an evaluation, too, which wants its outputs as they were.
            return Careful(through_channels_last, prepared, conversion.revert, everywhere=True)

        with ExitStack() as stack:
            stack.callback(conversion.revert)
            conversion.convert()
            stack.enter_context(safetensors_as_before())
            entered(stack, map(conversion.checkpoints_as_before, job.optimizers))
            entered(stack, (routed(job, each, careful()) for each in models_with_weights(job)))
            yield

    def state(self, job: Job) -> Any:
        held = [p for model in job.models for p in model.parameters() if p.dim() == 4]
        # Not each tensor's layout: an optimizer may have got its state in the meantime.
        unlike = sum(
            value.stride() != p.stride()
            for p in held
            for optimizer in job.optimizers
            for value in optimizer.state.get(p, {}).values()
            if lies_as(p, value)
        )
        hooks = [hooks_on(each, "state_dict_post", "load_state_dict_post") for each in job.optimizers]
        weights = [(id(p), p.stride()) for p in held]  # not where: the script may bind `.data` anew
        return {"weights": weights, "unlike": unlike, "hooks": hooks, "routes": routes_in_force(job)}


@contextmanager
def safetensors_as_before() -> Iterator[None]:
    """Lets safetensors save weights in this layout, which it takes in the usual one only."""
    module = sys.modules.get("safetensors.torch")
    if module is None:
        yield
        return

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return original(mapped(image_to_contiguous, tensors), *args, **kwargs)

        return save

    with replaced(module, "save_file", wrap), replaced(module, "save", wrap):
        yield


def refuse_flattened() -> None:
    """Raises `CannotApply` if the script looks at weights or gradients as one row of numbers."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")  # a lazy module would look for it
        found = _flattening(file) if isinstance(file, str) else ""
        if found:
            raise CannotApply(f"the script flattens weights or gradients: {found}")


@functools.lru_cache(maxsize=100_000)
def _flattening(file: str) -> str:
    """Returns how a file of the user's flattens weights or gradients; empty where none is."""
    found = FLATTENS.search("".join(linecache.getlines(file))) if file_owner(file) == USER else None
    return found[0] if found is not None else ""


def through_channels_last(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A `core.job.Route` that hands images over in the other layout."""
    args = (args[0], *mapped(image_to_channels_last, args[1:]))
    return mapped(image_to_contiguous, call(*args, **mapped(image_to_channels_last, kwargs)))
