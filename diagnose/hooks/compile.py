"""Time in tracing and compiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.core.ledger import SLOT_OF
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, hidden, holding_up, replaced

COMPILE = SLOT_OF["compile"]


class CompileHook(Hook):
    """Charges Dynamo's compilations, and those of a lazy backward, to `compile`, through its own callbacks.

    On a GPU the latter are made in a thread of autograd's, for which the training thread waits.
    """

    requires = "torch._dynamo.callback"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        from torch._dynamo.callback import callback_handler as handler

        holds_up = holding_up(recorder)
        interrupted: list[int] = []

        def begin(*args: Any) -> None:
            if holds_up():
                interrupted.append(recorder.push(COMPILE))

        def end(*args: Any) -> None:
            if interrupted and holds_up():
                recorder.leave(COMPILE, interrupted.pop())
                recorder.event("compile")

        def register() -> None:
            # An exception in a callback would fail the compilation: `push` and `leave` raise none.
            handler.register_start_callback(begin)
            handler.register_end_callback(end)

        def wrap_clear(original: Any) -> Any:
            def clear(*args: Any) -> None:  # by `torch.compiler.reset()`
                original(*args)
                if installed:
                    register()

            return hidden(clear)

        installed = True
        register()
        try:
            with replaced(type(handler), "clear", wrap_clear):
                yield
        finally:
            installed = False
            handler.remove_start_callback(begin)
            handler.remove_end_callback(end)
