"""Has Dynamo tell when it compiles, through its own callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks.base import hidden, replaced


@contextmanager
def on_compilations(begins: Callable[..., None], ends: Callable[..., None]) -> Iterator[None]:
    """Has functions called, inside, when a compilation begins and when it has ended. An exception in one
    would fail the compilation."""
    from torch._dynamo.callback import callback_handler as handler

    def register() -> None:
        handler.register_start_callback(begins)
        handler.register_end_callback(ends)

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
        handler.remove_start_callback(begins)
        handler.remove_end_callback(ends)
