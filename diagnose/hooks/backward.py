"""Time in autograd."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from diagnose.core.ledger import BACKWARD, EVALUATION, FIRST_GAP, FORWARD, GAP_AFTER
from diagnose.hooks._log import WIDTH
from diagnose.hooks._recorder import UNUSED, Recorder
from diagnose.hooks.base import Hook, hidden, replaced, spanned, unseen

GAP = GAP_AFTER[BACKWARD]


class BackwardHook(Hook):
    """Charges `autograd.backward`, which `Tensor.backward` calls, and `autograd.grad` to `backward`.

    Torch has no process-wide hook around a backward pass. Only the outermost counts as a pass: reentrant
    checkpointing runs one inside another. What optimizers did in it, in a thread of autograd's, is told
    when it ends.
    """

    requires = "torch.autograd"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        import torch
        from torch.compiler import is_dynamo_compiling

        clock, log = recorder.clock, recorder.log.append
        on_backward, on_pass = recorder.looks.on_backward, recorder.looks.on_pass
        on_inner_backward = recorder.looks.on_inner_backward
        accumulating = torch.autograd.backward

        def before(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            current = recorder.current
            if current == BACKWARD or (current == EVALUATION and not recorder.evaluating):
                return -1
            if recorder.evaluating and recorder.batch_use != UNUSED and current != FORWARD:
                recorder.passes_beside += 1
                recorder.evaluation_begins()  # as forces are evaluated; an optimizer's step is what trains
                return EVALUATION
            if current != FORWARD:  # a gradient taken inside the model is part of the model
                recorder.work_begins()
                recorder.backward_passes += 1
                if recorder.curious:
                    recorder.met.site("backward")
                    recorder.accumulates = original is accumulating and kwargs.get("inputs") is None
                    for look in on_backward:
                        recorder.guarded(look, args)
                if on_pass:
                    tell(on_pass, args)
            return BACKWARD

        def tell(looks: list[Any], args: tuple[Any, ...]) -> None:
            for look in (*looks,):  # they may take themselves out
                recorder.guarded(look, args)

        def wrap(original: Any) -> Any:
            asked = spanned(original, recorder, functools.partial(before, original))

            def call(*args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling():
                    return original(*args, **kwargs)
                interrupted = recorder.current
                if interrupted == BACKWARD and on_inner_backward:
                    tell(on_inner_backward, args)
                if interrupted < FIRST_GAP or get_ident() != recorder.calm:
                    try:
                        result = asked(*args, **kwargs)
                    except BaseException as error:
                        unseen(error)
                        raise
                    if recorder.stepped_beside and interrupted != BACKWARD:
                        recorder.guarded(recorder.tell_stepped_beside)
                    return result
                recorder.backward_passes += 1
                if on_pass:
                    tell(on_pass, args)
                try:
                    recorder.current = BACKWARD
                    log(clock() * WIDTH + BACKWARD)
                    result = original(*args, **kwargs)
                except BaseException as error:
                    recorder.leave(BACKWARD, interrupted)
                    unseen(error)
                    raise
                recorder.current = GAP
                log(clock() * WIDTH + GAP)
                if recorder.stepped_beside:
                    recorder.guarded(recorder.tell_stepped_beside)
                return result

            recorder.log.kept_by(call)
            return hidden(functools.wraps(original)(call))

        with (
            replaced(torch.autograd, "backward", wrap),
            replaced(torch.autograd, "grad", wrap),
        ):
            yield
