"""Time in optimizer steps; the event by which training steps are found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any

from diagnose.core.ledger import BACKWARD, FIRST_GAP, GAP_AFTER, GAP_AFTER_REST, OPTIMIZER
from diagnose.hooks._log import WIDTH
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, always, spanned

GAP = GAP_AFTER[OPTIMIZER]

CLOSURES = FunctionType, MethodType, partial
"""What is a closure without being named so; a `step` of the script's own may take a model there."""


class OptimizerHook(Hook):
    """Charges `step()` of every `torch.optim.Optimizer` to `optimizer`, through torch's process-wide hooks.

    A closure given to `step` is the script's own code, not the optimizer's: inside it the ledger goes on as
    in the loop. Lightning runs a whole training step in one.
    """

    requires = "torch.optim.optimizer"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch._C import _current_graph_task_id as in_backward
        from torch.compiler import is_dynamo_compiling
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        clock, log, on_step = recorder.clock, recorder.log.append, recorder.looks.on_step
        open_steps: list[tuple[int, int]] = []  # identity of the optimizer, slot that it interrupted

        def forget(identity: int) -> None:
            # An exception inside `step` skips the post hook: what is still open of this optimizer is over.
            for index, (known, interrupted) in enumerate(open_steps):
                if known == identity or not recorder.in_step:
                    if recorder.in_step:
                        recorder.leave(OPTIMIZER, interrupted)
                    recorder.in_step = index
                    del open_steps[index:]
                    break

        def pre(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_dynamo_compiling():
                return None
            if open_steps or kwargs or len(args) > 1 or get_ident() != recorder.calm:
                return begin(optimizer, args, kwargs)
            open_steps.append((id(optimizer), recorder.current))
            recorder.in_step = 1
            recorder.current = OPTIMIZER
            log(clock() * WIDTH + OPTIMIZER)
            return None

        def begin(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if get_ident() != recorder.thread:
                recorder.claim_thread()
                if not recorder.on_training_thread():
                    if recorder.current == BACKWARD and in_backward() >= 0:
                        recorder.stepped_beside.append(id(optimizer))
                    return None
            try:
                if open_steps:
                    forget(id(optimizer))
                if not recorder.calm:
                    recorder.work_begins(by_optimizer=True)
                    if recorder.curious:
                        recorder.met.site("optimizer")
                        for look in (*on_step,):
                            recorder.guarded(look, optimizer)
                        recorder.met.optimizer_steps(optimizer)
                open_steps.append((id(optimizer), recorder.push(OPTIMIZER)))
                recorder.in_step += 1
            except Exception:  # noqa: BLE001 (a hook meets the script)
                recorder.broke(pre)
            if len(args) == 1 and not kwargs:
                return None
            named = "closure" in kwargs
            closure = kwargs["closure"] if named else args[1] if len(args) > 1 else None
            if not callable(closure) or not (named or isinstance(closure, CLOSURES)):
                return None
            ledgered = spanned(closure, recorder, always(GAP_AFTER_REST))
            if named:
                return args, {**kwargs, "closure": ledgered}
            return (args[0], ledgered, *args[2:]), kwargs

        def post(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if is_dynamo_compiling() or not open_steps or get_ident() != recorder.thread:
                return
            try:
                identity, interrupted = open_steps.pop()
                recorder.in_step = len(open_steps)
                if open_steps:
                    recorder.leave(OPTIMIZER, interrupted)
                else:
                    recorder.optimizer_stepped(identity, GAP if interrupted >= FIRST_GAP else interrupted)
            except Exception:  # noqa: BLE001 (a hook meets the script)
                recorder.broke(post)

        recorder.log.kept_by(pre)
        handles = register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
