"""What an action knows of the script's models and optimizers keeps none of them alive: once the script is
done with one, its memory is the script's again, at once.

So they are held weakly; what hangs on one may hold all the rest, as it goes with it. A generator that has
yielded holds what its variables do, a loop's last one among them: hence `entered`, and many a `del`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

T = TypeVar("T")


def unless_gone(call: Callable[..., Any], held: Any, *arguments: Any) -> Callable[[], Any]:
    """Returns what makes a call with an object, unless that is gone by then."""
    alive = weakref.ref(held)

    def late() -> Any:
        now = alive()
        return None if now is None else call(now, *arguments)

    return late


def entered(stack: ExitStack, contexts: Iterable[AbstractContextManager[T]]) -> list[T]:
    """Enters contexts one after the other; returns what they gave."""
    return [stack.enter_context(each) for each in contexts]


def emptied_with(held: Any, *owned: Any) -> weakref.ref[Any]:
    """Returns a weak reference to an object; when that goes, these containers are emptied."""

    def empty(_: weakref.ref[Any]) -> None:
        for each in owned:
            each.clear()

    return weakref.ref(held, empty)
