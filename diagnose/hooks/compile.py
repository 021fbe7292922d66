"""Time in tracing and compiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.core.ledger import COMPILE
from diagnose.hooks._dynamo import on_compilations
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, holding_up


class CompileHook(Hook):
    """Charges Dynamo's compilations, and those of a lazy backward, to `compile`, through its own callbacks.

    On a GPU the latter are made in a thread of autograd's, for which the training thread waits.
    """

    requires = "torch._dynamo.callback"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        holds_up = holding_up(recorder)
        interrupted: list[int] = []

        def begin(*args: Any) -> None:
            if holds_up():
                interrupted.append(recorder.push(COMPILE))

        def end(*args: Any) -> None:
            if interrupted and holds_up():
                recorder.leave(COMPILE, interrupted.pop())
                recorder.event("compile")

        with on_compilations(begin, end):  # `push` and `leave` raise nothing
            yield
